"""A small paged engine at a real server: it schedules, its ranks are processes with KV on the simulated device."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.server import wait_for
from helpers.sim_worker import BLOCK, GROUPS
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect

CHUNK = 32
PER_CHUNK = CHUNK // BLOCK
UP_SECONDS = 120.0
_TESTS = str(Path(__file__).resolve().parents[1])


class Nursery:
    """Starts workers by forking a process that has everything loaded."""

    def __init__(self, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sim-engine-")
        self._numbers = itertools.count()
        path = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.sim_worker"],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **env},
        )

    def worker(self, *settings: Any) -> RemoteWorker:
        """A worker with the settings of :class:`helpers.sim_worker.SimWorker`."""
        path = f"{self._folder.name}/{next(self._numbers)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(UP_SECONDS)
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([path, settings]) + "\n")
            self.process.stdin.flush()
            connection, _ = listener.accept()
        return RemoteWorker(connection)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        self._folder.cleanup()


class RemoteWorker:
    """Calls methods of a worker in another process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(UP_SECONDS)
        self._connection = connection
        self._file = connection.makefile("rw")
        self.pid = int(self.receive())

    def begin(self, call: str, *arguments: Any) -> None:
        self._file.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """The result of what was begun.

        Raises:
            EOFError: The process has ended.
        """
        try:
            line = self._file.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise EOFError("the worker has ended")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def call(self, call: str, *arguments: Any) -> Any:
        self.begin(call, *arguments)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), 20, "the worker is gone")
        self._close()

    def end(self) -> None:
        """Let it close in good order."""
        self._connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), 60, "the worker ended by itself")
        self._close()

    def _close(self) -> None:
        self._file.close()
        self._connection.close()


@dataclass
class Prompt:
    """A request: its tokens, and the blocks that it has now."""

    name: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class SimEngine:
    """``ranks`` workers and a scheduler.

    A step loads what the cache has of a request, computes the rest, and stores what is new; all of it is
    queued on the devices when the step returns.
    """

    def __init__(
        self,
        nursery: Nursery,
        address: str,
        mode: str,
        name: str = "engine",
        ranks: int = 2,
        num_blocks: int = 64,
    ) -> None:
        self._nursery, self._address, self._mode, self._name = nursery, address, mode, name
        self._ranks, self._num_blocks = ranks, num_blocks
        self._free = list(range(1, num_blocks))
        self.live: list[Prompt] = []
        self.workers = [self._worker(rank) for rank in range(ranks)]
        options = ClientOptions(control_timeout=5.0, heartbeat_interval=0.2, retry_interval=0.05)
        self.scheduler = CacheClient(address, "scheduler", name, 0, ranks, options)
        self.scheduler.start()
        self._hit = 0
        self.hits = 0
        """Chunks that came from the cache."""

    def _worker(self, rank: int) -> RemoteWorker:
        return self._nursery.worker(
            self._address, self._name, rank, self._ranks, self._mode, self._num_blocks
        )

    def replace(self, rank: int) -> None:
        """Another worker in the place of one that was killed. As in a real engine, all pages are lost with it."""
        self.workers[rank] = self._worker(rank)
        for request in list(self.live):
            self.forget(request)

    @property
    def epoch(self) -> str:
        """Of the server that the scheduler has a session with; empty if there is none."""
        welcome = self.scheduler.welcome
        return welcome.epoch if self.scheduler.up and welcome is not None else ""

    def wait_up(self, before: str = "") -> None:
        """Until all have sessions with one server, which is not that of the epoch ``before``."""

        def up() -> bool:
            states = [worker.call("state") for worker in self.workers]
            epochs = {state["epoch"] if state["up"] else "" for state in states}
            return epochs == {self.epoch} and not epochs & {"", before}

        wait_for(up, UP_SECONDS, "all workers have sessions")

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.scheduler.close()

    # ---- requests

    def forget(self, request: Prompt) -> None:
        """It ends, or is preempted: its blocks may be given to others."""
        self._free += request.blocks
        request.blocks = []
        if request in self.live:
            self.live.remove(request)
        if self.scheduler.up:
            self.scheduler.post(m.EndRequest(session=self.scheduler.session, requests=[request.name]))

    def begin(self, request: Prompt, preempt: bool = False) -> None:
        """Queue a step of a request. With ``preempt`` its blocks are given back, and written by others, in the
        same breath."""
        lease, found = self._find(request)
        count = len(request.tokens) // BLOCK
        assert len(self._free) >= count, "the test needs more blocks"
        request.blocks, self._free = self._free[:count], self._free[count:]
        self.live.append(request)
        hashes = [h.hex() for h in chunk_hashes(request.tokens, Scope(chunk_size=CHUNK))]
        chunks = found.chunks if found is not None else 0
        cached = request.blocks[: chunks * PER_CHUNK]
        groups = len(GROUPS)
        for rank, worker in enumerate(self.workers):
            loads: list[list[Any]] = []
            if chunks and found is not None:
                loads = [
                    [request.name, lease, found.epoch, found.slots[rank], [cached] * groups, [0] * groups]
                ]
            computes = [[request.blocks, len(cached), request.tokens]]
            new = request.blocks[len(cached) : len(hashes) * PER_CHUNK]
            stores = [[CHUNK, hashes[chunks:], [new] * groups]] if hashes[chunks:] else []
            worker.begin("step", loads, computes, stores, request.blocks if preempt else [])
        self._hit = chunks

    def finish(self, request: Prompt, preempt: bool = False) -> list[dict[str, Any]]:
        """The ranks' answers to a step. A load that failed is computed again, as an engine would."""
        answers = [worker.receive() for worker in self.workers]
        if any(answer["failed"] for answer in answers):
            if not preempt:
                for worker in self.workers:
                    worker.call("step", [], [[request.blocks, 0, request.tokens]], [], [])
        else:
            self.hits += self._hit
        if preempt:
            self.forget(request)
        return answers

    def run(self, request: Prompt, preempt: bool = False) -> list[dict[str, Any]]:
        """One step from its beginning to its end."""
        self.begin(request, preempt)
        return self.finish(request, preempt)

    def check(self) -> None:
        """Every page of every live request is right, on every rank."""
        wrong: list[str] = []
        for worker in self.workers:
            for request in self.live:
                wrong += worker.call("holds", request.blocks, request.tokens)
        assert not wrong, wrong[:8]

    def wait_stored(self, request: Prompt) -> None:
        """Until all of a prompt can be found: a store is published once the device has done it."""
        probe = Prompt(f"{request.name} probe", request.tokens)

        def is_there() -> bool:
            _, found = self._find(probe)
            self.scheduler.post(m.EndRequest(session=self.scheduler.session, requests=[probe.name]))
            return found is not None and found.chunks == len(request.tokens) // CHUNK

        wait_for(is_there, 30, f"{request.name} is stored")

    def _find(self, request: Prompt) -> tuple[int, m.Found | None]:
        if not self.scheduler.up:
            return 0, None
        hashes = b"".join(chunk_hashes(request.tokens, Scope(chunk_size=CHUNK)))
        lease = self.scheduler.new_lease()
        message = m.Lookup(session=self.scheduler.session, request=request.name, lease=lease, hashes=hashes)
        try:
            return lease, expect(m.Found, self.scheduler.call(message)[0])
        except Exception:  # the server is gone: no hits
            return lease, None


def prompts(seed: int, count: int, blocks: Sequence[int] = (2, 4, 6, 7)) -> list[Prompt]:
    """Requests of which some begin alike."""
    chance = random.Random(seed)
    made: list[Prompt] = []
    for number in range(count):
        head = chance.choice(made).tokens if made and chance.random() < 0.5 else []
        length = chance.choice(list(blocks)) * BLOCK
        shared = head[: chance.randrange(0, len(head) + 1, CHUNK)] if head else []
        tokens = [*shared, *(chance.randrange(1 << 20) for _ in range(length))][: max(length, len(shared))]
        made.append(Prompt(f"{seed}-{number}", tokens))
    return made
