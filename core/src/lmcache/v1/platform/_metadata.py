"""Entry points of device plugins, read from metadata alone: nothing of a plugin is imported here.

``importlib_metadata`` gives Python below 3.12 the API of today; from 3.12 the standard library has it, and
is faster. Of what either offers only the search for distributions is used, and their files are read here: its
``entry_points()`` parses those of every distribution, and fails as a whole if one of them cannot be read.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lmcache.v1.platform._records import ENTRY_POINT, PluginRecord

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata

__all__ = ["GROUP", "core_version", "entry_point_records"]

GROUP = "lmcache.device_plugins"
_POINTS = "entry_points.txt"


@functools.cache
def core_version() -> str:
    """Version of the core that runs: ``lmcache.__version__``, read by what reads the plugins' metadata."""
    dist = next(iter(metadata.distributions(name="lmcache")), None)
    return (_headers(dist)[1] if dist is not None else "") or "0+unknown"


def entry_point_records() -> list[PluginRecord]:
    """One record per entry point of the group, in (name, value) order."""
    found: dict[tuple[str, str, str], PluginRecord] = {}
    for dist in metadata.distributions():
        text = _read(dist, _POINTS)
        if GROUP in text:
            for record in _records(dist, text):  # one distribution may be found twice: on two paths
                found.setdefault((record.name, record.value, record.distribution), record)
    return [found[key] for key in sorted(found)]


def _records(dist: Any, text: str) -> list[PluginRecord]:
    name, version, requires = _headers(dist)
    if name and _read(next(iter(metadata.distributions(name=name)), dist), _POINTS) != text:
        return []  # another version of it comes earlier on the path, and hides this one as it does at import
    try:
        points = [(str(p.name), str(p.value)) for p in dist.entry_points if p.group == GROUP]
    except Exception as exc:
        record = PluginRecord(name or "?", name, version, "", ENTRY_POINT)
        record.settle("metadata", f"its {_POINTS} cannot be read", exc)
        return [record]
    return [PluginRecord(p, name, version, value, ENTRY_POINT, requires=requires) for p, value in points]


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
    name, version = ("".join(found[key][:1]) for key in ("name", "version"))
    return name, version, tuple(found["requires-dist"])


def _read(dist: Any, name: str) -> str:
    """A file of a distribution's metadata; empty if there is none, or if it is no text."""
    try:
        return dist.read_text(name) or ""
    except Exception:
        return ""
