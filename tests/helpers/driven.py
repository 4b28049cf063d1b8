"""What the tests of lmcache-driven mode look at: a server's leases, mappings and descriptors, and a quick rig."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.rig import C, Rig, RigProcess
from helpers.server import RunningServer, running_server, stop_process

CHUNK = 32
DRIVEN = "lmcache_driven"
OPEN_SECONDS = 30.0
"""Until the first session in this mode is open: the server imports torch for it."""


@contextmanager
def a_server(*flags: str, l1_mib: float = 8) -> Iterator[RunningServer]:
    """A server of small chunks."""
    with running_server("--chunk-size", str(CHUNK), *flags, l1_gb=l1_mib / 1024) as server:
        yield server


def a_rig(server: RunningServer, engine: str = "engine", **settings: Any) -> Rig:
    """A driven engine in this process with short limits."""
    return Rig(server.address, engine, **({"mode": DRIVEN, "quick": True, "wait": OPEN_SECONDS} | settings))


def a_process(server: RunningServer, engine: str = "engine", **settings: Any) -> RigProcess:
    """The same in a process of its own."""
    defaults = {"mode": DRIVEN, "quick": True, "wait": OPEN_SECONDS}
    return RigProcess(server.address, engine, **(defaults | settings))


def paths(server: RunningServer) -> list[str]:
    """How the workers' payload travels, by the server's status."""
    return sorted(s["path"] for s in server.state()["sessions"] if s["role"] == "worker")


def kv_mappings(pid: int) -> int:
    """Mappings of KV tensors in shared memory."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:lmcache-kv")


def descriptors(pid: int) -> Counter[str]:
    """Open descriptors by kind; sockets come and go with HTTP and are left out."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if not target.startswith("socket:"):
            kinds[target.partition(":[")[0]] += 1
    return kinds


@contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    """The server does not run for a while."""
    stop_process(server.pid)
    try:
        yield
    finally:
        if server.process.poll() is None:
            server.process.send_signal(18)  # SIGCONT


def fits(engine: Rig | RigProcess, tokens: list[int], name: str = "r") -> int:
    """Fetch ``tokens`` into C; the chunks that were right."""
    if isinstance(engine, RigProcess):
        return int(engine.call("fetch", name, tokens, C))
    return engine.fetch(name, tokens, C)
