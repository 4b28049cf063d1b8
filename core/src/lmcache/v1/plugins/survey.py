"""What became of every plugin, asked of a child process: a plugin that kills it, or lets it hang, is one row."""

from __future__ import annotations

from typing import Any

from lmcache.errors import LMCacheError
from lmcache.v1.platform.diagnosis import run_child
from lmcache.v1.plugins._inspect import key_of
from lmcache.v1.plugins.host import GROUP
from lmcache.v1.plugins.records import PluginRecord
from lmcache.v1.utils.entry_points import entry_points

__all__ = ["survey"]

DEFAULT_SECONDS = 20.0


def survey(seconds: float = DEFAULT_SECONDS) -> list[dict[str, Any]]:
    """Every plugin's record (``PluginRecord.as_dict``), in the order of entry points.

    Args:
        seconds: how long a plugin's import may take before it counts as hung.

    Raises:
        LMCacheError: the child process fails for a reason that is no plugin's.
    """
    dead: dict[str, str] = {}
    while True:
        end = run_child({"skip": list(dead)}, seconds, "lmcache.v1.plugins._inspect")
        if end.result is not None:
            break
        if not end.key or end.key in dead:
            raise LMCacheError(f"looking at plugins failed: {end.fault}")
        dead[end.key] = f"{end.fault} while it was imported"
    told: list[dict[str, Any]] = end.result["records"]
    for point in entry_points(GROUP):
        if fault := dead.get(key_of(point)):
            record = PluginRecord(point)
            record.settle("import-failed", fault)
            told.append(record.as_dict())
    return sorted(told, key=lambda record: (record["name"], record["value"], record["distribution"]))
