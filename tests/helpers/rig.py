"""An engine's scheduler and workers at a real server, with KV pages in plain bytes.

In this process (:class:`Rig`), or in one of its own that can be stopped and killed (:class:`RigProcess`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmcache
from helpers.pages import PageMemory, layout
from helpers.server import RunningServer, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context import engine_driven
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    LMCacheDrivenTransferContext,
    LoadItem,
    StoreItem,
    create_transfer_context,
)
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect

BLOCK = 16
NULL_BLOCK = 0
A, B, C = list(range(1, 11)), list(range(20, 30)), list(range(40, 50))
"""Ten blocks each: five chunks of 32 tokens."""
QUICK = {"control_timeout": 1.0, "heartbeat_interval": 0.3, "retry_interval": 0.1}


def prompt(n: int = 160, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def held(server: RunningServer) -> dict[str, int]:
    """What clients hold, their sessions aside."""
    state = server.state()
    names = ("read_leases", "write_leases", "pinned_objects", "reserved_bytes")
    found = {name: state["l1"][name] for name in names} | {"requests": state["requests"]}
    return {name: n for name, n in found.items() if n}


def nothing_held(server: RunningServer, seconds: float = 10.0) -> None:
    """Wait until all is given back."""
    wait_for(lambda: held(server) == {}, seconds, f"all given back: {held(server)}")


class Rig:
    """One engine.

    Args:
        only: the one rank whose worker lives here; None: all.
        quick: short time limits.
        mode: the transfer mode; but for engine_driven the pages are torch tensors.
        limits: of ClientOptions, over those.
        patience: seconds that lookups wait for tiers below L1.
        fields: of the namespaces, besides what tells groups and ranks apart.
    """

    def __init__(
        self,
        address: str,
        engine: str,
        *,
        ranks: int = 1,
        groups: int = 1,
        only: int | None = None,
        scheduler: bool = True,
        num_blocks: int = 64,
        pad: int = 0,
        shm: str = "auto",
        quick: bool = False,
        wait: float = 10.0,
        mode: str = "engine_driven",
        limits: dict[str, float] | None = None,
        patience: float = -1.0,
        **fields: Any,
    ) -> None:
        self._patience = patience
        options = ClientOptions(shm=shm, **((QUICK if quick else {}) | (limits or {})))
        mine = range(ranks) if only is None else [only]
        fields = {"block_size": BLOCK, "page_bytes": (256, 384)} | fields
        self.memories = {
            rank: [
                PageMemory(
                    layout(tp_rank=rank, tp_size=ranks, group=group, groups=groups, **fields),
                    num_blocks,
                    pad,
                    NULL_BLOCK,
                    tensors=mode != "engine_driven",
                )
                for group in range(groups)
            ]
            for rank in mine
        }
        self.workers = {
            rank: create_transfer_context(
                mode, address, engine, [memory.pages for memory in memories], rank, ranks, options
            )
            for rank, memories in self.memories.items()
        }
        self.scheduler = CacheClient(address, "scheduler", engine, 0, ranks, options) if scheduler else None
        self._hits: dict[str, tuple[int, int, m.Found]] = {}
        for client in self.clients:
            client.start()
        if wait:
            self.wait_up(wait)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def clients(self) -> list[CacheClient]:
        schedulers = [self.scheduler] if self.scheduler is not None else []
        return [*(worker.client for worker in self.workers.values()), *schedulers]

    def wait_up(self, seconds: float = 10.0) -> None:
        wait_for(self.up, seconds, f"sessions open: {[client.reason for client in self.clients]}")

    def wait_reopened(self, before: set[str], seconds: float = 10.0) -> None:
        """Wait for sessions with another server than those of the epochs ``before``."""
        wait_for(lambda: self.up() and before.isdisjoint(self.epochs()), seconds, "new sessions")

    def up(self) -> bool:
        return all(client.up for client in self.clients)

    def epochs(self) -> set[str]:
        return {client.welcome.epoch for client in self.clients if client.welcome is not None}

    def paths(self) -> list[str]:
        return [worker.path for worker in self.workers.values()]

    def reasons(self) -> list[str]:
        return [client.reason for client in self.clients]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.scheduler is not None:
            self.scheduler.close()

    # ---- store

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Fill ``blocks`` with the KV of ``tokens``."""
        for memories in self.memories.values():
            for memory in memories:
                for i, block in enumerate(blocks):
                    if block != NULL_BLOCK:
                        memory.fill(block, tokens[: (i + 1) * BLOCK])

    def store(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        rank: int | None = None,
        first: int = 0,
        **scope: Any,
    ) -> int:
        """Compute all and store from chunk ``first`` on; how many objects were published."""
        self.compute(tokens, blocks)
        size = self._chunk_size
        per_chunk = size // BLOCK
        hashes = chunk_hashes(tokens, Scope(chunk_size=size, **scope))
        stored = list(blocks[first * per_chunk : len(hashes) * per_chunk])
        groups = len(next(iter(self.memories.values())))
        item = StoreItem(size, hashes[first:], [stored] * groups)
        return sum(w.store([item]) for r, w in self.workers.items() if rank is None or r == rank)

    @property
    def _chunk_size(self) -> int:
        welcome = self.clients[0].welcome
        assert welcome is not None
        return welcome.chunk_size

    # ---- load

    def lookup(self, request: str, tokens: Sequence[int], start: int = 0, **scope: Any) -> int:
        """Chunks found from chunk ``start`` on; they are pinned."""
        assert self.scheduler is not None
        lease = self.scheduler.new_lease()
        hashes = chunk_hashes(tokens, Scope(chunk_size=self._chunk_size, **scope))
        message = m.Lookup(
            session=self.scheduler.session,
            request=request,
            lease=lease,
            hashes=b"".join(hashes),
            start=start,
            wait=self._patience,
        )
        found = expect(m.Found, self.scheduler.call(message)[0])
        self._hits[request] = (lease, start, found)
        return found.chunks

    def load(self, request: str, blocks: Sequence[int], skip: int = 0) -> list[bool]:
        """Load what was looked up into ``blocks``; per rank whether it succeeded."""
        lease, _, found = self._hits[request]
        out = []
        for rank, worker in self.workers.items():
            groups = len(self.memories[rank])
            slots = found.slots[rank]
            item = LoadItem(request, lease, found.epoch, slots, [list(blocks)] * groups, [skip] * groups)
            out.append(not worker.load([item]))
        return out

    def fetch(self, request: str, tokens: Sequence[int], blocks: Sequence[int], **scope: Any) -> int:
        """Look up, load, check and end; how many chunks were right."""
        chunks = self.lookup(request, tokens, **scope)
        if chunks:
            used = blocks[: chunks * self._chunk_size // BLOCK]
            assert all(self.load(request, used)), "a promised hit was not delivered"
            assert self.holds(tokens, used)
        self.end(request)
        return chunks

    def holds(self, tokens: Sequence[int], blocks: Sequence[int], first: int = 0) -> bool:
        """Whether ``blocks`` hold the KV of ``tokens`` from block ``first`` of the prompt on, in every rank."""
        return all(
            memory.holds(block, tokens[: (first + i + 1) * BLOCK])
            for memories in self.memories.values()
            for memory in memories
            for i, block in enumerate(blocks)
            if block != NULL_BLOCK
        )

    def spoilt(self, blocks: Sequence[int]) -> bool:
        """Whether nothing was ever written to ``blocks``."""
        return all(
            memory.is_spoilt(block)
            for memories in self.memories.values()
            for memory in memories
            for block in blocks
        )

    def end(self, request: str) -> None:
        assert self.scheduler is not None
        self._hits.pop(request, None)
        self.scheduler.post(m.EndRequest(session=self.scheduler.session, requests=[request]))


class RigProcess:
    """A rig in a process of its own; its methods are called by name.

    Args:
        uid: the user to run as; None: ours.
    """

    def __init__(self, address: str, engine: str, uid: int | None = None, **settings: Any) -> None:
        here = str(Path(__file__).parent.parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.rig"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.errors = ""
        self._start(address, engine, uid, settings)

    def _start(self, address: str, engine: str, uid: int | None, settings: dict[str, Any]) -> None:
        self.send({"uid": uid, "rig": [address, engine], "settings": settings})
        self.receive()

    def __enter__(self) -> RigProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.errors += self.process.communicate()[1]

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the rig and wait for its result."""
        self.begin(method, *arguments, **keywords)
        return self.receive()

    def begin(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method of the rig; :meth:`receive` gives its result."""
        self.send({"call": method, "arguments": arguments, "keywords": keywords})

    def pause_at_copy(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method of the rig and return when it is about to copy pages; :meth:`go_on` lets it."""
        self.pause_at("copy", method, *arguments, **keywords)

    def pause_at(self, point: str, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method of the rig and return when it comes to ``point`` of ``POINTS``; :meth:`go_on` lets it."""
        self.send({"pause": point})
        self.receive()
        self.begin(method, *arguments, **keywords)
        assert self.receive() == f"at {point}"

    def go_on(self) -> Any:
        """Let it go on; the result of the call that it belongs to."""
        self.send({"go": "on"})
        return self.receive()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> str:
        """Close the rig in good order; what it wrote to standard error."""
        self.call("close")
        self.errors += self.process.communicate(timeout=10)[1]
        assert self.process.returncode == 0, self.errors
        return self.errors

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors += self.process.communicate()[1]
            raise AssertionError(f"rig ended with {self.process.returncode}: {self.errors}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]


#: Where a rig can be held up: before a page is copied by the worker, before it asks a server to move pages,
#: between the server's answer to a store and the commit.
POINTS: dict[str, tuple[Any, str]] = {
    "copy": (engine_driven, "copy_pages"),
    "ask": (LMCacheDrivenTransferContext, "_recorded"),
    "answer": (LMCacheDrivenTransferContext, "_wait"),
}


def main() -> None:
    """The process: one JSON object per line in, one out."""
    pausing = ""

    def reply(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    def hold_up(point: str) -> None:
        owner, name = POINTS[point]
        original = getattr(owner, name)

        def when_told(*arguments: Any) -> Any:
            nonlocal pausing
            if pausing == point:
                pausing = ""
                reply(result=f"at {point}")
                sys.stdin.readline()
            return original(*arguments)

        setattr(owner, name, when_told)

    for point in POINTS:
        hold_up(point)
    start = json.loads(sys.stdin.readline())
    if start["uid"] is not None:
        assert lmcache.__version__  # what is read late, now: our files may not be that user's to read
        if importlib.util.find_spec("torch"):
            importlib.import_module("torch")
        os.setgroups([])
        os.setgid(start["uid"])
        os.setuid(start["uid"])
    rig = Rig(*start["rig"], **start["settings"])
    reply(result=None)
    for line in sys.stdin:
        message = json.loads(line)
        if "pause" in message:
            pausing = message["pause"]
            reply(result=None)
            continue
        try:
            result = getattr(rig, message["call"])(*message["arguments"], **message["keywords"])
        except Exception as exc:
            reply(error=f"{message['call']}: {type(exc).__name__}: {exc}")
        else:
            reply(result=result)
        if message["call"] == "close":
            return


if __name__ == "__main__":
    main()
