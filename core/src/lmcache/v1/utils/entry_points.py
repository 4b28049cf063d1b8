"""Entry points of installed distributions, read from metadata alone: nothing of a plugin is imported here.

``importlib_metadata`` gives Python below 3.12 the API of today; from 3.12 on the standard library has it. Of
either only the search for distributions is used: its ``entry_points()`` parses the files of all of them, and
fails as a whole if one cannot be read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata

__all__ = [
    "DISABLE_VARIABLE",
    "EntryPoint",
    "blocked_names",
    "distribution_version",
    "entry_points",
    "is_blocked",
    "normal_name",
    "target",
]

DISABLE_VARIABLE = "LMCACHE_DISABLE_PLUGINS"
_POINTS = "entry_points.txt"


@dataclass(frozen=True)
class EntryPoint:
    """What one entry point and the distribution that has it say of themselves."""

    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    """The distribution's requirements, as written."""
    fault: str = ""
    """Why the distribution's entry points cannot be read; then this stands for all of them."""
    error: BaseException | None = field(default=None, compare=False)
    """What reading them raised."""

    @property
    def source(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution or 'an unnamed distribution'} {self.version}".strip()


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of ``group`` in the order of (name, value, distribution). None of them is imported."""
    found: dict[tuple[str, str, str], EntryPoint] = {}
    for dist in metadata.distributions():
        if group in (text := _read(dist, _POINTS)):
            for point in _of(dist, group, text):  # one distribution may be found twice: on two paths
                found.setdefault((point.name, point.value, point.distribution), point)
    return [found[key] for key in sorted(found)]


def distribution_version(name: str) -> str:
    """Version of the installed distribution ``name``; empty if there is none."""
    dist = next(iter(metadata.distributions(name=name)), None)
    return _headers(dist)[1] if dist is not None else ""


def blocked_names() -> frozenset[str]:
    """What LMCACHE_DISABLE_PLUGINS lists: names of plugins or of distributions, separated by commas."""
    listed = os.environ.get(DISABLE_VARIABLE, "").split(",")
    return frozenset(normal_name(part) for part in listed if part.strip())


def is_blocked(point: EntryPoint, blocked: frozenset[str]) -> bool:
    """Whether the operator disabled this plugin, by its own name or that of its distribution."""
    return bool(blocked & {normal_name(point.name), normal_name(point.distribution)})


def normal_name(name: str) -> str:
    """A name as names are compared: without regard to case, and to ``-`` or ``_``."""
    return name.strip().lower().replace("_", "-")


def target(value: str) -> tuple[str, list[str]]:
    """The module, and the attributes in it, that the value of an entry point names; extras are left out.

    Not by the metadata library: what it makes of an odd value depends on its version.
    """
    module, _, attributes = value.partition("[")[0].partition(":")
    return module.strip(), [part for part in attributes.strip().split(".") if part]


def _of(dist: Any, group: str, text: str) -> Iterator[EntryPoint]:
    name, version, requires = _headers(dist)
    first = next(iter(metadata.distributions(name=name)), dist) if name else dist
    if _read(first, _POINTS) != text:
        return  # another version of it comes earlier on the path, and hides this one as it does at import
    try:
        points = [(str(p.name), str(p.value)) for p in dist.entry_points if p.group == group]
    except Exception as exc:
        yield EntryPoint(name or "?", "", name, version, requires, f"its {_POINTS} cannot be read", exc)
        return
    for point, value in points:
        yield EntryPoint(point, value, name, version, requires)


def _headers(dist: Any) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and requirements, of the lines before the first blank one.

    The library's own properties parse the file with the ``email`` package, once for each of them; to import
    that takes longer than to read the metadata of a hundred distributions.
    """
    found: dict[str, list[str]] = {"name": [], "version": [], "requires-dist": []}
    for line in (_read(dist, "METADATA") or _read(dist, "PKG-INFO")).splitlines():
        key, _, value = line.partition(":")
        if not line.strip():
            break
        if key.lower() in found:
            found[key.lower()].append(value.strip())
    return "".join(found["name"][:1]), "".join(found["version"][:1]), tuple(found["requires-dist"])


def _read(dist: Any, name: str) -> str:
    """A file of a distribution's metadata; empty if there is none, or if it is no text."""
    try:
        return str(dist.read_text(name) or "")
    except Exception:
        return ""
