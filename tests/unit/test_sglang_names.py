"""SGLang finds every name, attribute and signature that its releases use (``tools/sglang_names.py`` reads them)."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_names import used

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("sglang_names.json").read_text())
RECORDS = "lmcache.integration.sglang.lmcache_mp_metadata"


def cases(what: str) -> list[Any]:
    return [
        pytest.param(release, name, value, id=f"{version}-{name}")
        for version, release in sorted(TABLE.items())
        for name, value in release[what].items()
    ]


def our(release: dict[str, Any], name: str) -> Any:
    """A class by its name: where SGLang imports it from, or among the records."""
    module = next((m for m, names in release["modules"].items() if name in names), RECORDS)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("release", "name", "value"), cases("modules"))
def test_every_module_has_the_names_that_are_imported(
    release: dict[str, Any], name: str, value: list[str]
) -> None:
    module = importlib.import_module(name)
    assert [one for one in value if not hasattr(module, one)] == []


def has(cls: Any, name: str) -> bool:
    fields_of = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    set_in_code = re.findall(r"\bself\.(\w+) = ", inspect.getsource(cls))
    return name in {*fields_of, *set_in_code} or hasattr(cls, name)


@pytest.mark.parametrize(("release", "name", "value"), cases("attributes"))
def test_every_class_has_the_attributes_that_are_used(
    release: dict[str, Any], name: str, value: list[str]
) -> None:
    classes = [our(release, one) for one in name.split("|")]
    assert [one for one in value if not any(has(cls, one) for cls in classes)] == []


@pytest.mark.parametrize(("release", "name", "value"), cases("calls"))
def test_every_call_fits_the_signature(release: dict[str, Any], name: str, value: list[Any]) -> None:
    names, _, method = name.partition(".")
    classes = [our(release, one) for one in names.split("|")]
    targets = [cls for cls in classes if not method or hasattr(cls, method)]
    assert targets
    for target in targets:
        bound = not method or isinstance(inspect.getattr_static(target, method), staticmethod)
        signature = inspect.signature(getattr(target, method) if method else target)
        for positional, keywords in value:
            args = [None] * (positional + (not bound))
            signature.bind(*args, **dict.fromkeys(keywords))  # raises TypeError where it does not fit


def test_the_tool_sees_what_a_source_uses() -> None:
    found = used(
        "from lmcache.x import YConnector, Meta\n"
        "self.lmcache_connector = YConnector(a=1)\n"
        "self.lmcache_connector.go(Meta(1, b=2), c=3)\n"
        "flow.load.result\n"
    )
    assert found["modules"] == {"lmcache.x": ["Meta", "YConnector"]}
    assert found["attributes"]["YConnector"] == ["go"]
    assert found["attributes"]["LMCacheLoadOperation"] == ["result"]
    assert found["calls"] == {"Meta": [[1, ["b"]]], "YConnector": [[0, ["a"]]], "YConnector.go": [[1, ["c"]]]}
