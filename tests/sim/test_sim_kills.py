"""kill -9 of a worker or of the server at any moment of a transfer: no wrong byte, nothing left, and it goes on.

Ten seeded rounds, or as many as LMCACHE_SIM_KILLS says.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.peer import check_nothing_left, segments
from helpers.server import RunningServer, dead_port, running_server, wait_for
from helpers.sim_engine import CHUNK, Nursery, Prompt, SimEngine

pytest.importorskip("torch")
pytestmark = pytest.mark.sim

ROUNDS = int(os.environ.get("LMCACHE_SIM_KILLS", "10"))
SEED = int(os.environ.get("LMCACHE_SIM_KILLS_SEED", "0"))
SETTLE_SECONDS = 30.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMCACHE_SIM_DELAY_US", "300")
        one = Nursery()
        yield one
        one.close()


def held_of(pid: int) -> Counter[str]:
    """Descriptors and mappings of a process that are the pool's, the device's or sockets, by what they are."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        found[f"fd {_kind(target)}"] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line:
            found["map " + line.split(maxsplit=5)[5].partition(" ")[0]] += 1
    return found


def _kind(target: str) -> str:
    if "memfd" in target or target.startswith("anon_inode"):
        return target.partition(" ")[0]
    return "file" if target.startswith("/") else target.partition(":")[0]


class Rounds:
    """An engine and a server of which one is killed, and what they held when all was well."""

    def __init__(self, nursery: Nursery, mode: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.port = dead_port()
        self.segments = segments()
        self._numbers = iter(range(1 << 30))
        self.server = self._start()
        self.engine = SimEngine(nursery, f"tcp://127.0.0.1:{self.port}", mode, f"{mode}-{seed}")
        self.engine.wait_up()
        for _ in range(2):  # what is made on first use is there then
            self._serve()
            self._leases()
        self.server_held = held_of(self.server.process.pid)
        self.worker_held = [worker.call("counts") for worker in self.engine.workers]
        self.failed_loads = 0

    def _start(self) -> RunningServer:
        flags = ("--chunk-size", str(CHUNK), "--port", str(self.port))
        self._context = running_server(*flags, l1_gb=0.0625)
        return self._context.__enter__()

    def close(self) -> None:
        self.engine.close()
        self._context.__exit__(None, None, None)

    def _prompt(self) -> Prompt:
        number = next(self._numbers)
        return Prompt(f"p{number}", [number * 1000 + i for i in range(self.chance.choice([2, 4, 6]) * 16)])

    def _serve(self) -> None:
        """Store a prompt, load it elsewhere, and look at every page."""
        first = self._prompt()
        again = Prompt(f"{first.name} again", list(first.tokens))
        self.engine.run(first)
        self.engine.wait_stored(first)
        hits = self.engine.hits
        self.engine.run(again)
        self.engine.check()
        assert self.engine.hits - hits == len(first.tokens) // CHUNK, "what was stored is not found"
        self.engine.forget(first)
        self.engine.forget(again)

    def round(self) -> str:
        """Kill one in a step; see that the others are right, and start it again."""
        victim = self.chance.choice(["server", "worker 0", "worker 1"])
        stored = self._prompt()
        self.engine.run(stored)
        request = self.chance.choice([self._prompt(), Prompt(f"{stored.name} again", list(stored.tokens))])
        self.engine.begin(request)
        time.sleep(self.chance.random() * 0.06)
        if victim == "server":
            epoch = self.engine.epoch
            self._kill_server(request)
            self.engine.wait_up(epoch)
        else:
            self._kill_worker(int(victim[-1]), request)
            self.engine.wait_up()
        self._serve()
        self._nothing_left(victim)
        return victim

    def _kill_server(self, request: Prompt) -> None:
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait(20)
        answers = self.engine.finish(request)
        self.failed_loads += sum(len(answer["failed"]) for answer in answers)
        self.engine.check()
        self._context.__exit__(None, None, None)
        for live in list(self.engine.live):
            self.engine.forget(live)
        self.server = self._start()

    def _kill_worker(self, rank: int, request: Prompt) -> None:
        self.engine.workers[rank].kill()
        survivor = self.engine.workers[1 - rank]
        answer = survivor.receive()
        if not answer["failed"]:
            assert survivor.call("holds", request.blocks, request.tokens) == []
        self.failed_loads += len(answer["failed"])
        self.engine.replace(rank)

    def _nothing_left(self, victim: str) -> None:
        pid = self.server.process.pid
        wait_for(
            lambda: not held_of(pid) - self.server_held,
            SETTLE_SECONDS,
            f"{victim} was killed, and the server still holds {held_of(pid) - self.server_held}",
        )
        for worker, before in zip(self.engine.workers, self.worker_held, strict=True):
            now = worker.call("counts")
            assert all(now[name] <= before[name] for name in before), (victim, now, before)
        wait_for(lambda: not self._leases(), SETTLE_SECONDS, f"{victim} was killed: {self._leases()} left")
        check_nothing_left(self.segments)

    def _leases(self) -> dict[str, int]:
        """What the server holds for clients."""
        l1 = self.server.state()["l1"]
        names = ("read_leases", "write_leases", "pinned_objects", "reserved_bytes")
        return {name: l1[name] for name in names if l1[name]}


@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_driven"])
def test_whoever_is_killed_at_any_moment_no_byte_is_wrong_and_nothing_is_left(
    nursery: Nursery, mode: str
) -> None:
    rounds = Rounds(nursery, mode, SEED)
    victims: Counter[str] = Counter()
    try:
        # Most of what can go wrong is where the server has the workers' memory mapped.
        for _ in range(ROUNDS if mode == "lmcache_driven" else max(1, ROUNDS // 5)):
            victims[rounds.round()] += 1
    finally:
        rounds.close()
    print(f"{mode}: killed {dict(victims)}; loads that failed and were computed again: {rounds.failed_loads}")
