"""Entry points of device plugins, read from metadata alone: nothing of a plugin is imported here.

``importlib_metadata`` gives Python below 3.12 the API of today; from 3.12 the standard library has it, and
is faster.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from lmcache.v1.platform._records import ENTRY_POINT, PluginRecord

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata

__all__ = ["GROUP", "core_version", "entry_point_records"]

GROUP = "lmcache.device_plugins"


@functools.cache
def core_version() -> str:
    """Version of the core that runs: ``lmcache.__version__``, read by what reads the plugins' metadata."""
    try:
        return str(metadata.version("lmcache"))
    except metadata.PackageNotFoundError:
        return "0+unknown"


def entry_point_records() -> list[PluginRecord]:
    """One record per entry point of the group, in (name, value) order."""
    faults: list[PluginRecord] = []
    try:
        points = list(metadata.entry_points(group=GROUP))
    except Exception:  # one distribution with unreadable metadata spoils the scan of all
        points = list(_one_by_one(faults))
    records = {(p.name, p.value, _owner(p)[0]): p for p in points}  # one distribution may be found twice
    found = [_record(records[key]) for key in sorted(records)]
    return found + faults


def _record(point: Any) -> PluginRecord:
    distribution, version, requires = _owner(point)
    return PluginRecord(
        name=str(point.name),
        distribution=distribution,
        version=version,
        value=str(point.value),
        origin=ENTRY_POINT,
        requires=requires,
    )


def _owner(point: Any) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and requirements; the metadata file is parsed once for all three."""
    try:
        headers = point.dist.metadata
        name, version = headers["Name"], headers["Version"]
        return str(name or ""), str(version or ""), tuple(headers.get_all("Requires-Dist") or ())
    except Exception:  # no metadata file, or one that is no text: the plugin may be sound all the same
        return "", "", ()


def _one_by_one(faults: list[PluginRecord]) -> Iterator[Any]:
    """The group's entry points of every distribution that can be read; the others become ``faults``."""
    seen = set()
    for dist in metadata.distributions():
        name = ""
        try:
            name = str(dist.metadata["Name"] or "")
            if name.lower() in seen:  # shadowed by one that comes earlier on the path
                continue
            seen.add(name.lower())
            points = [point for point in dist.entry_points if point.group == GROUP]
        except Exception as exc:
            if GROUP in _entry_points_text(dist):
                faults.append(_fault(name, dist, exc))
            continue
        yield from points


def _fault(name: str, dist: Any, exc: Exception) -> PluginRecord:
    try:
        version = str(dist.version)
    except Exception:
        version = ""
    record = PluginRecord(name or "?", name, version, "", ENTRY_POINT)
    record.settle("metadata", "its entry_points.txt cannot be read", exc)
    return record


def _entry_points_text(dist: Any) -> str:
    try:
        return str(dist.read_text("entry_points.txt") or "")
    except Exception:
        return ""
