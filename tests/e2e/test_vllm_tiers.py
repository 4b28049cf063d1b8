"""A real vLLM on a server with tiers below L1: hits after a restart, and no wait beyond what a request may wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.conftest import tokens
from e2e.engine import connector, engine
from helpers.server import Server, channel_to, dead_port, wait_for
from lmcache.v1.protocol import messages as m

pytestmark = pytest.mark.vllm

PATIENCE = 1.0
"""Seconds that a request may wait for tiers."""
SLOW = json.dumps({"type": "fault", "latency_ms": 4000, "on": ["load"]})


def written(server: Server) -> bool:
    (tier,) = server.state()["l2"]
    return tier["stored"] > 0 and tier["queued_objects"] == 0


def test_hits_come_from_the_disk_after_a_restart_and_a_slow_tier_costs_its_hit_only(
    model_dir: Callable[[str], Path], log: Path, tmp_path: Path
) -> None:
    disk = json.dumps({"type": "disk", "path": str(tmp_path / "disk"), "max_gb": 1})
    port = dead_port()
    prompts = [tokens(900 + i, 500 + 100 * i) for i in range(6)]
    transfer = connector(port, **{"lmcache.mp.prefetch_timeout": PATIENCE})
    with engine(model_dir("gqa"), log, transfer) as process:
        with Server("--l2-adapter", disk, port=port) as server:
            wait_for(server.registered, 30, "the engine finds the server")
            results, cold = process.timed(prompts)
            truth = [result["tokens"] for result in results]
            assert [result["cached"] for result in results] == [0] * len(prompts)
            wait_for(lambda: written(server), 30, "all is on the disk")
            server.kill()
            server.start()
            wait_for(server.registered, 30, "the engine finds the next server")
            results = process.generate(prompts)
            assert [result["tokens"] for result in results] == truth
            assert [result["cached"] // 256 for result in results] == [len(p) // 256 for p in prompts]
            assert wait_for(server.idle, 10, "all is given back")
        with Server("--l2-adapter", SLOW, port=port) as server:
            wait_for(server.registered, 30, "the engine finds the slow one")
            process.generate(prompts)
            wait_for(lambda: written(server), 30, "all is in the slow tier")
            with channel_to(server.running.address) as tool:
                tool.call(m.Clear(tiers=["l1"]), 10)
            results, seconds = process.timed(prompts)
            assert [result["tokens"] for result in results] == truth
            assert seconds < cold + PATIENCE + 5
            assert wait_for(server.idle, 10, "what was fetched for nothing is given up")
