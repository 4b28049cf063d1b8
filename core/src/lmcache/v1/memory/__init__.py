"""Host memory: ranges, arenas, memory objects and their allocators.

The names of ``lmcache.v1.memory_management`` are importable from here, too; resolved on first access, so that those
who want ranges alone do not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    names = import_module("lmcache.v1.memory.names")
    if name in names.__all__:
        return getattr(names, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = import_module("lmcache.v1.memory.names")
    return sorted({*globals(), *names.__all__})
