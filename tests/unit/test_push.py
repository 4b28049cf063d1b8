"""What a server promises to those who push into its L1, and what it keeps from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.local import LocalServer
from helpers.pusher import PAYLOAD, Pusher, key_of, payload_of
from helpers.server import wait_for
from lmcache.errors import ConfigError
from lmcache.v1.multiprocess.server import push
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l1 import EXISTS, FULL
from lmcache.v1.storage.l2.envelope import checksum
from lmcache.v1.storage.shm_pool import PAGE

PAGES = 64
HALF = PAGES // 2


@pytest.fixture
def server() -> Iterator[LocalServer]:
    server = LocalServer(pages=PAGES)
    yield server
    server.service.peers.close()
    server.close()


@pytest.fixture
def pusher(server: LocalServer) -> Pusher:
    return Pusher(server)


def state(server: LocalServer) -> dict[str, Any]:
    with server.lock:
        return server.service.peers.state()


def sweep(server: LocalServer, there: bool = True) -> None:
    """As the request loop does every second; ``there``: whether connections are."""
    with server.lock:
        server.service.peers.sweep(
            lambda connection: there, lambda ident: server.service.drop_session(ident, dead=True)
        )


def check_published(server: LocalServer, names: set[object]) -> None:
    """L1 holds exactly these, byte for byte, and nothing else is taken."""
    assert server.objects() == {key_of(name): payload_of(name) for name in names}
    assert server.left_over() == {}


def test_what_is_pushed_is_there_byte_for_byte_and_only_after_the_commit(
    server: LocalServer, pusher: Pusher
) -> None:
    lease, offsets = pusher.reserve("abc")
    assert min(offsets) >= 0
    for index, name in enumerate("abc"):
        data = payload_of(name)
        pusher.write(lease, index, data[:1000])
        pusher.write(lease, index, data[1000:], offset=1000)
    assert pusher.held("abc") == [False] * 3
    assert server.objects() == {}
    assert pusher.ask(pusher.commit(lease, [payload_of(n) for n in "abc"])).results == [1, 1, 1]
    assert pusher.held("abcd") == [True, True, True, False]
    check_published(server, set("abc"))


def test_an_object_whose_bytes_differ_is_dropped_and_told_and_the_others_are_not(
    server: LocalServer, pusher: Pusher
) -> None:
    lease, _ = pusher.reserve("abc")
    for index, name in enumerate("abc"):
        pusher.write(lease, index, payload_of(name if name != "b" else "lie"))
    assert pusher.ask(pusher.commit(lease, [payload_of(n) for n in "abc"])).results == [1, 0, 1]
    check_published(server, {"a", "c"})


def test_a_push_never_overwrites_what_is_published(server: LocalServer, pusher: Pusher) -> None:
    pusher.push("a")
    lease, offsets = pusher.reserve("ab")
    assert offsets[0] == EXISTS
    assert offsets[1] >= 0
    pusher.abort(lease)
    assert pusher.push("a") == []
    check_published(server, {"a"})


def test_of_two_pushes_of_one_object_the_first_commit_counts(server: LocalServer, pusher: Pusher) -> None:
    other = Pusher(server, b"other")
    (first, _), (second, _) = pusher.reserve("a"), other.reserve("a")
    pusher.write(first, 0, payload_of("a"))
    other.write(second, 0, payload_of("another"))
    assert pusher.ask(pusher.commit(first, [payload_of("a")])).results == [1]
    assert other.ask(other.commit(second, [payload_of("another")])).results == [2]
    check_published(server, {"a"})


def test_after_its_commit_a_push_takes_nothing_more(server: LocalServer, pusher: Pusher) -> None:
    lease, _ = pusher.reserve("a")
    pusher.write(lease, 0, payload_of("a"))
    commit = pusher.commit(lease, [payload_of("a")])
    answer = pusher.begin(commit)
    assert pusher.write(lease, 0, payload_of("b")).code == "lease_gone"
    pusher.refused("lease_gone", commit)
    assert answer.get(timeout=10).results == [1]
    pusher.refused("lease_gone", commit)
    assert pusher.write(lease, 0, payload_of("b")).code == "lease_gone"
    pusher.refused("lease_gone", pusher.reservation("b", lease=lease))
    check_published(server, {"a"})


def test_an_aborted_push_frees_its_memory_and_its_id_is_never_taken_again(
    server: LocalServer, pusher: Pusher
) -> None:
    lease, _ = pusher.reserve("ab")
    pusher.abort(lease)
    assert server.usage["used_bytes"] == 0
    pusher.refused("lease_gone", pusher.reservation("ab", lease=lease))
    ahead = pusher.reservation("ab")
    pusher.abort(ahead.lease)  # by another connection an abort may come first
    pusher.refused("lease_gone", ahead)
    check_published(server, set())


def test_another_session_gets_at_nothing_of_a_push(server: LocalServer, pusher: Pusher) -> None:
    lease, _ = pusher.reserve("a")
    other = Pusher(server, b"other")
    assert other.write(lease, 0, payload_of("lie")).code == "lease_gone"
    other.refused("lease_gone", other.commit(lease, [payload_of("lie")]))
    for message in (
        m.Commit(session=other.session, lease=lease, indexes=[0]),
        m.Write(session=pusher.session, lease=lease, index=0),
        m.Write(session=pusher.session, lease=1, index=0),
        m.Commit(session=f"push:{pusher.session}", lease=1, indexes=[0]),
    ):
        assert isinstance(pusher.send(message, b"x"), m.Error)
    other.abort(lease)
    pusher.ask(m.Abort(session=pusher.session, leases=[lease, 1]))
    pusher.write(lease, 0, payload_of("a"))
    assert pusher.ask(pusher.commit(lease, [payload_of("a")])).results == [1]
    check_published(server, {"a"})


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": [0]}, {"sizes": [-1]}, {"sizes": [1 << 60]}, {"sizes": []}, {"sizes": [1, 1]}, {"keys": b""},
        {"keys": b"x" * 63}, {"keys": b"x" * 128, "sizes": [1, 1]}, {"wait": -1.0}, {"wait": math.nan},
        {"wait": math.inf}, {"account": "x" * 65}, {"account": "a\nb"}, {"direct": True},
        {"keys": key_of("a") * (p.MAX_KEYS + 1), "sizes": [1] * (p.MAX_KEYS + 1)},
    ],
)  # fmt: skip
def test_a_reservation_that_makes_no_sense_is_refused_and_takes_nothing(
    server: LocalServer, pusher: Pusher, fields: dict[str, Any]
) -> None:
    pusher.refused("bad_request", pusher.reservation("a", **fields))
    assert server.usage["used_bytes"] == 0


def test_writes_and_commits_beyond_what_was_given_are_refused(server: LocalServer, pusher: Pusher) -> None:
    lease, _ = pusher.reserve("ab")
    for index, offset, size in ((2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, PAYLOAD, 1), (0, 1, PAYLOAD)):
        assert pusher.write(lease, index, b"x" * size, offset).code == "bad_request"
    pusher.refused("bad_request", p.PushWrite(session=pusher.session, lease=lease, index=0))
    for indexes, sums in (([2], [0]), ([-1], [0]), ([0, 0], [0, 0]), ([0], []), ([0], [0, 0])):
        message = p.PushCommit(session=pusher.session, lease=lease, indexes=indexes, checksums=sums)
        pusher.refused("bad_request", message)
    pusher.abort(lease)
    check_published(server, set())


@given(
    keys=st.binary(max_size=200), sizes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    wait=st.sampled_from([0.0, -1.0, math.nan, 1e308]), account=st.text(max_size=3), direct=st.booleans(),
)  # fmt: skip
def test_no_reservation_is_a_fault_of_the_server(
    keys: bytes, sizes: list[int], wait: float, account: str, direct: bool
) -> None:
    server = LocalServer(pages=8)
    pusher = Pusher(server)
    message = pusher.reservation((), keys=keys, sizes=sizes, wait=wait, account=account, direct=direct)
    reply = pusher.send(message)
    assert not isinstance(reply, m.Error) or reply.code == "bad_request"
    pusher.bye()
    assert server.usage["used_bytes"] == 0
    server.close()


# ---- admission


def test_a_reservation_waits_for_room_and_gets_it(server: LocalServer, pusher: Pusher) -> None:
    first, _ = pusher.reserve(range(HALF // 2))
    began = time.monotonic()
    answer = pusher.begin(pusher.reservation("late", wait=20.0))
    with pytest.raises(Exception):  # noqa: B017 -- queue.Empty
        answer.get(timeout=0.1)
    pusher.abort(first)
    assert answer.get(timeout=10).slots[0][0] >= 0
    assert time.monotonic() - began < 10


def test_at_its_deadline_a_reservation_gets_what_there_is_and_is_told_what_not(
    server: LocalServer, pusher: Pusher
) -> None:
    first, _ = pusher.reserve(range(HALF // 2 - 1))
    began = time.monotonic()
    lease, offsets = pusher.reserve("ab", wait=0.3)
    assert 0.3 <= time.monotonic() - began < 10
    assert offsets[0] >= 0
    assert offsets[1] == FULL
    pusher.write(lease, 0, payload_of("a"))
    assert pusher.ask(pusher.commit(lease, [payload_of("a")])).results == [1]
    pusher.abort(first)
    check_published(server, {"a"})


def test_one_that_can_never_fit_is_told_at_once(pusher: Pusher) -> None:
    began = time.monotonic()
    assert pusher.reserve("a", size=PAGES * PAGE, wait=30.0)[1] == [FULL]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("end", ["abort", "bye", "stop"])
def test_who_waits_is_answered_whatever_ends_it(server: LocalServer, pusher: Pusher, end: str) -> None:
    first, _ = pusher.reserve(range(HALF // 2))
    other = Pusher(server, b"other")
    message = other.reservation("a", wait=30.0)
    answer = other.begin(message)
    if end == "abort":
        other.abort(message.lease)
    elif end == "bye":
        other.bye()
    else:
        server.service.peers.close()
    reply = answer.get(timeout=10)
    assert isinstance(reply, m.Reserved if end == "stop" else m.Error)
    pusher.abort(first)
    wait_for(lambda: state(server)["waiting"] == 0)


def test_pushes_hold_no_more_than_their_limit_until_they_are_published(
    server: LocalServer, pusher: Pusher
) -> None:
    lease, offsets = pusher.reserve(range(PAGES))
    given = [offset for offset in offsets if offset >= 0]
    assert len(given) == HALF // 2  # two pages each
    assert state(server)["reserved_bytes"] == HALF * PAGE
    assert pusher.reserve("a")[1] == [FULL]
    pusher.abort(lease)
    assert pusher.reserve("a")[1][0] >= 0


def test_what_nobody_reads_is_evicted_like_anything_else(server: LocalServer, pusher: Pusher) -> None:
    for number in range(3 * PAGES):
        assert pusher.push([number]) == [1]
        assert server.usage["used_bytes"] <= PAGES * PAGE
    assert pusher.held([3 * PAGES - 1]) == [True]
    assert pusher.held([0]) == [False]


def test_pushed_bytes_count_against_their_account(server: LocalServer, pusher: Pusher) -> None:
    with server.lock:
        server.service.l1.set_quota("salted", 4 * PAGE)
    for number in range(5):
        assert pusher.push([number], account="salted") == [1]
    assert pusher.push(["other"]) == [1]
    assert 1 <= sum(pusher.held(range(5))) <= 2  # an eviction frees some more at once


# ---- ends


def test_the_end_of_a_session_frees_what_it_held(server: LocalServer, pusher: Pusher) -> None:
    pusher.reserve("abc")
    pusher.bye()
    check_published(server, set())


def test_a_peer_whose_connection_is_gone_is_gone(
    server: LocalServer, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.reserve("abc")
    sweep(server, there=False)
    assert state(server)["open"] == 1  # heard of just now
    monkeypatch.setattr("lmcache.v1.multiprocess.server.peers._SILENT_SECONDS", 0.0)
    sweep(server, there=True)
    assert state(server)["open"] == 1
    sweep(server, there=False)
    assert server.service.sessions.by_id == {}
    check_published(server, set())


def direct(server: LocalServer, pusher: Pusher, names: str) -> int:
    """A push that its client writes itself; the target stands in for NIXL's."""
    server.service.peers._target = server.service.peers._target or _Target()  # type: ignore[assignment]
    return pusher.reserve(names, direct=True)[0]


class _Target:
    region = p.Region(agent=b"", base=0, length=0)

    def wake(self) -> None:
        return None

    def close(self) -> None:
        return None


def test_memory_that_a_silent_peer_may_still_write_to_stays_its_own(
    server: LocalServer, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct(server, pusher, "abc")
    with server.lock:
        server.service.drop_session(pusher.session, dead=False)  # silent for too long, but maybe only stopped
    monkeypatch.setattr("lmcache.v1.multiprocess.server.peers._SILENT_SECONDS", 0.0)
    sweep(server, there=True)
    assert state(server)["open"] == 1
    assert server.usage["used_bytes"] == 6 * PAGE


@pytest.mark.parametrize("end", ["gone", "bye", "abort"])
def test_memory_that_strays_may_reach_is_given_to_nobody_until_they_have_arrived(
    server: LocalServer, pusher: Pusher, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(push, "STRAY_SECONDS", 0.2)
    monkeypatch.setattr("lmcache.v1.multiprocess.server.peers._SILENT_SECONDS", 0.0)
    lease = direct(server, pusher, "abc")
    began = time.monotonic()
    if end == "gone":
        sweep(server, there=False)
    elif end == "bye":
        pusher.bye()
    else:
        pusher.abort(lease, over=False)
    while time.monotonic() < began + 0.15:
        sweep(server)
        assert server.usage["used_bytes"] == 6 * PAGE
    wait_for(lambda: sweep(server) or not server.usage["used_bytes"])
    assert time.monotonic() - began >= 0.2
    assert server.left_over() == {}


def test_a_direct_push_that_is_certainly_over_is_free_at_once(server: LocalServer, pusher: Pusher) -> None:
    pusher.abort(direct(server, pusher, "abc"))
    assert server.usage["used_bytes"] == 0


# ---- pulls


def pull(pusher: Pusher, lease: int, names: str, seconds: float = 10.0) -> Any:
    keys = b"".join(map(key_of, names))
    return pusher.ask(p.PullOpen(session=pusher.session, lease=lease, keys=keys, seconds=seconds))


def read(pusher: Pusher, lease: int, index: int, offset: int = 0, length: int = PAYLOAD) -> Any:
    return pusher.send(
        p.PullRead(session=pusher.session, lease=lease, index=index, offset=offset, length=length)
    )


def test_what_is_there_can_be_pulled_with_its_checksum(server: LocalServer, pusher: Pusher) -> None:
    pusher.push("ab")
    found = pull(pusher, 1, "axb")
    assert found.sizes == [PAYLOAD, -1, PAYLOAD]
    assert found.checksums[0] == checksum(payload_of("a"))
    assert isinstance(read(pusher, 1, 2), m.Ok)
    assert pusher.frames == [payload_of("b")]
    for index, offset, length in ((1, 0, 1), (3, 0, 1), (-1, 0, 1)):
        assert read(pusher, 1, index, offset, length).code == "lease_gone"
    for offset, length in ((-1, 1), (0, 0), (0, PAYLOAD + 1), (PAYLOAD, 1)):
        assert read(pusher, 1, 0, offset, length).code == "bad_request"
    assert server.usage["pinned_objects"] == 2
    pusher.ask(p.PullClose(session=pusher.session, leases=[1]))
    assert read(pusher, 1, 0).code == "lease_gone"
    check_published(server, {"a", "b"})


def test_a_pull_pins_for_a_bounded_time_and_a_look_for_none(server: LocalServer, pusher: Pusher) -> None:
    pusher.push("a")
    assert pusher.held("a") == [True]
    assert server.usage["pinned_objects"] == 0
    pull(pusher, 1, "a", seconds=0.1)
    assert server.usage["pinned_objects"] == 1
    wait_for(lambda: sweep(server) or not server.usage["pinned_objects"])
    assert read(pusher, 1, 0).code == "lease_gone"
    for seconds in (0.0, -1.0, math.nan, 1e9):
        keys = key_of("a")
        message = p.PullOpen(session=pusher.session, lease=2, keys=keys, seconds=seconds)
        pusher.refused("bad_request", message)
    pull(pusher, 3, "a")
    pusher.bye()
    check_published(server, {"a"})


def test_pulls_pin_no_more_than_their_limit(server: LocalServer, pusher: Pusher) -> None:
    for number in range(PAGES // 2 - 2):
        pusher.push([number])
    names = list(range(PAGES // 2 - 2))
    keys = b"".join(map(key_of, names))
    found = pusher.ask(p.PullOpen(session=pusher.session, lease=1, keys=keys, seconds=9.0))
    assert set(found.sizes) == {-1}
    assert server.usage["pinned_objects"] == 0


def test_a_session_that_is_no_peer_s_can_neither_push_nor_pull(server: LocalServer) -> None:
    pusher = Pusher(server)
    stranger = Pusher(server)
    stranger.session = stranger.ask(m.Hello(protocol_min=1, protocol_max=2, role="tool")).session
    stranger.refused("bad_request", stranger.reservation("a"))
    stranger.session = "no such session"
    stranger.refused("unknown_session", stranger.reservation("a"))
    assert pusher.held("a") == [False]


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"push_limit_gb": -1.0}, "--push-limit-gb -1"),
        ({"push_limit_gb": 2.0}, "--l1-size-gb 1"),
        ({"push_limit_gb": math.nan}, "--push-limit-gb nan"),
        ({"peer_transport": "nixl"}, "--peer-transport 'nixl': expected one of auto, frames"),
    ],
)
def test_a_limit_that_cannot_be_is_named_in_one_line(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(l1_size_gb=1.0, **settings).check()
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)
