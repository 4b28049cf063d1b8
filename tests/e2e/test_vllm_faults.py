"""The server fails in every way while a real vLLM runs: right tokens, in bounded time, and hits come back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import tokens
from e2e.engine import EngineProcess, connector, engine
from helpers.server import Server, wait_for

pytestmark = pytest.mark.vllm


def long(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


ONE, BATCH, BACK = 5.0, 10.0, 10.0
"""Seconds that a fault may add to one request and to a batch of sixteen, and until hits come back."""


class Bench:
    """An engine, its server, and what its prompts give without a cache."""

    def __init__(self, process: EngineProcess, server: Server) -> None:
        self.engine, self.server = process, server
        self.one = tokens(500, 1200)
        self.batch = [tokens(600 + i, 500 + 40 * i) for i in range(16)]
        # The server is not up yet: these are uncached.
        (first,), _ = process.timed([self.one])
        assert first["cached"] == 0
        self.truth = first["tokens"]
        results, _ = process.timed(self.batch)
        self.batch_truth = [r["tokens"] for r in results]
        _, self.seconds = process.timed([self.one])
        _, self.batch_seconds = process.timed(self.batch)

    def check_one(self) -> int:
        """Run the one prompt: right tokens, in time; cached tokens."""
        (result,), seconds = self.engine.timed([self.one])
        assert result["tokens"] == self.truth
        assert seconds < self.seconds + ONE, f"{seconds:.1f} s, {self.seconds:.1f} s without a fault"
        return int(result["cached"])

    def check_batch(self) -> None:
        results, seconds = self.engine.timed(self.batch)
        assert [r["tokens"] for r in results] == self.batch_truth
        assert seconds < self.batch_seconds + BATCH, (
            f"{seconds:.1f} s, {self.batch_seconds:.1f} s without a fault"
        )

    def hits_come_back(self) -> None:
        """Within BACK seconds of now, a prompt is stored and hit again."""
        wait_for(lambda: self.check_one() > 0, BACK, "hits after the server's return")


@pytest.fixture(scope="module")
def bench(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    server = Server()
    began = time.monotonic()
    with engine(
        model_dir("gqa"), tmp_path_factory.mktemp("faults") / "log", connector(server.port)
    ) as process:
        print(f"engine started without a server in {time.monotonic() - began:.0f} s")
        yield Bench(process, server)
        server.kill()


def test_absent_at_the_engines_start_then_found(bench: Bench) -> None:
    assert bench.check_one() == 0
    bench.server.start()
    bench.hits_come_back()


def test_killed_while_idle(bench: Bench) -> None:
    bench.server.kill()
    assert bench.check_one() == 0
    bench.check_batch()
    bench.server.start()
    bench.hits_come_back()


@pytest.mark.parametrize("delay", [long(0.05), 0.4, long(1.0)])
def test_killed_in_a_batch(bench: Bench, delay: float) -> None:
    bench.engine.generate(bench.batch[::2])
    killer = threading.Timer(delay, bench.server.kill)
    killer.start()
    bench.check_batch()
    killer.join()
    bench.server.start()
    bench.hits_come_back()


@pytest.mark.long
def test_stopped_for_twenty_seconds(bench: Bench) -> None:
    bench.hits_come_back()
    bench.server.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    bench.check_one()
    bench.check_batch()
    time.sleep(max(0.0, 20 - (time.monotonic() - stopped)))
    bench.check_one()
    bench.server.signal(signal.SIGCONT)
    bench.hits_come_back()
    wait_for(
        bench.server.idle, 5, "what the stopped server granted without anybody hearing of it is given back"
    )


@pytest.mark.parametrize("number", [long(signal.SIGTERM), signal.SIGKILL])
def test_ended_between_lookup_and_load(bench: Bench, number: int) -> None:
    bench.hits_come_back()
    bench.engine.worker("kill_before_load", bench.server.pid, int(number))
    bench.check_one()
    bench.server.kill()
    bench.server.start()
    bench.hits_come_back()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_loads_follow_the_policy_and_the_engine_lives(
    model_dir: Callable[[str], Path], log: Path, policy: str
) -> None:
    """In frames, so that a load needs the server: it dies between lookup and load, alone and in a batch."""
    one, batch = tokens(700, 1100), [tokens(710 + i, 600) for i in range(8)]
    transfer = connector(0, policy, **{"lmcache.mp.shm": "off"})
    with Server() as server:
        transfer["kv_connector_extra_config"]["lmcache.mp.port"] = str(server.port)
        with engine(model_dir("gqa"), log, transfer) as process:
            truth = process.generate([one])[0]["tokens"]
            batch_truth = [r["tokens"] for r in process.generate(batch)]
            for prompts, right in (([one], [truth]), (batch, batch_truth)):
                wait_for(lambda p=prompts: process.generate(p)[0]["cached"] > 0, BACK, "warm")
                process.worker("kill_before_load", server.pid, int(signal.SIGKILL))
                results, seconds = process.timed(prompts)
                for result, want in zip(results, right, strict=True):
                    if policy == "recompute" or result["finish"] != "error":
                        assert result["tokens"] == want
                if policy == "fail":
                    assert any(r["finish"] == "error" for r in results)
                assert seconds < 60
                server.kill()
                server.start()
            wait_for(server.registered, BACK, "the engine is back in session")
            # What was computed on top of a failed load was not stored: a second engine's hits give right tokens.
            for prompts, right in (([one], [truth]), (batch, batch_truth)):
                for _ in range(2):
                    assert [r["tokens"] for r in process.generate(prompts)] == right
