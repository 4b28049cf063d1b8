"""The server's side of plugins: their policies, and a thread that tells them what happened.

Hooks never run on the request loop or under its lock: they run here, one after the other. What waits for them
has a bound, and a hook that never returns keeps nothing but this thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from lmcache.errors import StartupError
from lmcache.logging import init_logger
from lmcache.v1.plugins import PluginHost, PluginRecord, ServerHandle
from lmcache.v1.plugins.adapters import external_adapters
from lmcache.v1.plugins.host import announces_verb
from lmcache.v1.storage.eviction import EvictionPolicy, GuardedPolicy
from lmcache.v1.storage.policies import BUILT_IN

logger = init_logger(__name__)

START_SECONDS = 10.0
STOP_SECONDS = 5.0
_MAX_WAITING = 1000

_Task = Callable[[], None]


class ServerPlugins:
    """All that the server has to do with plugins. ``close`` ends the thread, or gives it up."""

    def __init__(self, host: PluginHost | None = None) -> None:
        self.host = PluginHost(wanted=lambda point: not announces_verb(point)) if host is None else host
        self._policies = self.host.collect("lmcache_eviction_policies", taken=BUILT_IN)
        self.adapters = external_adapters(self.host)
        """What makes the storage adapters that plugins offer, by type."""
        self._tasks: queue.Queue[_Task | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="lmcache-plugins", daemon=True)
        self._dropped = 0
        self._told: dict[str, int] = {}
        hooks = ("lmcache_observe", "lmcache_server_started", "lmcache_server_stopping")
        if any(map(self.host.listens, hooks)):
            self._thread.start()

    # ---- eviction

    @property
    def policies(self) -> list[str]:
        """Every name that ``--eviction-policy`` takes."""
        return [*BUILT_IN, *self._policies]

    def make_policy(self, name: str) -> EvictionPolicy:
        """A new policy; one of a plugin behind a guard that puts LRU in its place when it raises.

        Raises:
            StartupError: if the plugin does not deliver what it offers.
        """
        if name in BUILT_IN:
            return BUILT_IN[name]()
        make, record = self._policies[name]
        try:
            policy = make()
            fault = "" if isinstance(policy, EvictionPolicy) else f"it makes a {type(policy).__name__}"
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            fault = f"it raises {type(exc).__name__}: {exc}"
        if fault:
            raise StartupError(
                f"--eviction-policy {name!r} of {record.point.source}: {fault}: expected an EvictionPolicy;"
                " use LRU until that is mended"
            )
        return GuardedPolicy(policy, lambda method, exc: self._policy_failed(name, record, method, exc))

    def _policy_failed(self, name: str, record: PluginRecord, method: str, exc: BaseException) -> None:
        self.host.unplug(record, f"eviction policy {name}, {method}", exc)
        logger.error("eviction policy %s failed; LRU from here on", name)

    # ---- events

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Tell the observers, later and elsewhere. Never waits; what the queue cannot hold is dropped."""
        if not self.host.listens("lmcache_observe"):
            return
        frozen = MappingProxyType(dict(fields))
        try:
            self._tasks.put_nowait(lambda: self.host.broadcast("lmcache_observe", event=event, fields=frozen))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("plugins: observers are slow (now %s); events are dropped", self.host.calling)

    def count(self, totals: Mapping[str, int]) -> None:
        """Tell the observers of counters that changed since the last call."""
        if totals != self._told:
            self._told = dict(totals)
            self.emit("counters", totals)

    def started(self, server: ServerHandle, stop: threading.Event) -> None:
        """Call the hook and wait for it, unless told to stop meanwhile."""
        self._wait_for("lmcache_server_started", server, START_SECONDS, stop)

    def stopping(self, server: ServerHandle) -> None:
        """Call the hook, after the events that still wait, and wait for it."""
        self._wait_for("lmcache_server_stopping", server, STOP_SECONDS, threading.Event())

    def close(self) -> None:
        """End the thread once it has done what waits, if that does not take long."""
        if not self._thread.is_alive():
            return
        try:
            self._tasks.put_nowait(None)
            self._thread.join(1.0)
        except queue.Full:
            pass  # a hook hangs; the thread ends with the process

    def _wait_for(self, hook: str, server: ServerHandle, seconds: float, stop: threading.Event) -> None:
        if not self.host.listens(hook):
            return
        done = threading.Event()

        def call() -> None:
            try:
                self.host.broadcast(hook, server=server)
            finally:
                done.set()

        deadline = time.monotonic() + seconds
        try:
            self._tasks.put(call, timeout=seconds)
            while not (done.wait(0.05) or stop.is_set()):
                if time.monotonic() > deadline:
                    raise queue.Full
        except queue.Full:
            who = self.host.calling or "a plugin"
            logger.warning("plugins: %s has not returned from %s within %g s; going on", who, hook, seconds)

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            task()


def refused_policies(records: Iterable[PluginRecord]) -> str:
    """For the message about an unknown policy: the plugins that might have had it."""
    failed = [f"{r.point.name} ({r.state})" for r in records if r.state not in ("loaded", "found")]
    return f"; plugins that are not loaded: {', '.join(failed)}" if failed else ""
