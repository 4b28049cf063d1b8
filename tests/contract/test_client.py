"""What a client's session promises: it opens, says why it is not open, outlives its callbacks, and ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.rig import QUICK
from helpers.server import RunningServer, Worker, dead_port, namespace, running_server, wait_for
from lmcache.errors import LMCacheError
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed, Unavailable


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Without a socket that would tell it of a client's death: only what clients say counts."""
    with running_server("--shm", "off") as running:
        yield running


def client(server: RunningServer | str, role: m.Role = "worker", **settings: Any) -> CacheClient:
    address = server if isinstance(server, str) else server.address
    return CacheClient(address, role, "engine", options=ClientOptions(**QUICK), **settings)


def sessions(server: RunningServer) -> int:
    return len(server.state()["sessions"])


def test_a_closed_session_is_gone_at_once(server: RunningServer) -> None:
    one = client(server)
    assert one.start(wait=5)
    assert sessions(server) == 1
    one.close()
    assert sessions(server) == 0
    assert not one.up


def test_a_client_may_be_closed_twice_or_before_it_was_started(server: RunningServer) -> None:
    client(server).close()
    one = client(server)
    one.start(wait=5)
    one.close()
    one.close()
    assert sessions(server) == 0


def test_a_closed_client_keeps_nobody_alive() -> None:
    """Its owner may hold an engine's whole KV cache."""

    class Owner:
        def __init__(self) -> None:
            self.client = CacheClient(
                f"tcp://127.0.0.1:{dead_port()}", "worker", on_open=self.told, on_lost=self.told
            )

        def told(self, *_: Any) -> None:
            raise AssertionError

    owner = Owner()
    owner.client.start()
    owner.client.close()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_closing_does_not_wait_for_a_server_that_is_away() -> None:
    one = client(f"tcp://127.0.0.1:{dead_port()}")
    assert not one.start(wait=0.1)
    start = time.monotonic()
    one.close()
    assert time.monotonic() - start < 5 * QUICK["control_timeout"]
    with pytest.raises(Unavailable):
        one.call(m.Status())
    one.post(m.Release(session="", leases=[1]))


def test_while_there_is_no_session_every_call_says_why(server: RunningServer) -> None:
    one = client(server)
    with pytest.raises(Unavailable, match="not connected yet"):
        one.call(m.Status())
    away = client(f"tcp://127.0.0.1:{dead_port()}")
    away.start()
    wait_for(lambda: "no connection" in away.reason, 5)
    with pytest.raises(Unavailable, match=r"Status: Hello: no connection to tcp://127\.0\.0\.1"):
        away.call(m.Status())
    away.close()


@pytest.mark.parametrize("address", ["tcp://:1", "tcp://127.0.0.1:x", "nonsense", "tcp://no such host:1"])
def test_an_address_that_cannot_be_used_is_a_reason_and_no_traceback(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = client(address)
    one.start()
    wait_for(lambda: address in one.reason, 5)
    one.close()
    assert "Traceback" not in caplog.text


def test_a_refused_registration_is_tried_again_and_leaves_no_session_behind(server: RunningServer) -> None:
    tries: list[str] = []

    def register(opened: CacheClient) -> None:
        tries.append(opened.session)
        opened.register(
            m.Register(session=opened.session, namespaces=[namespace(block_size=48)], mapped=False)
        )

    one = client(server, on_open=register)
    one.start()
    wait_for(lambda: len(tries) > 2, 10)
    assert "chunk size 256: not a multiple of the engine's block size 48" in one.reason
    assert not one.up
    assert sessions(server) <= 1
    one.close()
    wait_for(lambda: sessions(server) == 0, 5)


def test_a_callback_that_breaks_is_logged_once_and_tried_again(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def break_twice(_: CacheClient) -> None:
        tries.append(1)
        if len(tries) < 4:
            raise KeyError("a fault of ours")

    one = client(server, on_open=break_twice)
    one.start()
    wait_for(lambda: one.up, 10)
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    one.close()


def test_a_refused_request_does_not_close_the_session(server: RunningServer) -> None:
    one = client(server, "scheduler")
    one.start(wait=5)
    with pytest.raises(RequestFailed) as refused:
        one.call(m.Lookup(session=one.session, request="r", lease=one.new_lease(), hashes=b"x"))
    assert refused.value.code == "bad_request"
    assert one.up
    one.close()


def test_a_session_that_the_server_forgot_is_opened_again(server: RunningServer) -> None:
    opened: list[str] = []
    one = client(server, "scheduler", on_open=lambda c: opened.append(c.session))
    one.start(wait=5)
    one.call(m.Bye(session=one.session))
    with pytest.raises(RequestFailed):
        one.call(m.EndRequest(session=one.session, requests=[]))
    wait_for(lambda: one.up and len(opened) == 2, 5)
    assert opened[1] == one.session != opened[0]
    one.close()


def test_an_idle_session_notices_by_itself_that_it_was_forgotten(server: RunningServer) -> None:
    one = client(server, "scheduler")
    one.start(wait=5)
    first = one.session
    one.call(m.Bye(session=first))
    wait_for(lambda: one.up and one.session != first, 5)
    one.close()


def leases(server: RunningServer) -> int:
    return int(server.state()["l1"]["read_leases"])


def test_what_was_posted_and_may_be_lost_is_posted_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = chunk_hashes(range(256), Scope(chunk_size=256))[0]
    with Worker(server.address, [namespace()]) as worker:
        worker.store(range(256))
        one = client(server, "scheduler")
        one.start(wait=5)
        for lease in (1, 2):
            one.call(m.Lookup(session=one.session, request="r", lease=lease, hashes=chunk))
        assert leases(server) == 2
        one.post(m.Release(session=one.session, leases=[1]))
        one.call(m.Ping(session=one.session))  # answered, so the server has read what went before
        with monkeypatch.context() as lost:
            lost.setattr(one._channel, "post", lambda _: True)
            one.post(m.Release(session=one.session, leases=[2]))
        assert leases(server) == 1
        one._trip("the connection was lost", m.Ping())
        owed = [message.leases for message in one._owed if isinstance(message, m.Release)]
        assert owed in ([[2]], []), "not what is known to have arrived"
        wait_for(lambda: one.up and leases(server) == 0, 5)
        one.close()


def test_many_threads_may_share_a_client_and_each_gets_its_own_answers(server: RunningServer) -> None:
    one = client(server, "scheduler")
    one.start(wait=5)
    wrong: list[object] = []

    def ask(number: int) -> None:
        for i in range(100):
            request: m.Request = [m.Ping(session=one.session), m.Status(), m.Query(hashes=b"")][
                (number + i) % 3
            ]
            try:
                reply, _ = one.call(request)
            except LMCacheError as exc:
                wrong.append(exc)
                return
            one.post(m.Release(session=one.session, leases=[number * 1000 + i]))
            wanted = {m.Ping: m.Pong, m.Status: m.State, m.Query: m.Holdings}[type(request)]
            if not isinstance(reply, wanted):
                wrong.append((request, reply))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    one.close()


def test_lease_ids_of_two_clients_are_not_the_same(server: RunningServer) -> None:
    ids = [client(server).new_lease() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(0 <= i < 2**62 for i in ids)
