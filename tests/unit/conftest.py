"""Fixtures that several modules use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.made_plugins import Install
from helpers.wheels import write_distribution


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a made-up distribution on the path; what it imports is forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("LMCACHE_DISABLE_PLUGINS", raising=False)
    before = set(sys.modules)

    def put(name: str, points: dict[str, str], text: str = "", **more: Any) -> None:
        module = next(iter(points.values())).partition(":")[0]
        write_distribution(site, name, points, {module: text}, **more)

    yield put
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(site) in str(sys.modules[module].__file__):
            del sys.modules[module]
