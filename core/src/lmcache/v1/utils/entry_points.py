"""Entry points of installed distributions, read from metadata alone: nothing of a plugin is imported here.

``importlib_metadata`` gives Python below 3.12 the API of today; from 3.12 on the standard library has it, and
is faster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata

__all__ = ["DISABLE_VARIABLE", "EntryPoint", "blocked_names", "entry_points", "is_blocked"]

DISABLE_VARIABLE = "LMCACHE_DISABLE_PLUGINS"


@dataclass(frozen=True)
class EntryPoint:
    """What one entry point and the distribution that has it say of themselves."""

    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    """The distribution's requirements, as written."""

    @property
    def source(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution or 'an unnamed distribution'} {self.version}".strip()


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of ``group``, in the order of (name, value, distribution). Never raises."""
    try:
        points = list(metadata.entry_points(group=group))
    except Exception:  # one distribution with unreadable metadata spoils the scan of all
        points = list(_one_by_one(group))
    found = {_described(point) for point in points}  # one distribution may be found twice
    return sorted(found, key=lambda point: (point.name, point.value, point.distribution))


def blocked_names() -> frozenset[str]:
    """What LMCACHE_DISABLE_PLUGINS lists: names of plugins or of distributions, separated by commas."""
    listed = os.environ.get(DISABLE_VARIABLE, "").split(",")
    return frozenset(_normal(part) for part in listed if part.strip())


def is_blocked(point: EntryPoint, blocked: frozenset[str]) -> bool:
    """Whether the operator disabled this plugin, by its own name or that of its distribution."""
    return bool(blocked & {_normal(point.name), _normal(point.distribution)})


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _described(point: Any) -> EntryPoint:
    try:
        headers = point.dist.metadata
        owner = str(headers["Name"] or ""), str(headers["Version"] or "")
        return EntryPoint(
            point.name, point.value, *owner, tuple(map(str, headers.get_all("Requires-Dist") or ()))
        )
    except Exception:  # no metadata file, or one that is no text: the plugin may be sound all the same
        return EntryPoint(str(point.name), str(point.value), "", "")


def _one_by_one(group: str) -> Iterator[Any]:
    seen: set[str] = set()
    for dist in metadata.distributions():
        try:
            name = _normal(str(dist.metadata["Name"] or ""))
            points = [point for point in dist.entry_points if point.group == group]
        except Exception:  # noqa: S112 - what cannot be read announces nothing
            continue
        if name not in seen:  # else shadowed by one that comes earlier on the path
            yield from points
        seen.add(name)
