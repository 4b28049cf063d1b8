"""A serving engine in miniature: it schedules, computes and fails as vLLM does, on pages of plain bytes.

What a page must hold follows from the tokens before it, so that a wrong hit, a poisoned store or a page that
was never loaded is seen at once. A page computed from a wrong one is garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from helpers.local import LocalClient, LocalServer
from helpers.pages import PageMemory, layout
from lmcache.integration.vllm.scheduler_side import SchedulerSide, StepPlan
from lmcache.integration.vllm.worker_side import StepResult, WorkerSide
from lmcache.v1.keys import Scope, chunk_hashes, object_key
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

NULL_BLOCK = 0


@dataclass
class FakeRequest:
    """The attributes of a vLLM request that the connector reads, and the state that vLLM keeps of it."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: Sequence[Any] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    outputs: list[int] = field(default_factory=list)
    max_tokens: int = 1
    local: int = 0
    """Tokens that the engine's own prefix cache holds."""
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    cached: int = 0
    """Tokens that came from the cache server, all loads together."""

    @property
    def all_token_ids(self) -> list[int]:
        return [*(self.prompt_token_ids or []), *self.outputs]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.outputs)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [])


def make_context(
    server: LocalServer,
    memories: Sequence[PageMemory],
    rank: int = 0,
    ranks: int = 1,
    mapped: bool = True,
    **fields: Any,
) -> EngineDrivenTransferContext:
    """A transfer context that asks ``server`` in this process."""
    engine = fields.get("engine", "engine")
    context = EngineDrivenTransferContext(
        "tcp://127.0.0.1:1", engine, [memory.pages for memory in memories], rank, ranks
    )
    client: Any = LocalClient(server, "worker", engine, rank, ranks, mapped, context._register)
    context.client = client
    return context


@dataclass
class Step:
    plan: StepPlan
    ran: list[tuple[FakeRequest, int, int]]
    """Request, first token and number of tokens computed."""
    loading: list[FakeRequest]
    results: list[StepResult] = field(default_factory=list)


class MiniEngine:
    """One engine of ``ranks`` workers with a KV group per block size.

    Args:
        lag: how many steps are planned before the first one's outcome is known (1: asynchronous scheduling).
        budget: tokens computed per step, over all requests.
        options: of :class:`SchedulerSide`.
    """

    def __init__(
        self,
        server: LocalServer,
        *,
        block_sizes: Sequence[int] = (4,),
        ranks: int = 1,
        mapped: bool = True,
        num_blocks: int = 128,
        budget: int = 1 << 20,
        lag: int = 0,
        model: str = "model",
        name: str = "engine",
        **options: Any,
    ) -> None:
        self.server = server
        self.budget = budget
        self._lag = lag
        self._block_sizes = list(block_sizes)
        self.memories = [
            [
                PageMemory(
                    layout(model, size, group=group, groups=len(block_sizes), tp_rank=rank, tp_size=ranks),
                    num_blocks,
                    pad=rank,
                    null_block=NULL_BLOCK,
                )
                for group, size in enumerate(block_sizes)
            ]
            for rank in range(ranks)
        ]
        contexts = [
            make_context(server, mine, rank, ranks, mapped, engine=name)
            for rank, mine in enumerate(self.memories)
        ]
        self.workers = [WorkerSide(context, rank) for rank, context in enumerate(contexts)]
        self.client: Any = LocalClient(server, "scheduler", name, 0, ranks)
        self.side = SchedulerSide(self.client, block_sizes, ranks=ranks, **options)
        self._free = [set(range(1, num_blocks)) for _ in block_sizes]
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self._loading: list[FakeRequest] = []
        self._in_flight: list[Step] = []
        self._seen: list[FakeRequest] = []
        self._right: dict[bytes, bytes] = {}
        self._covered: dict[tuple[str, int], int] = {}
        self.plans: list[StepPlan] = []
        self.mishap: Callable[[], object] | None = None
        """Happens once, between the next plan that loads and its loads."""

    # ---- requests

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self._loading)

    def add(self, request: FakeRequest) -> FakeRequest:
        self.waiting.append(request)
        self._seen.append(request)
        return request

    def serve(self, name: str, tokens: list[int], **fields: Any) -> FakeRequest:
        """Run a request, and whatever else there is, to its end; what is stored is right."""
        request = self.add(FakeRequest(name, tokens, **fields))
        self.run()
        self.check_store()
        return request

    def preempt(self, request: FakeRequest) -> None:
        """Take its blocks away; it starts again later under its id."""
        self._settle()
        if request in self.running:
            self.running.remove(request)
            self._take_blocks(request)
            self.waiting.insert(0, request)

    def finish(self, request: FakeRequest) -> None:
        """Done or aborted."""
        self._settle()
        for queue in (self.running, self.waiting, self._loading):
            if request in queue:
                queue.remove(request)
        self._take_blocks(request)
        self.side.finished(request.request_id)

    def _take_blocks(self, request: FakeRequest) -> None:
        for group, ids in enumerate(request.blocks):
            self._free[group].update(ids)
            for mine in self.memories:
                mine[group].spoil(ids)
        request.blocks, request.computed = [], 0

    # ---- steps

    def run(self, steps: int = 100) -> None:
        """Step until every request has its tokens."""
        for _ in range(steps):
            if not self.unfinished:
                self._settle()
                return
            self.step()
        raise AssertionError(f"not done after {steps} steps: {self.waiting + self.running + self._loading}")

    def step(self) -> StepPlan:
        """Plan a step, let the workers do it, and learn of the outcome of the one ``lag`` steps ago."""
        if not self.clients_are_up:
            self.heartbeat()
        step = self._schedule()
        self.plans.append(step.plan)
        if self.mishap is not None and step.plan.loads:
            self.mishap()
            self.mishap = None
        self._execute(step)
        self._in_flight.append(step)
        while len(self._in_flight) > self._lag:
            self._learn(self._in_flight.pop(0))
        return step.plan

    def heartbeat(self) -> None:
        """Every client asks whether its session still stands."""
        for client in self._clients:
            client.reconnect()

    @property
    def clients_are_up(self) -> bool:
        return all(client.up for client in self._clients)

    @property
    def _clients(self) -> list[Any]:
        return [self.client, *(worker.context.client for worker in self.workers)]

    def _settle(self) -> None:
        while self._in_flight:
            self._learn(self._in_flight.pop(0))

    def _schedule(self) -> Step:
        ran, loading, left = [], [], self.budget
        for request in list(self.running):
            n = min(left, request.num_tokens - request.computed)
            if n > 0:
                ran.append((request, request.computed, n))
                left -= n
        for request in list(self.waiting):
            if left <= 0:
                break
            external = 0
            if request.computed == 0:
                found = self.side.matched_tokens(request, request.local)
                if found is None:
                    continue
                external = found
                again = self.side.matched_tokens(request, request.local)
                assert external in (0, again), "asking twice takes nothing back"
                assert request.local + external < request.num_tokens
                self._give_blocks(request)
                self.side.allocated(request, tuple(request.blocks), external)
                request.computed = request.local + external
                request.cached += external
            else:
                self.side.allocated(request, tuple(request.blocks), 0)
            self.waiting.remove(request)
            if external and len(self._block_sizes) > 1:
                self._loading.append(request)
                loading.append(request)
                continue
            self.running.append(request)
            n = min(left, request.num_tokens - request.computed)
            ran.append((request, request.computed, n))
            left -= n
        for request, computed, n in ran:
            self._give_blocks(request)
            self.side.scheduled(request.request_id, computed, n, tuple(request.blocks))
            request.computed = computed + n
        return Step(self.side.take_plan(), ran, loading)

    def _give_blocks(self, request: FakeRequest) -> None:
        first = not request.blocks
        if first:
            request.blocks = [[] for _ in self._block_sizes]
        for group, size in enumerate(self._block_sizes):
            while len(request.blocks[group]) * size < request.num_tokens:
                request.blocks[group].append(self._free[group].pop())
        if first:
            self._compute(request, 0, request.local)

    def _execute(self, step: Step) -> None:
        for worker in self.workers:
            worker.load(step.plan)
        for request, computed, n in step.ran:
            self._compute(request, computed, n)
        for worker in self.workers:
            worker.store(step.plan)
            step.results.append(worker.take_result())

    def _compute(self, request: FakeRequest, computed: int, n: int) -> None:
        """Fill the pages of ``n`` tokens; garbage if a page before them is not right."""
        tokens = request.all_token_ids
        for mine in self.memories:
            for memory, ids in zip(mine, request.blocks, strict=True):
                size = memory.namespace.block_size
                sound = self._is_sound(memory, ids, tokens, computed)
                for index in range(computed // size, -(-(computed + n) // size)):
                    if sound:
                        memory.fill(ids[index], tokens[: min((index + 1) * size, computed + n)])
                    else:
                        memory.spoil([ids[index]])

    @staticmethod
    def _is_sound(memory: PageMemory, ids: Sequence[int], tokens: Sequence[int], computed: int) -> bool:
        """Whether the pages of the first ``computed`` tokens are right.

        Of a block that is computed in part the whole may be right, too: it was loaded, and its last token is
        computed again.
        """
        size = memory.namespace.block_size
        for index in range(-(-computed // size)):
            whole = tokens[: (index + 1) * size]
            if not memory.holds(ids[index], whole) and not memory.holds(ids[index], whole[:computed]):
                return False
        return True

    def _learn(self, step: Step) -> None:
        failed = set().union(*(result.failed for result in step.results))
        bad = set().union(*(result.bad_blocks for result in step.results))
        if len(self._block_sizes) > 1:
            assert set().union(*(result.loaded for result in step.results)) == {
                r.request_id for r in step.loading
            }
        if failed:
            self.side.failed(failed if len(self._block_sizes) > 1 else ())
        if step.plan.loads:
            self.side.confirmed(step.plan.step)
        for request in step.loading:
            if request in self._loading:
                self._loading.remove(request)
                if request.request_id in failed:
                    request.cached -= request.computed - request.local
                    request.computed = 0
                self.waiting.insert(0, request)
        for request, computed, n in step.ran:
            if request not in self.running or request.computed < computed + n:
                continue  # gone, or set back by a failure before
            hit = next((i for i, block in enumerate(request.blocks[0]) if block in bad), None)
            if len(self._block_sizes) == 1 and hit is not None and hit * self._block_sizes[0] < computed:
                request.cached -= computed - max(request.local, hit * self._block_sizes[0])
                request.computed = hit * self._block_sizes[0]
                for later in self._in_flight:
                    later.ran = [ran for ran in later.ran if ran[0] is not request]
            elif computed + n == request.num_tokens:
                self._sample(request)

    def _sample(self, request: FakeRequest) -> None:
        tokens = request.all_token_ids
        for mine in self.memories:
            for memory, ids in zip(mine, request.blocks, strict=True):
                assert self._is_sound(memory, ids, tokens, len(tokens)), f"{request.request_id}: wrong pages"
        if len(request.outputs) + 1 >= request.max_tokens:
            self.finish_quietly(request)
        else:
            request.outputs.append(sum(tokens) % 1009)

    def finish_quietly(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self._take_blocks(request)
        self.side.finished(request.request_id)

    def planned(self) -> list[bytes]:
        """The chunks that were to be stored, in order."""
        return [h for plan in self.plans for item in plan.stores for h in item.hashes]

    # ---- what must hold

    def right_objects(self) -> dict[bytes, bytes]:
        """Key and right content of every object that a request may have stored."""
        size = self.server.chunk_size
        for request in self._seen:
            known = self._covered.get((request.request_id, size), 0)
            tokens = request.all_token_ids
            if len(tokens) // size == known:
                continue
            self._covered[request.request_id, size] = len(tokens) // size
            for worker, mine in zip(self.workers, self.memories, strict=True):
                for group, memory in zip(worker.context.groups, mine, strict=True):
                    namespace = msgspec.structs.replace(group.namespace, chunk_size=size).digest()
                    for i, chunk in enumerate(chunk_hashes(tokens, scope_of(request, size))):
                        if i >= known:
                            right = memory.chunk(tokens[: (i + 1) * size], size)
                            self._right[object_key(namespace, chunk)] = right
        return self._right

    def stored_chunks(self, request: FakeRequest) -> int:
        """Chunks of a request that the server holds for all ranks and groups, from the first on."""
        size = self.server.chunk_size
        held, n = self.server.objects().keys(), 0
        for chunk in chunk_hashes(request.all_token_ids, scope_of(request, size)):
            groups = [group for worker in self.workers for group in worker.context.groups]
            if not all(object_key(group.namespace.digest(), chunk) in held for group in groups):
                break
            n += 1
        return n

    def check_store(self) -> None:
        """Everything that is published is what it claims to be."""
        right = self.right_objects()
        for key, data in self.server.objects().items():
            assert right.get(key) == data, "a stored object is not the KV of its tokens"


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def scope_of(request: FakeRequest, chunk_size: int) -> Scope:
    tags = {
        key.removeprefix("lmcache.tag."): str(value)
        for key, value in (request.kv_transfer_params or {}).items()
        if key.startswith("lmcache.tag.")
    }
    lora = "" if request.lora_request is None else str(request.lora_request)
    return Scope(chunk_size=chunk_size, lora=lora, salt=request.cache_salt or "", tags=tags)
