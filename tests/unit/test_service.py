"""What the server's answers promise: every session gets at its own and at nobody else's, and refusals say why."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.local import LocalServer
from helpers.pages import layout
from helpers.sessions import CHUNK, GROUP, HASHES, JOINED, LEASES, SIZE, Peer
from lmcache.v1.protocol import messages as m


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(chunk_size=CHUNK)


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "two\nlines"},
        {"client": "\x1b[2J"},
        {"engine": "x" * 300},
        {"ranks": 1 << 62},
        {"rank": -1},
    ],
)
def test_names_that_a_terminal_would_obey_and_absurd_ranks_are_refused(
    server: LocalServer, fields: dict[str, Any]
) -> None:
    hello = m.Hello(protocol_min=1, protocol_max=1, role="worker", **({"engine": "e"} | fields))
    reply, _ = server.ask(hello)
    assert isinstance(reply, m.Error)
    assert reply.code == "bad_request"


# --------------------------------------------------------------------------------------------------- sessions


def test_a_session_is_a_secret_that_nobody_else_gets(server: LocalServer) -> None:
    ids = {Peer(server).session for _ in range(50)}
    assert len(ids) == 50
    assert all(len(i) == 32 for i in ids)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda s: m.Register(session=s, namespaces=[GROUP], mapped=False),
        lambda s: m.Lookup(session=s, request="r", lease=1, hashes=JOINED),
        lambda s: m.Reserve(session=s, lease=1, hashes=[JOINED]),
        lambda s: m.Write(session=s, lease=1, index=0),
        lambda s: m.Commit(session=s, lease=1, indexes=[]),
        lambda s: m.Abort(session=s, leases=[1]),
        lambda s: m.Read(session=s, lease=1, index=0, offset=0, length=1),
        lambda s: m.Release(session=s, leases=[1]),
        lambda s: m.EndRequest(session=s, requests=["r"]),
    ],
)
@pytest.mark.parametrize("session", ["", "0" * 32])
def test_without_a_session_nothing_is_granted(server: LocalServer, request_of: Any, session: str) -> None:
    assert "say hello again" in Peer(server).refused("unknown_session", request_of(session))


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 1), (1, 1), (0, 0), (5, 2)])
def test_a_rank_outside_its_engine_is_refused(server: LocalServer, rank: int, ranks: int) -> None:
    hello = m.Hello(protocol_min=1, protocol_max=1, role="worker", engine="e", rank=rank, ranks=ranks)
    Peer(server, "tool").refused("bad_request", hello)


def test_an_engine_has_one_number_of_ranks_as_long_as_it_lives(server: LocalServer) -> None:
    first = Peer(server, ranks=2)
    hello = m.Hello(protocol_min=1, protocol_max=1, role="scheduler", engine="engine", ranks=1)
    assert "it opened with 2" in first.refused("bad_request", hello)
    first.ask(m.Bye(session=first.session))
    first.ask(hello)


def test_a_fault_of_the_server_s_own_is_one_reply_and_not_its_end(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(server)
    monkeypatch.setattr(server.service.l1, "clear", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in peer.refused("internal", m.Clear())
    assert peer.ask(m.Ping(session=peer.session)).known


# ----------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        ([], "bad_request"),
        ([layout(chunk_size=16)], "chunk_size"),
        ([layout(block_size=3, chunk_size=CHUNK)], "chunk_size"),
        ([layout(block_size=16, chunk_size=CHUNK)], "chunk_size"),
        ([layout(block_size=0, chunk_size=CHUNK)], "chunk_size"),
        ([GROUP, layout(page_bytes=(), chunk_size=CHUNK)], "bad_request"),
        ([layout(page_bytes=(32, 0), chunk_size=CHUNK)], "bad_request"),
        ([layout(page_bytes=(1 << 40,), chunk_size=CHUNK)], "bad_request"),
    ],
)
def test_a_layout_that_cannot_be_stored_is_refused(server: LocalServer, groups: list[Any], code: str) -> None:
    peer = Peer(server)
    peer.refused(code, m.Register(session=peer.session, namespaces=groups, mapped=False))
    assert Peer(server, "scheduler").lookup()[1].chunks == 0


@pytest.mark.parametrize(("ranks", "said"), [(1, 0), (2, 1)])
def test_an_engine_of_whose_chunks_none_fits_is_said_to_be_uncached(
    caplog: pytest.LogCaptureFixture, ranks: int, said: int
) -> None:
    server = LocalServer(pages=1, chunk_size=CHUNK)
    for rank in range(ranks):
        part = layout(
            page_bytes=(1500,), tp_rank=rank, chunk_size=CHUNK
        )  # most of the page that the pool has
        Peer(server, rank=rank, ranks=ranks, engine="too large").register(part)
    assert caplog.text.count("not one fits") == said


def test_who_holds_no_mapping_cannot_register_as_if_it_did(server: LocalServer) -> None:
    peer = Peer(server)
    peer.refused("not_attached", m.Register(session=peer.session, namespaces=[GROUP], mapped=True))


@pytest.mark.parametrize("role", ["scheduler", "tool"])
def test_only_workers_register(server: LocalServer, role: m.Role) -> None:
    peer = Peer(server, role)
    peer.refused("bad_request", m.Register(session=peer.session, namespaces=[GROUP], mapped=False))


def test_a_rank_registered_by_a_live_client_is_not_taken_over_with_another_layout(
    server: LocalServer,
) -> None:
    first, other = Peer(server).register(), Peer(server)
    message = m.Register(session=other.session, namespaces=[layout("other", chunk_size=CHUNK)], mapped=False)
    assert "engine_id of its own" in other.refused("bad_request", message)
    first.store()
    assert Peer(server, "scheduler").lookup()[1].chunks == 5
    first.ask(m.Bye(session=first.session))
    other.ask(message)


def test_the_same_client_may_register_another_layout(server: LocalServer) -> None:
    peer = Peer(server).register()
    peer.store()
    peer.register(layout("other", chunk_size=CHUNK))
    assert Peer(server, "scheduler").lookup()[1].chunks == 0


def test_a_rank_whose_last_client_left_is_no_longer_there(server: LocalServer) -> None:
    scheduler, first, second = Peer(server, "scheduler"), Peer(server).register(), Peer(server).register()
    first.store()
    first.ask(m.Bye(session=first.session))
    assert scheduler.lookup("one left")[1].chunks == 5
    second.ask(m.Bye(session=second.session))
    assert scheduler.lookup("none left")[1].chunks == 0


# ----------------------------------------------------------------------------------------------------- stores


def test_before_it_registered_a_worker_cannot_store(server: LocalServer) -> None:
    peer = Peer(server)
    peer.refused("unregistered", m.Reserve(session=peer.session, lease=1, hashes=[JOINED]))
    peer.register()
    peer.refused("unregistered", m.Reserve(session=peer.session, lease=1, hashes=[JOINED, JOINED]))
    peer.refused("bad_request", m.Reserve(session=peer.session, lease=1, hashes=[b"short"]))
    assert server.left_over() == {}


@pytest.mark.parametrize(
    ("index", "offset", "payload"),
    [(5, 0, [b"x"]), (-1, 0, [b"x"]), (0, -1, [b"x"]), (0, SIZE, [b"x"]), (0, 1, [b"x" * SIZE]), (0, 0, []),
     (0, 0, [b"x", b"y"])],
)  # fmt: skip
def test_a_write_outside_its_reservation_changes_nothing(
    server: LocalServer, index: int, offset: int, payload: list[bytes]
) -> None:
    peer = Peer(server).register()
    lease = peer.reserve()
    before = bytes(server.view.data)
    peer.refused(
        "bad_request", m.Write(session=peer.session, lease=lease, index=index, offset=offset), *payload
    )
    assert bytes(server.view.data) == before


@pytest.mark.parametrize("engine", ["engine", "another"])
def test_nobody_writes_publishes_or_frees_what_another_reserved(server: LocalServer, engine: str) -> None:
    mine, other = Peer(server).register(), Peer(server, engine=engine).register()
    lease = mine.reserve()
    other.refused("lease_gone", m.Write(session=other.session, lease=lease, index=0), b"x")
    other.refused("lease_gone", m.Commit(session=other.session, lease=lease, indexes=[0]))
    other.ask(m.Abort(session=other.session, leases=[lease]))
    assert server.usage["write_leases"] == 1
    mine.fill(lease, 0)
    mine.ask(m.Commit(session=mine.session, lease=lease, indexes=[0]))
    mine.refused("lease_gone", m.Commit(session=mine.session, lease=lease, indexes=[1]))
    mine.refused("lease_gone", m.Write(session=mine.session, lease=lease, index=0), b"x")
    assert server.usage["objects"] == 1


def test_a_commit_of_what_was_not_reserved_changes_nothing(server: LocalServer) -> None:
    peer = Peer(server).register()
    lease = peer.reserve()
    peer.refused("bad_request", m.Commit(session=peer.session, lease=lease, indexes=[0, 5]))
    assert (server.usage["objects"], server.usage["write_leases"]) == (0, 1)
    peer.fill(lease, 0, 4)
    assert peer.ask(m.Commit(session=peer.session, lease=lease, indexes=[4, 0, 0])).count == 2


def test_what_did_not_arrive_whole_in_frames_is_not_published(server: LocalServer) -> None:
    peer = Peer(server).register()
    lease = peer.reserve()
    peer.fill(lease, 0, data=b"x" * (SIZE - 1))
    commit = m.Commit(session=peer.session, lease=lease, indexes=[0])
    assert "not written in full" in peer.refused("bad_request", commit)
    peer.ask(m.Write(session=peer.session, lease=lease, index=0, offset=SIZE - 1), b"x")
    peer.ask(commit)
    assert server.usage["objects"] == 1


def test_a_lease_id_in_use_is_not_granted_twice(server: LocalServer) -> None:
    peer = Peer(server).register()
    lease = peer.reserve()
    peer.refused("lease_gone", m.Reserve(session=peer.session, lease=lease, hashes=[JOINED]))
    assert server.usage["write_leases"] == 1


# ------------------------------------------------------------------------------------------------------ loads


def test_a_rank_reads_its_own_share_and_no_other_s(server: LocalServer) -> None:
    workers = [Peer(server, rank=r, ranks=2).register(layout(tp_rank=r, chunk_size=CHUNK)) for r in range(2)]
    for worker, letter in zip(workers, (b"a", b"b"), strict=True):
        worker.store(letter * SIZE)
    scheduler = Peer(server, "scheduler", ranks=2)
    lease, found = scheduler.lookup()
    assert found.chunks == 5
    for worker, letter in zip(workers, (b"a", b"b"), strict=True):
        assert server.ask(worker.read(lease, 4))[1] == [letter * SIZE]
        assert server.ask(worker.read(lease, 4, 3, 7))[1] == [letter * 7]
        worker.refused("lease_gone", worker.read(lease, 5))
        worker.ask(m.Release(session=worker.session, leases=[lease]))
        worker.refused("lease_gone", worker.read(lease, 4))
    stranger = Peer(server, engine="another", rank=0, ranks=1).register()
    stranger.refused("lease_gone", stranger.read(lease))
    assert server.usage["read_leases"] == 0


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, 0), (0, -1), (SIZE, 1), (1, SIZE), (0, m.PIECE_BYTES + 1)]
)
def test_a_read_outside_its_object_is_refused(server: LocalServer, offset: int, length: int) -> None:
    worker = Peer(server).register()
    worker.store()
    lease, _ = Peer(server, "scheduler").lookup()
    worker.refused("bad_request", worker.read(lease, 0, offset, length))


def test_the_scheduler_s_release_is_for_all_ranks_and_a_worker_s_for_its_own(server: LocalServer) -> None:
    workers = [Peer(server, rank=r, ranks=2).register(layout(tp_rank=r, chunk_size=CHUNK)) for r in range(2)]
    for worker in workers:
        worker.store()
    scheduler = Peer(server, "scheduler", ranks=2)
    first, second = scheduler.lookup()[0], scheduler.lookup()[0]
    workers[0].ask(m.Release(session=workers[0].session, leases=[first, second]))
    assert server.usage["read_leases"] == 2
    scheduler.ask(m.Release(session=scheduler.session, leases=[first]))
    assert server.usage["read_leases"] == 1
    workers[1].ask(m.Release(session=workers[1].session, leases=[second]))
    assert server.left_over() == {"requests": 1}


def test_a_lookup_that_is_refused_leaves_nothing_behind(server: LocalServer) -> None:
    scheduler = Peer(server, "scheduler")
    base = m.Lookup(session=scheduler.session, request="r", lease=next(LEASES), hashes=JOINED)
    scheduler.refused("unknown_request", m.Lookup(**(fields(base) | {"known": 1})))
    scheduler.refused("unknown_request", m.Lookup(**(fields(base) | {"known": -1})))
    scheduler.refused("bad_request", m.Lookup(**(fields(base) | {"start": -1})))
    scheduler.refused("bad_request", m.Lookup(**(fields(base) | {"hashes": b"short"})))
    scheduler.ask(m.Release(session=scheduler.session, leases=[base.lease]))
    scheduler.refused("lease_gone", base)
    assert server.left_over() == {}


def fields(message: m.Lookup) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_later_lookups_of_a_request_need_only_what_is_new(server: LocalServer) -> None:
    Peer(server).register().store()
    scheduler = Peer(server, "scheduler")
    assert scheduler.lookup(hashes=b"".join(HASHES[:2]))[1].chunks == 2
    assert scheduler.lookup(hashes=b"".join(HASHES[2:]), known=2)[1].chunks == 5
    assert scheduler.lookup(hashes=b"", known=5, start=4)[1].chunks == 1
    assert scheduler.lookup(hashes=b"other" * 32, known=1)[1].chunks == 1, (
        "digests from there on are replaced"
    )
    scheduler.refused(
        "unknown_request",
        m.Lookup(session=scheduler.session, request="r", lease=next(LEASES), hashes=b"", known=7),
    )


def test_the_end_of_another_engine_s_request_of_the_same_name_touches_nothing(server: LocalServer) -> None:
    Peer(server).register().store()
    Peer(server, engine="another").register()
    mine, other = Peer(server, "scheduler"), Peer(server, "scheduler", engine="another")
    assert mine.lookup("r")[1].chunks == other.lookup("r")[1].chunks == 5
    other.ask(m.EndRequest(session=other.session, requests=["r"]))
    assert server.left_over() == {"read_leases": 1, "pinned_objects": 5, "requests": 1}


# ------------------------------------------------------------------------------------------------------ tools


def test_a_query_says_how_much_each_layout_holds_and_touches_nothing(server: LocalServer) -> None:
    Peer(server).register().store()
    Peer(server, engine="another").register(layout("other", chunk_size=CHUNK))
    order = list(server.service.l1._index)
    holdings = Peer(server, "tool").ask(m.Query(hashes=JOINED))
    assert {row.model: row.chunks for row in holdings.rows} == {"model": 5, "other": 0}
    assert list(server.service.l1._index) == order
    assert server.left_over() == {}


def test_what_an_engine_stored_outlives_it(server: LocalServer) -> None:
    peer = Peer(server).register()
    peer.store()
    peer.ask(m.Bye(session=peer.session))
    assert Peer(server, "tool").ask(m.Query(hashes=JOINED)).rows[0].chunks == 5


def test_clearing_leaves_what_is_being_read(server: LocalServer) -> None:
    Peer(server).register().store()
    Peer(server, "scheduler").lookup(hashes=b"".join(HASHES[:2]))
    assert Peer(server, "tool").ask(m.Clear()).count == 3
    assert server.usage["objects"] == 2
