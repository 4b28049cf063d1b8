"""Device plugins as their distributions announce them. Nothing of a plugin is imported here."""

from __future__ import annotations

import functools

from lmcache.v1.platform._records import ENTRY_POINT, PluginRecord, one_line
from lmcache.v1.utils.entry_points import EntryPoint, distribution_version, entry_points

__all__ = ["GROUP", "core_version", "entry_point_records"]

GROUP = "lmcache.device_plugins"


@functools.cache
def core_version() -> str:
    """Version of the core that runs: ``lmcache.__version__``, read by what reads the plugins' metadata."""
    return distribution_version("lmcache") or "0+unknown"


def entry_point_records() -> list[PluginRecord]:
    """One record per entry point of the group, in (name, value) order."""
    return [_record(point) for point in entry_points(GROUP)]


def _record(point: EntryPoint) -> PluginRecord:
    # They go into logs and errors from here on.
    name, distribution, version, value = map(
        one_line, (point.name, point.distribution, point.version, point.value)
    )
    record = PluginRecord(name, distribution, version, value, ENTRY_POINT, requires=point.requires)
    if name != point.name:
        record.settle("name", f"its entry point is named {point.name!r}: expected a plain lowercase word")
    if point.fault:
        record.settle("metadata", point.fault, point.error)
    return record
