"""An observer: appends what a server tells it to a file, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from lmcache.v1.plugins import ServerHandle, hookimpl


def _append(event: str, fields: Mapping[str, Any]) -> None:
    path = os.environ.get("LMCACHE_HELLO_LOG")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


@hookimpl
def lmcache_server_started(server: ServerHandle) -> None:
    _append("started", {"address": server.address, "policy": server.status()["l1"]["policy"]})


@hookimpl
def lmcache_server_stopping(server: ServerHandle) -> None:
    _append("stopping", {"sessions": len(server.status()["sessions"])})


@hookimpl
def lmcache_observe(event: str, fields: Mapping[str, Any]) -> None:
    _append(event, fields)
