"""Distributions with plugins of ``lmcache.plugins``, made up by a test. The fixture ``install`` puts them there."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.v1.multiprocess.server.plugins import ServerPlugins

HEAD = "from lmcache.v1.plugins import hookimpl\n"
Install = Callable[..., None]


def plugins_with(install: Install, text: str) -> ServerPlugins:
    install("server-side", {"server-side": "server_side"}, HEAD + text)
    return ServerPlugins()
