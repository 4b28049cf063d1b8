"""What the entry point names: the hook that offers the adapter. The adapter is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmcache.v1.plugins import hookimpl
from lmcache.v1.storage.l2.adapter import StorageAdapter


def _make(options: Mapping[str, Any]) -> StorageAdapter:
    from lmcache_storage_example.adapter import make

    return make(options)


@hookimpl
def lmcache_storage_adapters() -> Mapping[str, Callable[[Mapping[str, Any]], StorageAdapter]]:
    """Our type, by the name for ``--l2-adapter``."""
    return {"sqlite": _make}
