"""The hooks. A plugin implements those that it needs, with as many of the arguments as it wants.

Each plugin is called on its own: what one raises costs that plugin only. Hook wrappers are refused, because
they would stand around the calls of others. No hook is called on the way of a request.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from lmcache.v1.storage.eviction import EvictionPolicy
    from lmcache.v1.storage.l2.adapter import StorageAdapter

__all__ = ["PROJECT", "ServerHandle", "Verb", "hookimpl"]

PROJECT = "lmcache"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook of the same name."""


class Verb(Protocol):
    """A verb of the command line: a module or an object, like those below ``lmcache.cli.verbs``."""

    HELP: str
    """One line for ``lmcache VERB --help``."""

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code: 0 done, 1 failed, 2 wrong usage. An ``LMCacheError`` becomes one line."""


@dataclass(frozen=True)
class ServerHandle:
    """What a running server shows to plugins. Nothing in it can change the server."""

    address: str
    """Of the request port, ``tcp://HOST:PORT``."""
    http: str
    epoch: str
    """Another one after every start."""
    chunk_size: int
    pid: int
    status: Callable[[], Mapping[str, Any]]
    """The state that ``/status`` shows, as of the call. May be called from any thread; costs milliseconds."""


@hookspec
def lmcache_cli_verbs() -> Mapping[str, Verb]:
    """Verbs by name. The entry point ``cli.NAME`` announces the verb NAME and must deliver it here.

    Called when that verb is typed, in no other process. A built-in verb is never replaced.
    """
    raise NotImplementedError


@hookspec
def lmcache_eviction_policies() -> Mapping[str, Callable[[], EvictionPolicy]]:
    """Makers of eviction policies by the name for ``--eviction-policy``; ``LRU`` and ``noop`` stay ours.

    Called once when a server starts; the maker is called if its name was asked for.
    """
    raise NotImplementedError


@hookspec
def lmcache_storage_adapters() -> Mapping[str, Callable[[Mapping[str, Any]], StorageAdapter]]:
    """Makers of storage adapters (the tiers behind L1) by the ``type`` for ``--l2-adapter``.

    A maker gets the operator's options without ``type`` and raises ``ConfigError`` for a bad one, ``StartupError``
    if the engine cannot be had. Called once when a server starts; a maker is called if its type was asked for. A
    built-in type is never replaced. What an adapter promises: ``lmcache.v1.storage.l2.adapter``, tested by
    ``lmcache.testing.adapters``; see ``docs/storage/external.md``.
    """
    raise NotImplementedError


@hookspec
def lmcache_server_started(server: ServerHandle) -> None:
    """The server is bound and its memory reserved; it answers and says ready once all plugins returned.

    It waits at most ten seconds for them. Called in a thread that all server hooks share.
    """


@hookspec
def lmcache_server_stopping(server: ServerHandle) -> None:
    """The server has answered its last request and is about to leave; it waits at most five seconds."""


@hookspec
def lmcache_observe(event: str, fields: Mapping[str, Any]) -> None:
    """Something happened. Called in the plugins' thread, after the fact, in order; ``fields`` is read-only.

    * ``session_opened``, ``session_closed``: ``role``, ``engine``, ``rank``, ``client``;
    * ``engine_registered``: ``engine``, ``rank``, ``ranks``, ``model``, ``groups``, ``mapped``;
    * ``counters``, at most once a second and only after a change: ``stored``, ``evicted``, ``duplicates``,
      ``aborted``, ``dropped_full``, each a total since the start.

    Later releases may add events and fields: ignore what you do not know. When observers are so slow that a
    thousand events wait, further ones are dropped. One that raises is recorded and never called again.
    """
