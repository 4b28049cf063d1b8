"""One server without HTTP and signals: storage, service, request loop and the door to the pool, in the right order."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from lmcache.v1.multiprocess.host import boot_id
from lmcache.v1.multiprocess.server.attach import AttachServer
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.loop import RequestLoop
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.plugins import ServerPlugins
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.multiprocess.server.sessions import Peer
from lmcache.v1.multiprocess.server.tiers import build_adapters, close_adapters
from lmcache.v1.protocol.messages import Attach
from lmcache.v1.storage.shm_pool import ShmPool

__all__ = ["Assembly"]


class Assembly:
    """Claims and reserves what a server needs; ``run`` serves, ``close`` gives everything back.

    Args:
        config: Settings, checked.
        plugins: Policies, adapters and observers. They stay the caller's.
        host: Where to listen: an address of this host, for ``config.port``; or ``ipc://…``.
        stop: Ends reserving and serving once it is set.

    Raises:
        ConfigError: For a bad setting. StartupError: If an address or the memory cannot be had.
        In both cases nothing is left behind.
    """

    def __init__(
        self, config: ServerConfig, plugins: ServerPlugins, host: str, stop: threading.Event
    ) -> None:
        policy = plugins.make_policy(config.eviction_policy)
        self.config = config
        self.lock = threading.Lock()
        self.metrics = Metrics()
        self._plugins = plugins
        self._stop = stop
        with ExitStack() as cleanup:
            adapters = build_adapters(config.l2_adapter, plugins.adapters)
            untaken = cleanup.enter_context(ExitStack())
            untaken.callback(close_adapters, adapters)
            self.loop = RequestLoop(host, config.port, self.metrics)
            cleanup.callback(self.loop.close)
            began = time.monotonic()
            self.pool = ShmPool(config.l1_bytes, config.shm_name or None, stop)
            cleanup.callback(self.pool.close)
            self.reserve_seconds = time.monotonic() - began

            address = config.shm_socket or f"@lmcache-{secrets.token_hex(8)}"
            attach = None
            if config.shm != "off":
                attach = Attach(socket=address, host=boot_id(), data_bytes=self.pool.view.data_bytes)
            self.service = Service(
                config, self.pool.view, attach, self.metrics, policy, plugins.emit, self.lock, adapters
            )
            untaken.pop_all()  # the store closes them
            cleanup.callback(self.service.store.close, config.l2_flush_seconds)
            if attach is not None:
                door = AttachServer(address, self.pool.fd, *_attach_callbacks(self.service, self.lock))
                cleanup.callback(door.close)
                door.start()
            # Before the door: who sees it close takes it that nothing writes to his memory any more.
            cleanup.callback(self.service.devices.close)
            cleanup.callback(self.service.peers.close)
            self._cleanup = cleanup.pop_all()

    def run(self) -> None:
        """Serve until ``stop`` is set; then let transfers under way end, for a bounded time."""
        self.loop.run(self.service, self.lock, self._stop, self._sweep)

    def close(self) -> None:
        """Write what waits for tiers, within the configured time, and let go of everything."""
        self._cleanup.close()

    def _sweep(self) -> None:
        with self.lock:
            limit = time.monotonic() - self.config.session_timeout
            for session in self.service.sessions.silent_since(limit):
                self.service.drop_session(session.id, dead=False)
            self.service.peers.sweep(self.loop.reaches, partial(self.service.drop_session, dead=True))
            totals = asdict(self.service.l1.counters)
        self._plugins.count(totals)


def _attach_callbacks(
    service: Service, lock: threading.Lock
) -> tuple[Callable[[str, bool, Peer], str | None], Callable[[str], None]]:
    def on_attach(ident: str, want_fd: bool, peer: Peer) -> str | None:
        with lock:
            session = service.sessions.by_id.get(ident)
            if session is None:
                return "session unknown; say hello first"
            session.mapped = session.mapped or want_fd
            session.peer = peer
            return None

    def on_gone(ident: str) -> None:
        with lock:
            service.drop_session(ident, dead=True)

    return on_attach, on_gone
