"""What the scheduler side promises while the server fetches from tiers below L1: nobody spins, waits or leaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.held_tier import HeldTier, served
from helpers.local import LocalServer
from helpers.mini_engine import FakeRequest, MiniEngine, prompt
from helpers.server import wait_for
from lmcache.v1.keys import account_id
from lmcache.v1.protocol import messages as m


@pytest.fixture
def tier() -> HeldTier:
    return HeldTier()


@pytest.fixture
def server(tier: HeldTier) -> Iterator[LocalServer]:
    with served(tier) as local:
        yield local


def cold(server: LocalServer, tier: HeldTier, **settings: Any) -> MiniEngine:
    """An engine that has stored four chunks of ``prompt(33)``, which are only in the tier now; reads are held up."""
    engine = MiniEngine(server, **settings)
    engine.serve("cold", prompt(33))
    assert server.service.store.flush(10)
    with server.lock:
        server.service.l1.clear()
    engine.client.sent.clear()
    tier.reads.clear()
    return engine


def lookups(engine: MiniEngine) -> list[m.Lookup]:
    return [message for message in engine.client.sent if isinstance(message, m.Lookup)]


def test_a_request_is_put_off_until_what_it_waits_for_is_there_and_loads_it_then(
    server: LocalServer, tier: HeldTier
) -> None:
    engine = cold(server, tier)
    request = engine.add(FakeRequest("warm", prompt(33)))
    for _ in range(3):
        engine.step()
    assert engine.waiting == [request]
    tier.reads.set()
    wait_for(lambda: engine.step() and not engine.waiting, what="the request is scheduled")
    engine.run()
    assert request.cached == 32
    engine.check_store()
    assert len({message.lease for message in lookups(engine)}) == 1
    assert wait_for(server.all_given_back)


def test_an_idle_engine_waits_at_the_server_and_does_not_spin(server: LocalServer, tier: HeldTier) -> None:
    engine = cold(server, tier)
    engine.add(FakeRequest("warm", prompt(33)))
    began = time.monotonic()
    for _ in range(20):
        engine.step()
    took = time.monotonic() - began
    assert took >= 20 * 0.005 * 0.9
    assert len(lookups(engine)) == 20


def test_a_busy_engine_is_not_kept_waiting_and_asks_now_and_then(server: LocalServer, tier: HeldTier) -> None:
    engine = cold(server, tier, budget=1)
    engine.add(FakeRequest("runs", prompt(200, 1000)))
    engine.step()
    engine.client.sent.clear()
    side = engine.side
    request = FakeRequest("warm", prompt(33))
    for _ in range(100):
        assert side.matched_tokens(request, 0) is None
    assert {message.wait for message in lookups(engine)} == {0.0}
    assert len(lookups(engine)) < 100


def test_one_lookup_of_a_step_waits_however_many_are_pending(server: LocalServer, tier: HeldTier) -> None:
    engine = cold(server, tier)
    engine.step()  # one that has nothing to do
    for number in range(10):
        engine.add(FakeRequest(f"warm {number}", prompt(33)))
    engine.step()
    waits = [message.wait for message in lookups(engine)]
    assert sum(wait > 0 for wait in waits) == 1


def test_a_request_waits_no_longer_than_it_may_and_takes_what_l1_holds(
    server: LocalServer, tier: HeldTier
) -> None:
    engine = cold(server, tier, prefetch_timeout=0.1)
    began = time.monotonic()
    request = engine.serve("warm", prompt(33))
    assert 0.1 <= time.monotonic() - began < 5
    assert request.cached == 0
    assert lookups(engine)[-1].wait < 0
    tier.reads.set()
    assert wait_for(server.all_given_back, what="the fetch is given up")


def test_a_request_that_may_not_wait_is_never_put_off(server: LocalServer, tier: HeldTier) -> None:
    engine = cold(server, tier, prefetch_timeout=0)
    assert engine.serve("warm", prompt(33)).cached == 0
    assert {message.wait < 0 for message in lookups(engine)} == {True}


@pytest.mark.parametrize("how", ["aborted", "computed", "not wanted", "reset"])
def test_a_fetch_ends_with_its_request_and_with_other_tokens_computed(
    server: LocalServer, tier: HeldTier, how: str
) -> None:
    engine = cold(server, tier)
    request = FakeRequest("warm", prompt(33))
    assert engine.side.matched_tokens(request, 0) is None
    if how == "aborted":
        engine.side.finished("warm")
    elif how == "computed":
        assert engine.side.matched_tokens(request, 12) is None
        first, second = lookups(engine)[0].lease, lookups(engine)[-1].lease
        assert first != second
        assert any(isinstance(s, m.Release) and s.leases == [first] for s in engine.client.sent)
        engine.side.finished("warm")
    elif how == "not wanted":
        engine.side.allocated(request, ([1, 2, 3],), 0)
    else:
        engine.side.forget()
        assert engine.side.matched_tokens(request, 0) == 0
    tier.reads.set()
    wait_for(lambda: server.usage["pinned_objects"] == 0 and not server.service.l1.has_leases, what=how)
    with server.lock:
        assert not server.service.lookups._pending


def test_a_server_that_is_restarted_under_a_pending_lookup_costs_nothing_but_the_hit(
    server: LocalServer, tier: HeldTier
) -> None:
    engine = cold(server, tier)
    request = engine.add(FakeRequest("warm", prompt(33)))
    engine.step()
    tier.objects.clear()
    tier.reads.set()
    server.start()
    engine.heartbeat()
    engine.run()
    assert request.cached == 0
    engine.check_store()


def test_chunks_count_against_the_account_of_their_request_s_salt(server: LocalServer) -> None:
    engine = MiniEngine(server)
    for salt in ("a", "b", None):
        engine.add(FakeRequest(f"of {salt}", prompt(33), cache_salt=salt))
    engine.run()
    with server.lock:
        use = server.service.l1.usage_by_account()
    assert {name: row.objects for name, row in use.items()} == {account_id("a"): 4, account_id("b"): 4, "": 4}
    reserves = [
        message.account
        for worker in engine.workers
        for message in worker.context.client.sent  # type: ignore[attr-defined]
        if isinstance(message, m.Reserve)
    ]
    assert sorted(reserves) == sorted(["", account_id("a"), account_id("b")])


def test_what_is_fetched_counts_against_the_same_account(server: LocalServer, tier: HeldTier) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(33), cache_salt="a")
    assert server.service.store.flush(10)
    with server.lock:
        server.service.l1.clear()
    assert engine.serve("warm", prompt(33), cache_salt="a").cached == 32
    with server.lock:
        assert server.service.l1.usage_by_account()[account_id("a")].objects == 4
