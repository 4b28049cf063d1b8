"""A peer that asks for more than anybody could want: what the server keeps of it is bounded, and goes with it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from helpers.local import LocalServer
from helpers.pusher import Pusher, key_of, payload_of
from helpers.server import wait_for
from lmcache.v1.multiprocess.server import pull, push
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.shm_pool import PAGE

PAGES = 64


@pytest.fixture
def server() -> Iterator[LocalServer]:
    server = LocalServer(pages=PAGES)
    yield server
    server.close()


def test_what_pushes_hold_is_counted_right_however_they_end(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "STRAY_SECONDS", 0.0)
    pushes, rng = server.service.peers.pushes, random.Random(3)
    with server.lock:
        server.service.peers._target = type(
            "Target", (), {"wake": lambda self: None, "close": lambda self: None}
        )()
    pusher = Pusher(server)
    open_: dict[int, list[tuple[int, int]]] = {}
    for step in range(300):
        kind = rng.choice(["reserve", "reserve", "direct", "commit", "abort", "stray"])
        if kind in ("reserve", "direct"):
            names = [(step, i) for i in range(rng.randint(1, 3))]
            lease, offsets = pusher.reserve(names, direct=kind == "direct")
            if given := [n for n, offset in zip(names, offsets, strict=True) if offset >= 0]:
                open_[lease] = given
        elif open_:
            lease = rng.choice(list(open_))
            names = open_.pop(lease)
            if kind == "commit":
                pusher.ask(pusher.commit(lease, [payload_of(n) for n in names]))
            else:
                pusher.abort(lease, over=kind == "abort")
                with server.lock:
                    pushes.sweep()
        assert pushes.reserved_bytes == sum(map(len, open_.values())) * 2 * PAGE
    pusher.bye()
    with server.lock:
        server.service.peers.drop(pusher.session, True)
        pushes.sweep()
    assert pushes.reserved_bytes == 0


def test_pulls_of_nothing_and_too_many_of_something_leave_nothing_behind(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_MAX_OPEN", 5)
    pusher, pulls = Pusher(server), server.service.peers.pulls
    pusher.push("a")

    def open_(lease: int, name: str) -> list[int]:
        message = p.PullOpen(session=pusher.session, lease=lease, keys=key_of(name), seconds=9.0)
        return list(pusher.ask(message).sizes)

    assert {*map(tuple, (open_(lease, "b") for lease in range(100)))} == {(-1,)}
    assert pulls.count == 0
    found = [open_(lease, "a") for lease in range(100, 110)]
    assert [sizes[0] > 0 for sizes in found] == [True] * 5 + [False] * 5
    pusher.ask(p.PullClose(session=pusher.session, leases=[100, 109]))
    assert open_(200, "a")[0] > 0
    pusher.bye()
    assert (pulls.count, server.usage["pinned_objects"]) == (0, 0)


def test_a_list_that_is_much_too_long_is_refused_in_a_short_line(server: LocalServer) -> None:
    pusher = Pusher(server)
    lease, _ = pusher.reserve("a")
    many = list(range(100_000))
    message = p.PushCommit(session=pusher.session, lease=lease, indexes=many, checksums=many)
    assert len(pusher.refused("bad_request", message)) < 200
    pusher.ask(p.PushAbort(session=pusher.session, leases=many))
    wait_for(lambda: not server.usage["used_bytes"])
    assert isinstance(pusher.send(m.Ping(session=pusher.session)), m.Pong)
