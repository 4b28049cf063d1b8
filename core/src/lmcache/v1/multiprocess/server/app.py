"""Puts the server together: claims, reserves, serves, drains."""

from __future__ import annotations

import ipaddress
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lmcache.errors import StartupError
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.server.assembly import Assembly
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.http import HttpServer, claim
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.plugins import ServerPlugins, refused_policies
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.plugins import ServerHandle
from lmcache.v1.storage.accounts import AccountUsage
from lmcache.v1.storage.shm_pool import sweep_stale_segments

logger = init_logger(__name__)

_MIN_OPEN_FILES = 64


@dataclass(frozen=True)
class Ready:
    """What a server says of itself once it serves; as text, its one line on standard output."""

    address: str
    http: str
    l1_gib: float
    shm: str
    chunk_size: int
    pid: int
    reserve_seconds: float

    def __str__(self) -> str:
        return (
            f"lmcache server ready: {self.address} {self.http} l1={self.l1_gib:g}GiB shm={self.shm}"
            f" chunk={self.chunk_size} pid={self.pid} reserve={self.reserve_seconds:.2f}s"
        )


def resolve(flag: str, host: str) -> str:
    """The numeric address, of IPv4 if there is one, that ``host`` stands for.

    Raises:
        StartupError: if it stands for none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:  # UnicodeError: a label that no name may have
        reason = getattr(exc, "strerror", None) or exc
        raise StartupError(
            f"{flag} {host}: {reason}; expected an address of this host, e.g. 127.0.0.1 or 0.0.0.0"
        ) from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])


def _near(host: str) -> str:
    """The address under which this process reaches what is bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _netloc(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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
    metrics.watch(
        "l1_evicted", "objects that made room for others so far", lambda: float(service.l1.counters.evicted)
    )
    metrics.watch(
        "l1_allocation_failure",
        "objects refused for want of room so far",
        lambda: float(service.l1.counters.dropped_full),
    )
    metrics.watch_tiers(lambda: _tiers(service, lock))
    metrics.watch_accounts(lambda: _accounts(service, lock))
    metrics.watch("sessions", "open sessions", lambda: float(len(service.sessions.by_id)))


def _tiers(service: Service, lock: threading.Lock) -> list[dict[str, Any]]:
    with lock:
        return service.store.figures()


def _accounts(service: Service, lock: threading.Lock) -> list[tuple[str, str, AccountUsage]]:
    with lock:
        return service.store.accounts(limited=True)


def _check_open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _MIN_OPEN_FILES:
        raise StartupError(
            f"limit of open files {limit}: expected at least {_MIN_OPEN_FILES}, and some ten per engine;"
            " raise it with `ulimit -n`"
        )


def run_server(config: ServerConfig, announce: Callable[[Ready], None]) -> None:
    """Run ``lmcache server`` until SIGTERM or SIGINT. ``announce`` is called once it is ready.

    Raises:
        ConfigError: for a bad setting. StartupError: if a port, a name or the memory cannot be had.
        In both cases nothing is left behind.
    """
    plugins = ServerPlugins()
    _check_open_files()
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    with ExitStack() as cleanup:
        cleanup.callback(plugins.close)
        config.check(plugins.policies, refused_policies(plugins.host.records))
        host, http_host = resolve("--host", config.host), resolve("--http-host", config.http_host)
        http_socket = claim(http_host, config.http_port)
        cleanup.callback(http_socket.close)
        for path in sweep_stale_segments():
            logger.warning("removed %s: its server is dead", path)
        core = Assembly(config, plugins, host, stop)
        cleanup.callback(core.close)
        _gauges(core.metrics, core.service, core.lock)
        http = HttpServer(
            http_socket, f"tcp://{_netloc(_near(host))}:{core.loop.port}", core.metrics.registry
        )
        cleanup.callback(http.close)
        http.start()

        _warn_of_open_doors(host, http_host)
        handle = _handle(
            core.loop.address, f"http://{_netloc(http_host)}:{http.port}", core.service, core.lock
        )
        plugins.started(handle, stop)
        cleanup.callback(plugins.stopping, handle)
        announce(
            Ready(
                address=core.loop.address,
                http=handle.http,
                l1_gib=config.l1_size_gb,
                shm=core.pool.kind if core.service.attach else "off",
                chunk_size=config.chunk_size,
                pid=os.getpid(),
                reserve_seconds=round(core.reserve_seconds, 3),
            )
        )
        core.run()
        logger.info("stopping")


def _warn_of_open_doors(host: str, http_host: str) -> None:
    for flag, address in (("--host", host), ("--http-host", http_host)):
        if not ipaddress.ip_address(address).is_loopback:
            logger.warning(
                "%s %s: no authentication here; let only trusted hosts reach this port", flag, address
            )


def _handle(address: str, http: str, service: Service, lock: threading.Lock) -> ServerHandle:
    """What plugins see of the server."""

    def status() -> dict[str, Any]:
        with lock:
            return service.status()

    return ServerHandle(address, http, service.epoch, service.config.chunk_size, os.getpid(), status)
