"""lmcache-driven mode on a real vLLM, whose KV then lies in shared memory, when the server or the engine dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.conftest import tokens
from e2e.engine import connector, engine
from helpers.peer import check_nothing_left, segments
from helpers.server import Server, wait_for

pytestmark = pytest.mark.vllm

BACK = 30.0
"""Seconds until hits come back: a new server imports torch before it maps the engine's memory."""


def _kv_mapped(pid: int) -> int:
    """Kilobytes of engines' KV that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if "memfd:lmcache-kv" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans) >> 10


def test_a_server_that_dies_or_stops_costs_hits_and_a_killed_engine_leaves_nothing(
    model_dir: Callable[[str], Path], log: Path
) -> None:
    one, batch = tokens(800, 1100), [tokens(810 + i, 500 + 40 * i) for i in range(6)]
    names = segments()
    transfer = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    with Server() as server, engine(model_dir("gqa"), log, connector(server.port, **transfer)) as process:
        wait_for(lambda: process.worker("transfer_path") == "device", BACK, "the worker's session")
        (cold,) = process.generate([one])
        truth = [r["tokens"] for r in process.generate(batch)]
        assert cold["cached"] == 0

        def hit() -> bool:
            (result,) = process.generate([one])
            assert result["tokens"] == cold["tokens"]
            return bool(result["cached"] == 1024)

        wait_for(hit, 5, "warm")
        # ... killed in a batch, half of which is warm
        killer = threading.Timer(0.4, server.kill)
        killer.start()
        assert [r["tokens"] for r in process.generate(batch)] == truth
        killer.join()
        server.start()
        wait_for(hit, BACK, "hits after the server's return")
        # ... killed between lookup and load: that load is fenced by the server's death
        process.worker("kill_before_load", server.pid, int(signal.SIGKILL))
        assert process.generate([one])[0]["tokens"] == cold["tokens"]
        server.kill()
        server.start()
        wait_for(hit, BACK, "hits after the server's return")
        # ... stopped before a load for three seconds: late, and not dead
        threading.Timer(3.0, server.signal, [signal.SIGCONT]).start()
        process.worker("kill_before_load", server.pid, int(signal.SIGSTOP))
        assert process.generate([one])[0]["tokens"] == cold["tokens"]
        wait_for(hit, BACK, "hits after the server went on")
        wait_for(server.idle, 5, "leases and pins at zero")
        # ... and now the engine
        assert _kv_mapped(server.pid) > 100 << 10
        process.kill()
        wait_for(lambda: _kv_mapped(server.pid) == 0, 10, "the server has unmapped what was the engine's")
        wait_for(lambda: server.state()["sessions"] == [], 10, "its sessions closed")
        assert server.idle()
        check_nothing_left(names)
