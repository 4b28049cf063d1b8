"""The documents for vendors and plugin authors say what the code says."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.wheels import write_distribution
from lmcache.v1.multiprocess.server import plugins as server_plugins
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform._records import REASONS, State
from lmcache.v1.platform.base.binding import BindingReport
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.base.device_ops import CONTRACT_TYPES, NATIVE_ABI, DeviceOps
from lmcache.v1.platform.base.device_spec import PLUGIN_API, DeviceSpec
from lmcache.v1.platform.base.event_ipc import EventIPCBackend
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache.v1.platform.base.op_contract import FORMAT_OPS, NATIVE_ONLY_OPS, OPS, STREAM_ORDERED_OPS
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend
from lmcache.v1.plugins import hookspecs

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTRACT = (DOCS / "vendors" / "contract.md").read_text()
GUIDE = (DOCS / "vendors" / "guide.md").read_text()
PAGES = [*sorted((DOCS / "vendors").glob("*.md")), DOCS / "plugins.md"]


def public(cls: type) -> set[str]:
    names = set(vars(cls)) | set(inspect.get_annotations(cls))
    return {name for name in names if not name.startswith("_")}


def rows(text: str) -> dict[str, list[str]]:
    """Rows of tables by each name in code in their first cell, without arguments."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in re.findall(r"`(\w+)[^`]*`", cells[0] if cells else ""):
            found.setdefault(name, cells[1:])
    return found


@pytest.mark.parametrize(
    "cls",
    [DeviceSpec, EventIPCBackend, DeviceIPCWrapper, BaseCacheContext, PinMemoryBackend, BindingReport],
)
def test_every_public_member_of_a_contract_is_documented(cls: type) -> None:
    missing = {name for name in public(cls) if f"`{name}" not in CONTRACT}
    assert missing - {"as_dict"} == set()


def test_every_member_of_the_ops_and_every_type_is_documented() -> None:
    assert {name for name in public(DeviceOps) | CONTRACT_TYPES if f"`{name}" not in CONTRACT} == set()


def test_every_op_is_documented_with_its_arguments_in_the_table_of_its_kind() -> None:
    ordered, other = CONTRACT.split("| other op |")
    for name, shape in OPS.items():
        arguments = " ".join(
            [*shape.required, *([f"[{' '.join(shape.optional)}]"] if shape.optional else [])]
        )
        table = rows(ordered if name in STREAM_ORDERED_OPS else other)
        assert table[name][0] == (arguments or "none"), name
        assert table[name][2] == ("by row" if name in FORMAT_OPS else "–"), name
        baseline = getattr(torch_ops, name, None)
        if baseline is not None:
            assert table[name][1] == (", ".join(sorted(getattr(baseline, "takes", ["tensors"]))) or "–"), name
        assert (table[name][1] == "no baseline") == (name in NATIVE_ONLY_OPS), name


def test_every_optional_op_is_explained() -> None:
    assert set(rows(CONTRACT.split("### Optional ops")[1].split("### Types")[0])) >= NATIVE_ONLY_OPS


def test_the_guide_explains_every_state_and_reason() -> None:
    table = rows(GUIDE)
    for code, (state, _) in REASONS.items():
        assert f"`{code}`" in table[state.value.partition("-")[0]][0], code
    assert {state.value for state in State} <= set(re.findall(r"^\| `([\w-]+)` \|", GUIDE, re.MULTILINE))


def test_the_versions_that_the_documents_name_are_those_of_the_code() -> None:
    text = (DOCS / "vendors" / "compatibility.md").read_text()
    assert f"`lmcache.v1.platform.base.device_spec.PLUGIN_API`, now {PLUGIN_API}" in text
    assert f"`lmcache.v1.platform.base.device_ops.NATIVE_ABI`, now {NATIVE_ABI}" in text


def test_every_hook_and_the_limits_of_the_server_are_documented() -> None:
    text = (DOCS / "plugins.md").read_text()
    hooks = [name for name in dir(hookspecs) if name.startswith("lmcache_")]
    assert [name for name in hooks if f"`{name}(" not in text] == []
    words = {10.0: "ten", 5.0: "five"}
    assert f"at most {words[server_plugins.START_SECONDS]} seconds" in text
    assert f"at most {words[server_plugins.STOP_SECONDS]}." in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_the_documents_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_the_backend_that_the_guide_writes_by_hand_is_found_and_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = re.search(r'^foo = "(.*)"$', GUIDE, re.MULTILINE)
    code = re.search(r"```python\n(from lmcache.*?)```", GUIDE, re.DOTALL)
    assert point
    assert code
    site = tmp_path / "site"
    write_distribution(site, "lmcache-foo", {"foo": point[1]}, {}, group="lmcache.device_plugins")
    (site / "lmcache_foo").mkdir()
    (site / "lmcache_foo" / "__init__.py").touch()
    (site / "lmcache_foo" / "spec.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(site))
    from lmcache.v1.platform import _device_detect

    _device_detect.reset()
    try:
        records: dict[str, Any] = {record.name: record for record in _device_detect.registry().records}
        assert records["foo"].distribution == "lmcache-foo"
        assert records["foo"].spec is not None, records["foo"].verdict()
        assert not records["foo"].spec.is_available()
    finally:
        _device_detect.reset()
        for name in ("lmcache_foo", "lmcache_foo.spec"):
            sys.modules.pop(name, None)
