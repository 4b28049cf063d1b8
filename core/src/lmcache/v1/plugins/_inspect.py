"""What runs in the child process of ``survey``: the loading of plugins, which any of them may not survive."""

from __future__ import annotations

import json
import os
from typing import Any

from lmcache.v1.plugins.host import PluginHost
from lmcache.v1.utils.entry_points import EntryPoint

__all__ = ["key_of", "main"]

_SEPARATOR = "\x1f"


def key_of(point: EntryPoint) -> str:
    """What tells an entry point from all others, the same in parent and child."""
    return _SEPARATOR.join((point.name, point.value, point.distribution))


def main(pipe: int, task: str) -> None:
    """Load every plugin but those of ``task["skip"]``; tell each step, and in the end the records."""
    skip = set(json.loads(task)["skip"])

    def tell(**line: Any) -> None:
        os.write(pipe, (json.dumps(line) + "\n").encode())

    host = PluginHost(
        wanted=lambda point: key_of(point) not in skip,
        report=lambda record: None,
        observe=lambda point: tell(key=key_of(point), step="import"),
    )
    tell(records=[record.as_dict() for record in host.records])
