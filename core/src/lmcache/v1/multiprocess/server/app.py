"""Puts the server together: claims, reserves, serves, drains."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.host import boot_id
from lmcache.v1.multiprocess.server.attach import AttachServer
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.http import HttpServer, claim
from lmcache.v1.multiprocess.server.loop import RequestLoop
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.protocol.messages import Attach
from lmcache.v1.storage.shm_pool import ShmPool, sweep_stale_segments

logger = init_logger(__name__)


def _gauges(metrics: Metrics, service: Service, lock: threading.Lock) -> None:
    def read(field: str) -> Callable[[], float]:
        def value() -> float:
            with lock:
                return float(service.l1.usage()[field])

        return value

    metrics.watch("l1_memory_usage_bytes", "bytes of L1 in use", read("used_bytes"))
    metrics.watch("l1_capacity_bytes", "bytes of L1", read("capacity_bytes"))
    metrics.watch("l1_objects", "objects in L1", read("objects"))
    metrics.watch("l1_read_leases", "read leases held by clients", read("read_leases"))
    metrics.watch("l1_write_leases", "write leases held by clients", read("write_leases"))
    metrics.watch("l1_evicted", "objects evicted so far", lambda: float(service.l1.counters.evicted))
    metrics.watch("l1_allocation_failure", "objects refused for want of room so far", lambda: float(service.l1.counters.dropped_full))
    metrics.watch("sessions", "open sessions", lambda: float(len(service.sessions.by_id)))


def run_server(config: ServerConfig, announce: Callable[[str], None]) -> None:
    """Run ``lmcache server`` until SIGTERM or SIGINT. ``announce`` gets the line that says it is ready.

    Raises:
        ConfigError: for a bad setting. StartupError: if a port, a name or the memory cannot be had.
        In both cases nothing is left behind.
    """
    config.check()
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    with ExitStack() as cleanup:
        metrics = Metrics()
        loop = RequestLoop(config.host, config.port, metrics)
        cleanup.callback(loop.close)
        http_socket = claim(config.http_host, config.http_port)
        cleanup.callback(http_socket.close)
        for path in sweep_stale_segments():
            logger.warning("removed %s: its server is dead", path)
        began = time.monotonic()
        pool = ShmPool(config.l1_bytes, config.shm_name or None, stop)
        cleanup.callback(pool.close)
        reserved = time.monotonic() - began

        lock = threading.Lock()
        address = config.shm_socket or f"@lmcache-{secrets.token_hex(8)}"
        attach = None
        if config.shm != "off":
            attach = Attach(socket=address, host=boot_id(), data_bytes=pool.view.data_bytes)
        service = Service(config, pool.view, attach, metrics)
        if attach is not None:
            door = AttachServer(address, pool.fd, *_attach_callbacks(service, lock))
            cleanup.callback(door.close)
            door.start()
        _gauges(metrics, service, lock)
        http = HttpServer(http_socket, loop.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]"), metrics.registry)
        cleanup.callback(http.close)
        http.start()

        if config.host not in ("127.0.0.1", "localhost", "::1"):
            logger.warning("--host %s: the protocol has no authentication; let only trusted hosts reach this port", config.host)
        announce(
            f"lmcache server ready: {loop.address} http://{config.http_host}:{http.port}"
            f" l1={config.l1_size_gb:g}GiB shm={pool.kind if attach else 'off'} chunk={config.chunk_size}"
            f" pid={os.getpid()} reserve={reserved:.2f}s"
        )

        def sweep() -> None:
            with lock:
                for session in service.sessions.silent_since(time.monotonic() - config.session_timeout):
                    service.drop_session(session.id, dead=False)

        loop.run(service, lock, stop, sweep)
        logger.info("stopping")
    sys.stdout.flush()


def _attach_callbacks(
    service: Service, lock: threading.Lock
) -> tuple[Callable[[str, bool], str | None], Callable[[str], None]]:
    def on_attach(ident: str, want_fd: bool) -> str | None:
        with lock:
            session = service.sessions.by_id.get(ident)
            if session is None:
                return "session unknown; say hello first"
            session.mapped = session.mapped or want_fd
            return None

    def on_gone(ident: str) -> None:
        with lock:
            service.drop_session(ident, dead=True)

    return on_attach, on_gone
