"""One worker of an engine at a server in this process, and what the scheduler would tell it to do."""

from __future__ import annotations

import itertools
from typing import Any

from helpers.local import LocalServer
from helpers.mini_engine import NULL_BLOCK, make_context
from helpers.pages import PageMemory, layout
from lmcache.integration.vllm.scheduler_side import StepPlan
from lmcache.integration.vllm.worker_side import WorkerSide
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem
from lmcache.v1.protocol import messages as m

CHUNK = 8
TOKENS = list(range(40))
SCOPE = Scope(chunk_size=CHUNK)
LEASES = itertools.count(1_000_000)


class Rank:
    """One worker with a few groups, whose blocks of 4 tokens are to hold the KV of TOKENS."""

    def __init__(
        self,
        server: LocalServer,
        groups: int = 1,
        *,
        mapped: bool = True,
        pad: int = 0,
        rank: int = 0,
        ranks: int = 1,
        **fields: Any,
    ) -> None:
        self.server = server
        self.memories = [
            PageMemory(
                layout(group=g, groups=groups, tp_rank=rank, tp_size=ranks, **fields), 64, pad, NULL_BLOCK
            )
            for g in range(groups)
        ]
        self.context = make_context(server, self.memories, rank, ranks, mapped)
        self.side = WorkerSide(self.context, rank)

    def fill(self, blocks: list[int]) -> None:
        for memory in self.memories:
            for i, block in enumerate(blocks):
                memory.fill(block, TOKENS[: 4 * (i + 1)])

    def item(self, blocks: list[int]) -> StoreItem:
        hashes = chunk_hashes(TOKENS[: 4 * len(blocks)], SCOPE)
        return StoreItem(CHUNK, hashes, [blocks] * len(self.memories))

    def store(self, blocks: list[int]) -> int:
        self.fill(blocks)
        return self.context.store([self.item(blocks)])

    def holds(self, blocks: list[int], first: int = 0) -> list[bool]:
        return [
            all(memory.holds(block, TOKENS[: 4 * (first + i + 1)]) for memory in self.memories)
            for i, block in enumerate(blocks)
        ]


class Lookups:
    """The scheduler's part."""

    def __init__(self, server: LocalServer, ranks: int = 1) -> None:
        reply, _ = server.ask(
            m.Hello(protocol_min=1, protocol_max=1, role="scheduler", engine="engine", ranks=ranks)
        )
        assert isinstance(reply, m.Welcome)
        self.server, self.session = server, reply.session

    def find(self, request: str = "r", start: int = 0) -> tuple[int, m.Found]:
        lease = next(LEASES)
        hashes = b"".join(chunk_hashes(TOKENS, SCOPE))
        message = m.Lookup(session=self.session, request=request, lease=lease, hashes=hashes, start=start)
        found, _ = self.server.ask(message)
        assert isinstance(found, m.Found)
        return lease, found

    def load(self, blocks: list[list[int]], skip: list[int] | None = None, start: int = 0) -> LoadItem:
        lease, found = self.find(start=start)
        skip = skip or [0] * len(blocks)
        return LoadItem("r", lease, found.epoch, found.slots[0], blocks, skip)


def plan(
    *loads: LoadItem, stores: list[StoreItem] | None = None, step: int = 1, clean_from: int = 0
) -> StepPlan:
    return StepPlan(step, clean_from, [(item, [item.slots]) for item in loads], stores or [])
