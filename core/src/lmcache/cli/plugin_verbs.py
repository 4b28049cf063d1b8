"""Verbs that plugins bring: named by metadata, loaded when one of them is typed.

The name of an entry point in ``lmcache.plugins`` announces the verb: ``cli.hello`` is ``lmcache hello``. So
help costs a look at metadata and no plugin is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache.errors import LMCacheError
from lmcache.v1.utils.entry_points import EntryPoint, blocked_names, entry_points, is_blocked

if TYPE_CHECKING:
    from lmcache.v1.plugins import PluginRecord

GROUP = "lmcache.plugins"
_NAME = re.compile(r"cli\.([a-z][a-z0-9-]{0,31})", re.ASCII)


def announced(taken: Collection[str]) -> Mapping[str, EntryPoint]:
    """The verbs that plugins announce, and the first that announces each, without those in ``taken``."""
    blocked = blocked_names()
    found: dict[str, EntryPoint] = {}
    for point in entry_points(GROUP):
        name = _NAME.fullmatch(point.name)
        if name and name[1] not in taken and not is_blocked(point, blocked):
            found.setdefault(name[1], point)
    return found


def load(name: str, taken: Collection[str]) -> tuple[Any, PluginRecord]:
    """The verb called ``name``, from the first plugin that announces it and can be loaded.

    Raises:
        LMCacheError: if none delivers it; says what became of each.
    """
    from lmcache.v1.plugins import PluginHost

    host = PluginHost(wanted=lambda point: point.name == f"cli.{name}", report=lambda record: None)
    offers = host.collect("lmcache_cli_verbs", taken=dict.fromkeys(taken))
    if name in offers:
        return offers[name]
    for record in host.records:
        if record.state == "loaded":
            record.settle("invalid", f"lmcache_cli_verbs does not return {name!r}, which it announces")
    raise LMCacheError("; ".join(record.verdict() for record in host.records if record.state != "blocked"))


@contextmanager
def blame(record: PluginRecord) -> Iterator[None]:
    """Run code of a plugin's verb: a fault that is not meant for the user becomes one line that names it."""
    try:
        yield
    except (LMCacheError, KeyboardInterrupt, BrokenPipeError, SystemExit):
        raise
    except BaseException as exc:
        record.settle("unplugged", "its verb failed", exc)
        raise LMCacheError(record.verdict()) from exc
