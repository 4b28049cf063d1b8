"""What workers and a real server promise each other while nothing fails: bytes, hits, leases."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.rig import NULL_BLOCK, A, B, C, Rig, RigProcess, prompt
from helpers.server import RunningServer, Worker, channel_to, hello, namespace, running_server, wait_for
from lmcache.v1.multiprocess.transfer_context import engine_driven
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed

CHUNK = 32
"""Tokens per chunk: two blocks."""
NAMES = (f"engine-{i}" for i in itertools.count())
PATHS = pytest.mark.parametrize("shm", ["require", "off"], ids=["shared memory", "frames"])


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """A server that nothing is left behind on, whatever a test does."""
    yield shared_server
    wait_for(lambda: left_over(shared_server) == {}, 10, f"all given back: {left_over(shared_server)}")


def left_over(server: RunningServer) -> dict[str, Any]:
    """What clients hold."""
    state = server.state()
    held = {name: state["l1"][name] for name in ("read_leases", "write_leases", "pinned_objects")}
    return {k: v for k, v in (held | {name: state[name] for name in ("requests", "sessions")}).items() if v}


def rig(server: RunningServer, engine: str = "", **settings: Any) -> Rig:
    """A rig whose model, unless given, is no other test's."""
    name = next(NAMES)
    return Rig(server.address, engine or name, **({"model": name} | settings))


# ---------------------------------------------------------------------------------------------------- bytes


@PATHS
@pytest.mark.parametrize("pad", [0, 128], ids=["tight", "padded"])
@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "two groups"])
def test_another_process_loads_what_was_stored_byte_for_byte(
    server: RunningServer, shm: str, pad: int, groups: int
) -> None:
    with rig(server, model=f"bytes-{shm}-{pad}", groups=groups, pad=pad, shm=shm) as here:
        assert here.store(prompt(), A) == 5 * groups
        with RigProcess(
            server.address, next(NAMES), model=f"bytes-{shm}-{pad}", groups=groups, pad=pad, shm=shm
        ) as there:
            assert there.call("paths") == here.paths() == ["shared_memory" if shm == "require" else "frames"]
            scattered = [33, 22, 23, 24, 50, 49, 48, 60, 20, 61]
            assert there.call("lookup", "r", prompt()) == 5
            assert there.call("load", "r", scattered) == [True]
            assert there.call("holds", prompt(), scattered)
            assert there.call("spoilt", sorted(set(range(64)) - set(scattered)))
            there.call("end", "r")
            there.close()
        assert all(
            memory.padding_is_untouched() for memories in here.memories.values() for memory in memories
        )


@PATHS
def test_the_two_ways_carry_the_same_bytes(server: RunningServer, shm: str) -> None:
    other = "off" if shm == "require" else "require"
    with rig(server, model=f"ways-{shm}", shm=shm) as one, rig(server, model=f"ways-{shm}", shm=other) as two:
        assert one.store(prompt(), A) == 5
        assert two.fetch("r", prompt(), B) == 5


@PATHS
def test_an_object_larger_than_a_piece_arrives_whole(shm: str) -> None:
    size = (5 << 20) + 24
    assert 2 * size > m.PIECE_BYTES
    with running_server("--chunk-size", str(CHUNK), l1_gb=0.1) as server:
        with rig(server, page_bytes=(size, 40), num_blocks=9, shm=shm) as large:
            assert large.store(prompt(64), [1, 2, 3, 4]) == 2
            assert large.fetch("r", prompt(64), [5, 6, 7, 8]) == 2


@PATHS
def test_what_the_engine_holds_and_null_blocks_are_left_alone(server: RunningServer, shm: str) -> None:
    with rig(server, shm=shm) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        target = [*B[:6], NULL_BLOCK, *B[7:]]
        assert engine.load("r", target, skip=3) == [True]
        assert engine.spoilt([*B[:3], NULL_BLOCK])
        assert engine.holds(prompt(), target[3:], first=3)
        engine.end("r")


# ----------------------------------------------------------------------------------------------------- hits


def test_a_longer_prompt_hits_as_far_as_it_is_stored(server: RunningServer) -> None:
    with rig(server) as engine:
        engine.store(prompt(100), A[:6])
        assert engine.lookup("whole", prompt()) == 3
        assert engine.lookup("from the middle", prompt(), start=1) == 2
        assert engine.lookup("behind the end", prompt(), start=3) == 0
        assert engine.lookup("another", [7, *prompt()[1:]]) == 0
        assert engine.load("from the middle", B[:4]) == [True]
        assert engine.holds(prompt(), B[:4], first=2)
        for request in ("whole", "from the middle", "behind the end", "another"):
            engine.end(request)


def test_a_prefix_with_a_gap_ends_at_the_gap(server: RunningServer) -> None:
    with rig(server) as engine:
        engine.compute(prompt(), A)
        assert engine.store(prompt(), [*A[:5], NULL_BLOCK, *A[6:]]) == 4
        assert engine.lookup("r", prompt()) == 2
        engine.end("r")


def test_a_hit_is_one_for_every_rank_and_group(server: RunningServer) -> None:
    with rig(server, ranks=2, groups=2) as engine:
        assert engine.store(prompt(), A, rank=0) == 10
        assert engine.lookup("one rank", prompt()) == 0
        assert engine.store(prompt(100), A[:6], rank=1) == 6
        assert engine.fetch("both, in part", prompt(), B[:6]) == 3
        assert engine.store(prompt(), A, rank=1) == 4
        assert engine.fetch("both", prompt(), C) == 5
        engine.end("one rank")


def test_before_all_ranks_are_there_nothing_hits(server: RunningServer) -> None:
    with rig(server, engine="pair", model="pair", ranks=2) as engine:
        engine.store(prompt(), A)
    with rig(server, engine="pair", model="pair", ranks=2, only=0) as half:
        assert half.lookup("too early", prompt()) == 0
        with rig(server, engine="pair", model="pair", ranks=2, only=1, scheduler=False):
            assert half.lookup("in time", prompt()) == 5
            half.end("in time")
        wait_for(lambda: half.lookup("too late", prompt()) == 0, 5)
        half.end("too late")
        half.end("too early")


def test_engines_of_the_same_model_share_and_of_any_other_do_not(server: RunningServer) -> None:
    same: dict[str, Any] = {"model": "shared", "revision": "r1"}
    others: list[dict[str, Any]] = [
        {"model": "other"},
        {"revision": "r2"},
        {"dtype": "float16"},
        {"format": "other"},
        {"block_size": 32},
        {"page_bytes": (384, 256)},
        {"kv_heads": 2},
        {"packing": "other"},
        {"layers": ("a", "b")},
        {"extra": {"quantization": "fp8"}},
    ]
    with rig(server, **same) as first, rig(server, **same) as second:
        assert first.store(prompt(), A) == 5
        assert second.store(prompt(), A) == 0
        assert second.fetch("r", prompt(), B) == 5
        for fields in others:
            with rig(server, **(same | fields)) as stranger:
                assert stranger.lookup("r", prompt()) == 0, fields
                stranger.end("r")
        for scope in ({"salt": "a"}, {"lora": "a"}, {"tags": {"a": "b"}}):
            assert second.lookup("s", prompt(), **scope) == 0
            assert first.store(prompt(), A, **scope) == 5
            assert second.fetch("s", prompt(), B, **scope) == 5


def test_two_engines_under_one_name_share_only_if_they_are_the_same(server: RunningServer) -> None:
    with rig(server, engine="namesake", model="m1") as first:
        assert first.store(prompt(), A) == 5
        with rig(server, engine="namesake", model="m2", quick=True, wait=0) as other:
            worker = other.workers[0].client
            wait_for(lambda: "engine_id of its own" in worker.reason, 5)
            assert not worker.up
            assert other.store(prompt(), A) == 0
        assert first.fetch("r", prompt(), B) == 5
        with rig(server, engine="namesake", model="m1") as same:
            assert same.fetch("r", prompt(), B) == 5
        assert first.fetch("still there", prompt(), C) == 5


# ------------------------------------------------------------------------------------------------ shared memory


@pytest.mark.parametrize("sent", [0, 1, 1023])
def test_a_chunk_that_did_not_arrive_whole_in_frames_is_not_published(
    server: RunningServer, sent: int
) -> None:
    shape = namespace(f"partial {sent}", CHUNK, page_bytes=(512,))
    assert shape.object_bytes == 1024
    with channel_to(server.address) as channel, Worker(server.address, [shape], "partial") as worker:
        session, digest = worker.session, os.urandom(32)
        worker.ask(m.Reserve(session=session, lease=1, hashes=[digest]))
        if sent:
            worker.ask(m.Write(session=session, lease=1, index=0), [bytes(sent)])
        with pytest.raises(RequestFailed, match="not written in full"):
            worker.ask(m.Commit(session=session, lease=1, indexes=[0]))
        found = channel.call(m.Lookup(session=session, request="r", lease=2, hashes=digest), 5)[0]
        assert isinstance(found, m.Found)
        assert found.chunks == 0
        worker.ask(m.Abort(session=session, leases=[1]))


def test_a_worker_that_is_refused_again_and_again_does_not_fill_the_server_s_log() -> None:
    with running_server("--chunk-size", str(CHUNK)) as server, rig(server, engine="namesake", model="m1"):
        with rig(server, engine="namesake", model="m2", quick=True, wait=0) as other:
            wait_for(lambda: server.metrics()['lmcache_mp_errors_total{code="bad_request"}'] > 5, 10)
            assert "engine_id of its own" in other.reasons()[0]
        assert "closed" not in server.errors()


def test_a_worker_of_another_user_works_through_frames_and_says_once_why(server: RunningServer) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process under another uid")
    with rig(server, model="uids") as root:
        root.store(prompt(), A)
        with RigProcess(server.address, "nobody", uid=65534, model="uids") as other:
            assert other.call("paths") == ["frames"]
            assert other.call("fetch", "r", prompt(), B) == 5
            assert other.call("store", prompt(160, 1000), A) == 5
            said = [line for line in other.close().splitlines() if "frames" in line]
        assert root.fetch("r", prompt(160, 1000), C) == 5
    assert len(said) == 1
    assert "uid 65534 may not map the pool of a server that runs as uid 0" in said[0]


def test_a_worker_that_insists_on_shared_memory_has_no_cache_without_it() -> None:
    with running_server("--chunk-size", str(CHUNK), "--shm", "off") as server:
        with rig(server, shm="require", quick=True, wait=0) as engine:
            worker = engine.workers[0].client
            wait_for(lambda: "require" in worker.reason, 5)
            assert worker.reason == "lmcache.mp.shm=require: the server keeps its pool to itself (--shm off)"
            assert engine.store(prompt(), A) == 0
            wait_for(lambda: worker.session == "" and len(server.state()["sessions"]) <= 2, 5)
        with rig(server) as engine:
            assert engine.paths() == ["frames"]
            engine.store(prompt(), A)
            assert engine.fetch("r", prompt(), B) == 5


# -------------------------------------------------------------------------------------------- memory and leases


@PATHS
def test_under_a_burst_of_stores_pins_stay_and_every_hit_is_right(shm: str) -> None:
    flags = ("--chunk-size", str(CHUNK))
    page = 16 << 10  # a chunk of 64 KiB: the pool holds 32
    with (
        running_server(*flags, l1_gb=2 / 1024) as server,
        rig(server, model="burst", page_bytes=(page, page), shm=shm) as engine,
        rig(server, model="burst", page_bytes=(page, page), shm=shm) as other,
    ):
        engine.store(prompt(), A)
        assert engine.lookup("pinned", prompt()) == 5
        hits = 0
        for i in range(1, 16):
            tokens = prompt(160, i * 1000)
            assert (engine if i % 2 else other).store(tokens, A) == 5
            hits += other.fetch(f"r{i}", prompt(160, max(0, i - 3) * 1000), B)
        assert hits > 0
        usage = server.state()["l1"]
        assert usage["evicted"] > 0
        assert usage["dropped_full"] == 0
        assert usage["used_bytes"] <= usage["capacity_bytes"]
        assert engine.load("pinned", C) == [True]
        assert engine.holds(prompt(), C)
        engine.end("pinned")
        wait_for(lambda: left_over(server).keys() == {"sessions"})


def test_of_a_request_that_ended_the_last_chunks_are_evicted_first() -> None:
    page = 16 << 10
    with (
        running_server("--chunk-size", str(CHUNK), l1_gb=1 / 1024) as small,
        rig(small, page_bytes=(page, page)) as engine,
    ):
        assert engine.lookup("r", prompt()) == 0
        for first, end in ((0, 64), (2, 128), (4, 160)):  # as prefill in parts stores it
            engine.store(prompt(end), A[: end // 16], first=first)
        engine.end("r")
        for i in range(1, 12):
            engine.store(prompt(32, i * 1000), A[:2])
        left = engine.lookup("again", prompt())
        assert 0 < left < 5
        engine.end("again")


AS_IT_CAME = ("--chunk-size", str(CHUNK), "--eviction-policy", "LRU")
"""The default policy would keep what was looked up once and evict the others."""


def test_a_stale_reader_never_gets_another_object_s_bytes() -> None:
    page = 16 << 10
    with (
        running_server(*AS_IT_CAME, l1_gb=1 / 1024) as server,
        rig(server, page_bytes=(page, page)) as engine,
    ):
        engine.store(prompt(), A)
        assert engine.lookup("stale", prompt()) == 5
        hit = engine._hits["stale"]
        engine.end("stale")
        for i in range(1, 8):
            assert engine.store(prompt(160, i * 1000), A) == 5
        engine._hits["stale"] = hit
        assert engine.load("stale", B) == [False]
        assert engine.spoilt(B)


def test_a_reader_whose_object_is_replaced_during_the_copy_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 16 << 10
    copy = engine_driven.copy_pages
    with (
        running_server(*AS_IT_CAME, l1_gb=1 / 1024) as server,
        rig(server, page_bytes=(page, page)) as engine,
        rig(server, page_bytes=(page, page)) as other,
    ):
        engine.store(prompt(), A)
        assert engine.lookup("slow", prompt()) == 5

        def copy_slowly(group: Any, direction: Any, chunks: Any) -> None:
            if direction == "load":
                engine.end("slow")
                for i in range(1, 8):
                    other.store(prompt(160, i * 1000), A)
            copy(group, direction, chunks)

        monkeypatch.setattr(engine_driven, "copy_pages", copy_slowly)
        assert engine.load("slow", B) == [False]


def test_aborts_at_any_time_leave_nothing_held(server: RunningServer) -> None:
    with rig(server) as engine:
        engine.store(prompt(), A)
        for i in range(60):
            engine.lookup(f"r{i}", prompt())
            if i % 3 == 1:
                engine.load(f"r{i}", B)
            if i % 3 == 2:
                engine.lookup(f"r{i}", prompt(), start=i % 5)
            engine.end(f"r{i}")
        wait_for(lambda: left_over(server).keys() == {"sessions"})


@PATHS
def test_the_end_of_a_session_gives_back_what_it_held(server: RunningServer, shm: str) -> None:
    engine = rig(server, shm=shm)
    engine.store(prompt(), A)
    assert engine.lookup("r", prompt()) == 5
    worker = engine.workers[0].client
    hashes = [bytes(32) + bytes([i]) * 32 for i in range(3)]
    worker.call(m.Reserve(session=worker.session, lease=worker.new_lease(), hashes=[b"".join(hashes)]))
    assert left_over(server)["write_leases"] == 1
    engine.close()
    wait_for(lambda: left_over(server) == {}, 5)


# ------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(("least", "most"), [(m.PROTOCOL + 1, m.PROTOCOL + 5), (0, m.PROTOCOL_MIN - 1)])
def test_a_client_of_another_protocol_is_refused_with_both_versions(
    server: RunningServer, least: int, most: int
) -> None:
    with channel_to(server.address) as channel, pytest.raises(RequestFailed) as refused:
        hello(channel, protocol_min=least, protocol_max=most)
    assert refused.value.code == "protocol"
    assert f"client speaks protocol {least}..{most}" in str(refused.value)
    assert f"{m.PROTOCOL_MIN}..{m.PROTOCOL}; install matching versions" in str(refused.value)


def test_a_client_that_also_speaks_newer_protocols_is_welcome(server: RunningServer) -> None:
    with channel_to(server.address) as channel:
        welcome = hello(channel, protocol_min=m.PROTOCOL_MIN, protocol_max=m.PROTOCOL + 5)
        assert welcome.protocol == m.PROTOCOL
        channel.call(m.Bye(session=welcome.session), 5)


def test_a_server_of_another_protocol_costs_the_cache_and_says_why(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PROTOCOL_MIN", m.PROTOCOL + 1)
    monkeypatch.setattr(m, "PROTOCOL", m.PROTOCOL + 1)
    with rig(server, quick=True, wait=0) as engine:
        wait_for(lambda: all("install matching versions" in reason for reason in engine.reasons()), 5)
        assert not engine.up()
