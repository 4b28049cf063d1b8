"""Is a plugin made for this core? Its requirement on lmcache, its pin of the plugin API, and what each verdict says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from lmcache.v1.platform._compat import _plainly_allows, api_mismatch, range_mismatch
from lmcache.v1.platform._records import ENTRY_POINT, REASONS, PluginRecord


@pytest.mark.parametrize(
    ("requirement", "core", "command"),
    [
        ("lmcache", "1.0.0", None),
        ("lmcache>=1,<2", "1.3.0", None),
        ("lmcache>=1.0", "1.1.0rc1", None),
        ("LMCache [cpu] (>=1.0)", "1.0.0", None),
        ("lmcache>=99", "1.0.0", "pip install 'lmcache>=99'"),
        ("lmcache~=1.2", "1.1", "pip install 'lmcache~=1.2'"),
        ("lmcache==2.*", "1.0", "pip install 'lmcache==2.*'"),
        ("lmcache>=0.4,<0.6", "1.0.0", "pip install -U dist"),
        ("lmcache!=1.0.0", "1.0.0", "pip install -U dist"),
        ("lmcache>=99; extra == 'x'", "1.0.0", None),
        ("lmcache>=99; python_version < '3'", "1.0.0", None),
        ("lmcache-cuda>=99", "1.0.0", None),
        ("lmcache >>> 3", "1.0.0", None),
        ("lmcache>=99", "0+unknown", None),
    ],
)
def test_a_requirement_on_the_core_is_evaluated(requirement: str, core: str, command: str | None) -> None:
    found = range_mismatch(["numpy>1", requirement], "dist", core)
    assert (found and found[1]) == command
    if found:
        assert f"lmcache {core} runs" in found[0]


@given(
    st.lists(
        st.tuples(st.sampled_from([">=", "<=", ">", "<"]), st.from_regex(r"\A[0-3](\.[0-2]){0,2}\Z")),
        max_size=3,
    ),
    st.from_regex(r"\A[0-3](\.[0-2]){0,2}\Z"),
)
def test_the_short_way_through_a_plain_requirement_agrees_with_packaging(
    clauses: list[tuple[str, str]], core: str
) -> None:
    text = ", ".join(f"{sign} {bound}" for sign, bound in clauses)
    assert _plainly_allows(f"lmcache {text}", core) == SpecifierSet(text).contains(core)


@pytest.mark.parametrize(
    "line", ["lmcache>=1 ; extra == 'x'", "lmcache-cuda>=1", "lmcache==1.0", "lmcache>=1rc1"]
)
def test_the_short_way_leaves_what_is_not_plain_to_packaging(line: str) -> None:
    assert not _plainly_allows(line, "1.0")
    assert not _plainly_allows("lmcache>=1", "1.0rc1")


@pytest.mark.parametrize(
    ("pin", "command"),
    [
        ((1, 0), None),
        ((1, 1), None),
        ((1, 2), "pip install -U lmcache"),
        ((2, 0), "pip install -U lmcache"),
        ((0, 9), "pip install -U dist"),
    ],
)
def test_a_pin_of_the_plugin_api_is_compared(pin: tuple[int, int], command: str | None) -> None:
    found = api_mismatch(pin, "dist", "1.0.0")
    assert (found and found[1]) == command
    if found:
        assert f"plugin API {pin[0]}.{pin[1]}, and lmcache 1.0.0 has 1.1" in found[0]


def test_every_reason_has_a_state_and_a_remedy_that_can_be_filled_in() -> None:
    for code in REASONS:
        told = PluginRecord("foo", "lmcache-foo", "0.1", "m:C", ENTRY_POINT)
        told.settle(code, "a\nnote", ValueError("x"), command="pip", other="lmcache-bar", older="lmcache")
        assert (told.code, told.note, told.state) == (code, "a note", REASONS[code][0])
        assert "{" not in told.remedy
        assert "ValueError: x" in told.traceback
