"""Rounds of kill -9, of a worker or of the server, at a random moment and in both modes: nothing is lost but work.

LMCACHE_KILL_ROUNDS sets their number, LMCACHE_KILL_SEED the seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest

from helpers.driven import DRIVEN, a_server, descriptors, kv_mappings, paths
from helpers.nursery import ForkedRig
from helpers.peer import check_nothing_left, segments
from helpers.rig import held
from helpers.server import RunningServer, resident, wait_for

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROUNDS = int(os.environ.get("LMCACHE_KILL_ROUNDS", "20"))
SEED = int(os.environ.get("LMCACHE_KILL_SEED", "5"))
SHAPE: dict[str, Any] = {"model": "kills", "groups": 2, "page_bytes": (16 << 10, 16 << 10), "quick": True}
SHAPE["limits"] = {"control_timeout": 4.0}  # a busy machine is no fault
SOURCE, TARGET = list(range(1, 25)), list(range(30, 54))
"""24 blocks: 12 chunks."""
PHASES = ("store", "load", "idle", "ask", "answer", "copy")
EVENTS = "/memfd:lmcache-events (deleted)"
GROWTH = 48 << 20
"""Bytes that the server's own memory may differ by: allocators keep some of what they are given back."""


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + 16 * len(SOURCE)))


class Round:
    """A server, a worker on it, and what the server was like when nobody was there."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self.seen: Counter[str] = Counter()
        self.numbers = iter(range(1 << 20))
        self._open: Any = None
        self.server: RunningServer
        self.base: tuple[Counter[str], int] | None = None
        self.start_server()
        self.known: list[int] = []

    def start_server(self, *flags: str) -> None:
        self.close()
        self._open = a_server(*flags, l1_mib=64)
        self.server = self._open.__enter__()
        self.base = None
        self.known = []

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def worker(self, mode: str) -> ForkedRig:
        rig = ForkedRig(self.server.address, "engine", mode=mode, wait=30.0, **SHAPE)
        assert paths(self.server) == ["device" if mode == DRIVEN else "shared_memory"]
        return rig

    def check_works(self, rig: ForkedRig) -> None:
        """A store and a load of it, and every prompt that was ever stored on this server: right or not there."""
        number = next(self.numbers)
        assert rig.call("store", prompt(number), SOURCE) == 24
        assert rig.call("fetch", f"new {number}", prompt(number), TARGET) == 12
        for old in self.random.sample(self.known, min(2, len(self.known))):
            rig.call("fetch", f"old {old}", prompt(old), TARGET)
        self.known.append(number)

    def begin(self, rig: ForkedRig, phase: str) -> None:
        """Let the worker be in ``phase``: held up at a point of it, or somewhere in it."""
        number = next(self.numbers)
        if phase in ("ask", "answer", "copy"):
            rig.pause_at(phase, "store", prompt(number), SOURCE)
            self.known.append(number)
        elif phase == "store":
            rig.call("compute", prompt(number), SOURCE)
            rig.begin("store", prompt(number), SOURCE)
            self.known.append(number)
        elif phase == "load":
            assert rig.call("lookup", "r", prompt(self.known[-1])) == 12
            rig.begin("load", "r", TARGET)
        if phase in ("store", "load"):
            time.sleep(self.random.uniform(0, 0.12))

    def kill_worker(self, rig: ForkedRig, mode: str) -> None:
        rig.kill()
        wait_for(lambda: self.server.state()["sessions"] == [], 10, "its sessions end")
        wait_for(lambda: held(self.server) == {}, 10, f"all given back: {held(self.server)}")
        self.check_quiet(mode)

    def check_quiet(self, mode: str) -> None:
        """Nobody is connected: the server is as it was."""
        pid = self.server.pid
        wait_for(lambda: kv_mappings(pid) == 0, 10, "no engine's memory is mapped")
        now = descriptors(pid), resident(pid)
        if self.base is None:
            self.base = now if mode == DRIVEN else None  # torch comes with the first such worker
            return
        left = now[0] - self.base[0]
        events = now[0][EVENTS]  # its own page, and of workers the one that came last
        assert events <= 4, f"{events} descriptors of pages of events"
        del left[EVENTS]
        assert not left, f"descriptors {left}"
        assert now[1] - self.base[1] < GROWTH, f"{now[1]} bytes, {self.base[1]} before"

    def kill_server(self, rig: ForkedRig, phase: str) -> None:
        port = str(self.server.port)
        tokens = prompt(self.known[-1])
        self.server.end(signal.SIGKILL)
        if phase in ("ask", "answer", "copy"):
            rig.go_on()
        elif phase in ("store", "load"):
            result = rig.receive()
            if phase == "load" and result == [True]:
                assert rig.call("holds", tokens, TARGET)
        self.start_server("--port", port)
        wait_for(self.is_found, 30, "both of the engine's sessions")  # each has noticed by then
        rig.call("wait_up", 30)

    def is_found(self) -> bool:
        return sorted(s["role"] for s in self.server.state()["sessions"]) == ["scheduler", "worker"]


def test_after_every_kill_bytes_are_right_all_is_given_back_and_the_next_round_works() -> None:
    names = segments()
    bench = Round()
    try:
        for _ in range(ROUNDS):
            mode = bench.random.choice([DRIVEN, DRIVEN, "engine_driven"])
            points = {"copy"} if mode == DRIVEN else {"ask", "answer"}
            with bench.worker(mode) as rig:
                bench.check_works(rig)
                phase = bench.random.choice([p for p in PHASES if p not in points])
                victim = bench.random.choice(["worker", "worker", "server"])
                bench.seen[f"{mode} {victim} {phase}"] += 1
                bench.begin(rig, phase)
                if victim == "server":
                    bench.kill_server(rig, phase)
                    bench.check_works(rig)
                bench.kill_worker(rig, mode)
            check_nothing_left(names)
        with bench.worker(DRIVEN) as rig:
            bench.check_works(rig)
            rig.close()
        wait_for(lambda: held(bench.server) == {}, 10)
        bench.check_quiet(DRIVEN)
        assert bench.server.process.poll() is None
        if bench.base is not None:
            grown = resident(bench.server.pid) - bench.base[1]
            print(f"the last server: {grown / 2**20:+.1f} MiB of its own")
    finally:
        print(f"{sum(bench.seen.values())} rounds begun: {dict(sorted(bench.seen.items()))}")
        bench.close()
