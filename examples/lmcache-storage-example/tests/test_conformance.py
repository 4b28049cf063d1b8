"""LMCache's conformance suite, on a new file per test; and the hook, as LMCache calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_storage_example.plugin import lmcache_storage_adapters

from lmcache.errors import ConfigError, StartupError
from lmcache.testing.adapters import AdapterConformance
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.registry import build


class TestSqlite(AdapterConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.spec = {"type": "sqlite", "path": str(tmp_path / "objects.db")}

    def make(self) -> StorageAdapter:
        return build(self.spec, lmcache_storage_adapters())


def test_mistakes_are_one_line() -> None:
    makers = lmcache_storage_adapters()
    with pytest.raises(ConfigError, match="did you mean path"):
        build({"type": "sqlite", "pth": "x"}, makers)
    with pytest.raises(StartupError, match="unable to open"):
        build({"type": "sqlite", "path": "/nowhere/at/all.db"}, makers)
