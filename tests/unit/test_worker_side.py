"""What the worker side promises: loads that are complete on return, or failures that name their blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.local import LocalServer
from helpers.mini_engine import NULL_BLOCK
from helpers.pages import PageMemory, layout
from helpers.rank import CHUNK, SCOPE, TOKENS, Lookups, Rank, plan
from lmcache.integration.vllm.scheduler_side import StepPlan
from lmcache.integration.vllm.worker_side import WorkerSide
from lmcache.v1.keys import chunk_hashes
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    LoadItem,
    StoreItem,
    create_transfer_context,
)
from lmcache.v1.platform.cpu import CpuDeviceSpec
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Unavailable


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(chunk_size=CHUNK)


BOTH = pytest.mark.parametrize("mapped", [True, False], ids=["shared memory", "frames"])
A, B = list(range(1, 11)), list(range(20, 30))


# -------------------------------------------------------------------------------------------- whole transfers


@BOTH
@pytest.mark.parametrize("pad", [0, 24], ids=["tight", "padded"])
@pytest.mark.parametrize(
    "blocks",
    [B, B[::-1], [30, 21, 22, 40, 41, 42, 50, 20, 19, 18]],
    ids=["in sequence", "backwards", "scattered"],
)
def test_what_was_stored_is_loaded_byte_for_byte(
    server: LocalServer, mapped: bool, pad: int, blocks: list[int]
) -> None:
    rank = Rank(server, 2, mapped=mapped, pad=pad)
    assert rank.store(A) == 2 * 5
    item = Lookups(server).load([blocks, blocks])
    rank.side.load(plan(item))
    assert all(rank.holds(blocks))
    assert all(memory.padding_is_untouched() for memory in rank.memories)
    others = set(range(64)) - set(blocks) - set(A)
    assert all(memory.is_spoilt(block) for memory in rank.memories for block in others)
    assert server.left_over() == {"requests": 1}
    assert rank.side.take_result().loaded == {"r"}


@BOTH
@pytest.mark.parametrize("skip", range(11))
def test_blocks_that_the_engine_holds_already_are_not_written(
    server: LocalServer, mapped: bool, skip: int
) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    rank.side.load(plan(Lookups(server).load([B], [skip])))
    assert rank.holds(B) == [False] * skip + [True] * (10 - skip)
    assert all(rank.memories[0].is_spoilt(block) for block in B[:skip])


@BOTH
def test_a_null_block_is_neither_read_nor_written(server: LocalServer, mapped: bool) -> None:
    rank = Rank(server, mapped=mapped)
    rank.fill(A)
    hole = [*A[:3], NULL_BLOCK, *A[4:]]
    assert rank.context.store([rank.item(hole)]) == 4, "the chunk with the hole is not stored"
    assert Lookups(server).find()[1].chunks == 1
    assert rank.context.store([rank.item(A)]) == 1
    target = [*B[:6], NULL_BLOCK, *B[7:]]
    rank.side.load(plan(Lookups(server).load([target])))
    assert rank.memories[0].is_spoilt(NULL_BLOCK)
    assert rank.holds(target) == [True] * 6 + [False] + [True] * 3


@BOTH
def test_a_load_from_the_middle_of_a_prompt_takes_those_chunks(server: LocalServer, mapped: bool) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    rank.side.load(plan(Lookups(server).load([B[:6]], [1], start=2)))
    assert rank.holds(B[:6], first=4) == [False, True, True, True, True, True]


def test_what_is_stored_is_layer_by_layer_the_pages_of_the_chunk(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    expected = [rank.memories[0].chunk(TOKENS[: CHUNK * (i + 1)], CHUNK) for i in range(5)]
    assert sorted(server.objects().values()) == sorted(expected)


@BOTH
def test_an_object_larger_than_a_piece_travels_whole(
    server: LocalServer, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PIECE_BYTES", 50)
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    rank.side.load(plan(Lookups(server).load([B])))
    assert all(rank.holds(B))


def test_storing_again_moves_no_bytes(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    before = rank.context.counters.stored_bytes
    assert before == 5 * 2 * (32 + 48)
    assert rank.store(A) == 0
    assert rank.context.counters.stored_bytes == before
    assert server.left_over() == {}


def test_a_full_pool_stores_what_it_can_and_gives_the_rest_up() -> None:
    server = LocalServer(pages=3, chunk_size=CHUNK, eviction_policy="noop")
    rank = Rank(server)
    assert rank.store(A) == 3
    assert rank.store(A) == 0
    assert server.left_over() == {}


def test_a_rank_whose_kv_another_rank_stores_stores_nothing(server: LocalServer) -> None:
    rank = Rank(server)
    rank.context._stores = False
    assert rank.store(A) == 0
    assert server.objects() == {}


def test_chunks_planned_for_another_chunk_size_are_not_stored(server: LocalServer) -> None:
    rank = Rank(server)
    item = rank.item(A)
    item.chunk_size = 2 * CHUNK
    assert rank.context.store([item]) == 0
    assert server.objects() == {}


def test_each_rank_takes_its_own_slots(server: LocalServer) -> None:
    ranks = [Rank(server, rank=r, ranks=2) for r in range(2)]
    for rank in ranks:
        rank.store(A)
    lease, found = Lookups(server, ranks=2).find()
    item = LoadItem("r", lease, found.epoch, [], [B], [0])
    for rank in ranks:
        rank.side.load(StepPlan(1, 0, [(item, found.slots)]))
        assert all(rank.holds(B))
    assert item.slots == [], "the plan is shared: nobody writes to it"
    assert server.left_over() == {"requests": 1}


@given(
    blocks=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    skip=st.integers(0, 8),
    pad=st.sampled_from([0, 16]),
)
def test_spans_cover_each_wanted_block_once_at_its_place_and_are_as_few_as_can_be(
    blocks: list[int], skip: int, pad: int
) -> None:
    pages = PageMemory(layout(chunk_size=4 * len(blocks)), 10, pad, NULL_BLOCK).pages
    spans = pages.spans(blocks, skip)
    wanted = [(i, block) for i, block in enumerate(blocks) if i >= skip and block != NULL_BLOCK]
    assert [(s.place + i, s.block + i) for s in spans for i in range(s.length)] == wanted
    joined = sum((i - 1, block - 1) in wanted for i, block in wanted)
    assert len(spans) == len(wanted) - (0 if pad else joined)


# --------------------------------------------------------------------------------------------------- failures


@BOTH
def test_a_load_whose_lease_has_ended_fails_with_its_blocks_and_does_not_raise(
    server: LocalServer, mapped: bool
) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    item = Lookups(server).load([B], [3])
    server.take_back()
    rank.side.load(plan(item))
    result = rank.side.take_result()
    assert (result.loaded, result.failed) == ({"r"}, {"r"})
    assert result.bad_blocks == set(B[3:])
    assert rank.side.take_result().failed == set()
    assert rank.context.counters.failed_loads == 1


def test_the_null_block_is_never_reported_as_bad(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    item = Lookups(server).load([[NULL_BLOCK, NULL_BLOCK, *B[2:]]])
    server.take_back()
    rank.side.load(plan(item))
    assert rank.side.take_result().bad_blocks == set(B[2:]), "other requests have the null block, too"


def test_memory_that_was_given_to_another_object_is_never_loaded(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    item = Lookups(server).load([B])
    server.take_back()
    for memory in rank.memories:
        for block in A:
            memory.fill(block, [block])
    rank.context.store([StoreItem(CHUNK, chunk_hashes(range(900, 940), SCOPE), [A])])
    rank.side.load(plan(item))
    assert rank.side.take_result().failed == {"r"}
    assert all(rank.memories[0].is_spoilt(block) for block in B), "noticed before anything was written"


def test_memory_that_is_taken_back_during_the_copy_is_noticed(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1.multiprocess.transfer_context import engine_driven

    rank = Rank(server)
    rank.store(A)
    item = Lookups(server).load([B])
    copy = engine_driven.copy_pages

    def copy_while_it_changes(*arguments: Any) -> None:
        server.take_back()
        copy(*arguments)

    monkeypatch.setattr(engine_driven, "copy_pages", copy_while_it_changes)
    rank.side.load(plan(item))
    assert rank.side.take_result().bad_blocks == set(B)


def test_a_load_looked_up_at_a_server_before_its_restart_fails(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    item = Lookups(server).load([B])
    server.start()
    client: Any = rank.context.client
    client.reconnect()
    rank.store(A)  # the new server has objects at the same places
    rank.side.load(plan(item))
    assert rank.side.take_result().failed == {"r"}
    assert all(rank.memories[0].is_spoilt(block) for block in B)


@BOTH
@pytest.mark.parametrize("blocks", [B[:-1], [*B, 31], []])
def test_a_load_that_does_not_fit_its_blocks_fails_as_a_whole(
    server: LocalServer, mapped: bool, blocks: list[int]
) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    item = Lookups(server).load([blocks])
    rank.side.load(plan(item))
    assert rank.side.take_result().failed == {"r"}
    assert server.left_over() == {"requests": 1}


@BOTH
def test_a_block_that_the_engine_does_not_have_fails_the_load_and_the_store_and_raises_nothing(
    server: LocalServer, mapped: bool
) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    rank.side.load(plan(Lookups(server).load([[*B[:-1], 64]])))
    assert rank.side.take_result().failed == {"r"}
    server.service.l1.clear()
    assert rank.context.store([rank.item([*A[:-1], 64])]) == 0
    assert server.left_over() == {"requests": 1}


def test_one_load_s_failure_leaves_the_others_good(server: LocalServer) -> None:
    rank = Rank(server)
    rank.store(A)
    lookups = Lookups(server)
    good, bad = lookups.load([B]), lookups.load([list(range(40, 50))])
    bad.slots[0][1] += 1
    bad.request = "bad"
    rank.side.load(plan(good, bad))
    result = rank.side.take_result()
    assert (result.loaded, result.failed) == ({"r", "bad"}, {"bad"})
    assert result.bad_blocks == set(range(40, 50))
    assert all(rank.holds(B))


@BOTH
def test_a_server_that_does_not_answer_costs_the_transfer_and_nothing_else(
    server: LocalServer, mapped: bool
) -> None:
    rank = Rank(server, mapped=mapped)
    rank.store(A)
    item = Lookups(server).load([B])
    server.answers = False
    assert rank.context.store([StoreItem(CHUNK, chunk_hashes(range(900, 940), SCOPE), [A])]) == 0
    rank.side.load(plan(item))
    result = rank.side.take_result()
    if mapped:
        assert all(rank.holds(B)), "the pool is mapped: its bytes are there without the server"
        assert not result.failed
    else:
        assert result.failed == {"r"}
    server.answers = True
    client: Any = rank.context.client
    assert client.reconnect()
    assert server.left_over() == {"requests": 1}


class Misleading:
    """A client whose server answers as it should not."""

    up = True
    session = "session"
    attachment = None
    welcome = None

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.posted: list[m.Request] = []

    def new_lease(self) -> int:
        return 1

    def call(self, *_: Any) -> tuple[Any, list[bytes]]:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply, []

    def post(self, message: m.Request) -> None:
        self.posted.append(message)


@pytest.mark.parametrize(
    "replies",
    [
        [m.Ok()],
        [m.Reserved(epoch="", slots=[])],
        [m.Reserved(epoch="", slots=[[0, 1]])],
        [m.Reserved(epoch="", slots=[[0] * 9])],
        [m.Reserved(epoch="", slots=[[1 << 40, 1] * 5])],
        [m.Reserved(epoch="", slots=[[0, 1] * 5]), m.Found(epoch="", chunks=1)],
        [Unavailable("no answer")],
    ],
    ids=["another reply", "no group", "too few", "odd", "outside the pool", "no end", "no answer"],
)
def test_whatever_a_server_answers_to_a_store_it_is_dropped_and_given_back(
    server: LocalServer, replies: list[Any]
) -> None:
    rank = Rank(server)
    client: Any = Misleading(*replies)
    rank.context.client = client
    assert rank.store(A) == 0
    assert [type(message) for message in client.posted] == [m.Abort]
    assert (rank.context.counters.dropped_stores, rank.context.counters.stored_bytes) == (5, 0)


# --------------------------------------------------------------------------------------------- poisoned steps


class Recorder:
    """A transfer context that fails the loads it is told to, and remembers what it was to store."""

    def __init__(self, *failing: str) -> None:
        self.groups = [PageMemory(layout(), 1).pages]
        self.failing = failing
        self.stored: list[Any] = []

    def load(self, items: list[LoadItem]) -> list[LoadItem]:
        return [item for item in items if item.request in self.failing]

    def store(self, items: list[StoreItem]) -> None:
        self.stored.extend(items)


def load_of(request: str) -> LoadItem:
    return LoadItem(request, 1, "", [[]], [[1, 2]], [0])


@pytest.mark.parametrize(
    ("step", "clean_from", "stored"), [(5, 0, 0), (6, 0, 0), (6, 5, 0), (7, 6, 1), (9, 6, 1), (9, 5, 0)]
)
def test_after_a_failed_load_only_plans_that_know_of_it_are_stored(
    step: int, clean_from: int, stored: int
) -> None:
    recorder: Any = Recorder("r")
    side = WorkerSide(recorder, 0)
    store = StoreItem(CHUNK, [b""], [[1]])
    side.load(plan(load_of("r"), step=5))
    side.store(plan(stores=[store], step=step, clean_from=clean_from))
    assert len(recorder.stored) == stored


def test_loads_that_succeed_hold_no_store_back() -> None:
    recorder: Any = Recorder()
    side = WorkerSide(recorder, 0)
    step = plan(load_of("r"), stores=[StoreItem(CHUNK, [b""], [[1]])], step=5)
    side.load(step)
    side.store(step)
    assert len(recorder.stored) == 1


# ------------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("mode", ["auto", "engine_driven"])
def test_engine_driven_is_what_there_is(mode: str) -> None:
    context = create_transfer_context(mode, "tcp://127.0.0.1:1", "engine", [PageMemory(layout(), 4).pages])
    assert isinstance(context, EngineDrivenTransferContext)
    assert context.path == "down"


def test_a_mode_that_cannot_be_delivered_is_an_error_and_never_another_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDeviceSpec, "event_ipc_backend", None)
    pages = [PageMemory(layout(), 4).pages]
    with pytest.raises(
        ValueError, match="lmcache_driven: required platform capability checks failed for cpu: event"
    ):
        create_transfer_context("lmcache_driven", "tcp://127.0.0.1:1", "engine", pages)
    with pytest.raises(ValueError, match="expected one device"):
        create_transfer_context("lmcache_driven", "tcp://127.0.0.1:1", "engine", [])


@BOTH
def test_the_path_that_bytes_take_can_be_told(server: LocalServer, mapped: bool) -> None:
    rank = Rank(server, mapped=mapped)
    assert rank.context.path == ("shared_memory" if mapped else "frames")
    sessions: Any = server.service.status()["sessions"]
    assert [s["path"] for s in sessions] == [rank.context.path]
