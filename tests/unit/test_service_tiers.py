"""What the server promises of lookups and stores where there are tiers below L1."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.held_tier import HeldTier, served
from helpers.local import LocalServer
from helpers.server import wait_for
from helpers.sessions import GROUP, HASHES, JOINED, LEASES, SIZE, Peer
from helpers.stored import disk
from helpers.tiers import Store
from lmcache.v1.multiprocess.server.app import _gauges
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.accounts import Accounts

PATIENT = 20.0


@pytest.fixture
def tier() -> HeldTier:
    return HeldTier()


@pytest.fixture
def server(tier: HeldTier) -> Iterator[LocalServer]:
    with served(tier) as local:
        yield local


def flushed(server: LocalServer) -> None:
    assert server.service.store.flush(PATIENT)


def below(server: LocalServer, tier: HeldTier) -> Peer:
    """A scheduler whose engine's five chunks are in the tier, and not in L1."""
    worker = Peer(server).register()
    worker.store()
    flushed(server)
    assert len(tier.objects) == len(HASHES)
    with server.lock:
        assert server.service.l1.clear() == len(HASHES)
    return Peer(server, "scheduler")


# ---- lists


def test_a_list_by_account_is_refused_where_an_engine_does_not_say_whose_its_objects_are(
    server: LocalServer, tier: HeldTier
) -> None:
    below(server, tier)
    server.start()
    tool = Peer(server, "tool")
    told = tool.ask(m.ListObjects(tier="memory"))
    assert [row.account for row in told.objects] == [None] * len(HASHES)
    why = tool.refused("bad_request", m.ListObjects(tier="memory", account=""))
    assert why.startswith("tier 'memory': its engine does not say whose 5 of its 5 objects are;")


# ---- lookups


def test_what_a_tier_holds_is_found_pinned_and_right(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    lease, found = scheduler.lookup(wait=PATIENT)
    assert (found.chunks, found.pending) == (5, False)
    assert server.usage["pinned_objects"] == 5
    for offset in found.slots[0][0][::2]:
        assert server.view.data[offset : offset + SIZE] == b"x" * SIZE
    scheduler.ask(m.Release(session=scheduler.session, leases=[lease]))
    scheduler.ask(m.EndRequest(session=scheduler.session, requests=["r"]))
    assert wait_for(server.all_given_back, what="all given back")


def test_a_lookup_answers_pending_when_its_wait_is_over_and_finds_all_under_the_same_lease_later(
    server: LocalServer, tier: HeldTier
) -> None:
    scheduler = below(server, tier)
    tier.reads.clear()
    began = time.monotonic()
    lease, found = scheduler.lookup(wait=0.05)
    took = time.monotonic() - began
    assert (found.chunks, found.pending, found.slots) == (0, True, [])
    assert took >= 0.05
    again = m.Lookup(session=scheduler.session, request="r", lease=lease, hashes=b"", known=5, wait=0)
    assert scheduler.ask(again).pending
    tier.reads.set()
    again.wait = PATIENT
    assert scheduler.ask(again).chunks == 5
    assert server.usage["read_leases"] == 1


def test_what_was_fetched_stays_until_it_is_asked_for(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    lease, found = scheduler.lookup(wait=0)
    assert found.pending
    wait_for(lambda: server.usage["objects"] == 5, what="the fetch")
    with server.lock:
        server.service.l1.clear(force=True)
    again = m.Lookup(session=scheduler.session, request="r", lease=lease, hashes=b"", known=5, wait=PATIENT)
    assert scheduler.ask(again).chunks == 5


def test_who_does_not_wait_gets_what_l1_holds_and_the_next_one_gets_the_rest(
    server: LocalServer, tier: HeldTier
) -> None:
    scheduler = below(server, tier)
    _, first = scheduler.lookup("first")
    assert (first.chunks, first.pending) == (0, False)
    wait_for(lambda: server.usage["objects"] == 5, what="fetched behind")
    assert scheduler.lookup("second")[1].chunks == 5


def test_a_last_look_takes_what_is_there_and_ends_the_fetch(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    tier.reads.clear()
    lease, found = scheduler.lookup(wait=0)
    assert found.pending
    last = m.Lookup(session=scheduler.session, request="r", lease=lease, hashes=b"", known=5, wait=-1)
    assert scheduler.ask(last) == m.Found(epoch=server.service.epoch, chunks=0)
    tier.reads.set()
    wait_for(lambda: not server.service.l1.has_leases, what="the memory is given back")


@pytest.mark.parametrize("how", ["release", "end_request", "bye", "stop"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_pending_lookup_ends_with_its_lease_request_session_and_server(
    server: LocalServer, tier: HeldTier, how: str, waits: bool
) -> None:
    scheduler = below(server, tier)
    tier.reads.clear()
    lease = next(LEASES)
    answers: list[m.Reply] = []
    lookup = m.Lookup(
        session=scheduler.session, request="r", lease=lease, hashes=JOINED, wait=PATIENT if waits else 0
    )
    with server.lock:
        answer = server.service.handle(lookup, [], answers.append)
    assert (answer is None) == waits
    if how == "stop":
        with server.lock:
            server.service.stop()
    else:
        ends: dict[str, m.Request] = {
            "release": m.Release(session=scheduler.session, leases=[lease]),
            "end_request": m.EndRequest(session=scheduler.session, requests=["r"]),
            "bye": m.Bye(session=scheduler.session),
        }
        scheduler.ask(ends[how])
    assert len(answers) == waits
    tier.reads.set()
    wait_for(lambda: server.usage["pinned_objects"] == 0 and not server.service.l1.has_leases, what="ends")


def test_a_lease_id_of_a_pending_lookup_is_nobody_else_s(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    tier.reads.clear()
    lease, _ = scheduler.lookup(wait=0)
    other = m.Lookup(session=scheduler.session, request="other", lease=lease, hashes=JOINED, wait=0)
    assert "in use by another lookup" in scheduler.refused("lease_gone", other)


def test_nobody_s_fetch_is_given_up_after_a_while(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    assert scheduler.lookup(wait=0)[1].pending
    wait_for(lambda: server.usage["objects"] == 5, what="the fetch")
    assert server.usage["pinned_objects"] == 5
    with server.lock:
        server.service.expire(time.monotonic() + 3600)
    assert server.usage["pinned_objects"] == 0


def test_a_chain_that_a_tier_does_not_hold_is_a_miss_at_once(server: LocalServer, tier: HeldTier) -> None:
    scheduler = below(server, tier)
    tier.objects.clear()
    _, found = scheduler.lookup(wait=PATIENT)
    assert (found.chunks, found.pending) == (0, False)
    server.service.stop()


def test_only_what_every_group_has_below_is_found(server: LocalServer, tier: HeldTier) -> None:
    other = type(GROUP)(**{f: getattr(GROUP, f) for f in GROUP.__struct_fields__} | {"model": "other"})
    worker = Peer(server).register(GROUP, other)
    lease = worker.reserve(JOINED, JOINED)
    worker.fill(lease, *range(10))
    worker.ask(m.Commit(session=worker.session, lease=lease, indexes=list(range(10))))
    flushed(server)
    with server.lock:
        server.service.l1.clear()
    scheduler = Peer(server, "scheduler")
    tier.delete([other.digest() + HASHES[3]], None)  # type: ignore[arg-type]
    assert scheduler.lookup(wait=PATIENT)[1].chunks == 3


# ---- stores


def test_a_tier_that_hangs_or_fails_delays_no_commit_and_no_lookup_of_what_l1_holds(
    server: LocalServer, tier: HeldTier
) -> None:
    tier.writes.clear()
    tier.reads.clear()
    worker = Peer(server).register()
    began = time.monotonic()
    worker.store()
    assert Peer(server, "scheduler").lookup(wait=PATIENT)[1].chunks == 5
    assert time.monotonic() - began < PATIENT
    tier.failing = True
    tier.writes.set()
    flushed(server)
    assert tier.objects == {}


def test_a_commit_waits_for_a_tier_that_is_written_in_step_but_not_longer_than_it_says() -> None:
    tier = HeldTier(sync=True)
    with served(tier) as server:
        worker = Peer(server).register()
        worker.store()
        assert len(tier.objects) == 5, "in step"
        tier.writes.clear()
        more = Peer(server, engine="other").register(*[_renamed("other")])
        lease = more.reserve()
        more.fill(lease, *range(5))
        began = time.monotonic()
        commit = m.Commit(session=more.session, lease=lease, indexes=list(range(5)), wait=0.1)
        assert more.ask(commit).count == 5
        assert 0.1 <= time.monotonic() - began < PATIENT
        assert Peer(server, "scheduler", "other").lookup()[1].chunks == 5


def _renamed(model: str) -> Any:
    fields = {name: getattr(GROUP, name) for name in GROUP.__struct_fields__}
    return type(GROUP)(**fields | {"model": model})


def test_the_next_server_finds_what_the_last_one_stored(tier: HeldTier) -> None:
    with served(tier) as first:
        Peer(first).register().store()
    with served(HeldTier(tier.objects)) as second:
        Peer(second).register()
        assert Peer(second, "scheduler").lookup(wait=PATIENT)[1].chunks == 5


@pytest.mark.parametrize(("policy", "left"), [("retain", 5), ("drop", 0)])
def test_what_was_fetched_stays_in_l1_or_goes_with_its_reader(tier: HeldTier, policy: str, left: int) -> None:
    with served(tier, l2_prefetch_policy=policy) as server:
        scheduler = below(server, tier)
        assert scheduler.lookup(wait=PATIENT)[1].chunks == 5
        assert server.usage["objects"] == 5
        scheduler.ask(m.EndRequest(session=scheduler.session, requests=["r"]))
        assert server.usage["objects"] == left


def test_an_account_over_its_quota_stores_no_more_than_that(server: LocalServer) -> None:
    Peer(server, "tool").ask(m.SetQuota(account="a", limit_bytes=2 << 12))
    worker = Peer(server).register()
    lease = next(LEASES)
    reserve = m.Reserve(session=worker.session, lease=lease, hashes=[JOINED], account="a")
    offsets = worker.ask(reserve).slots[0][::2]
    assert [offset >= 0 for offset in offsets] == [True, True, False, False, False]
    (row,) = Peer(server, "tool").ask(m.Quotas()).rows
    assert (row.account, row.used_bytes, row.limit_bytes) == ("a", 2 << 12, 2 << 12)


def test_clearing_everything_leaves_nothing_that_still_waited_to_be_written(
    server: LocalServer, tier: HeldTier
) -> None:
    tier.writes.clear()
    worker = Peer(server).register()
    worker.store()
    answers: list[m.Reply] = []
    with server.lock:
        assert server.service.handle(m.Clear(), [], answers.append) is None
    tier.writes.set()
    wait_for(lambda: answers, what="the clear is done")
    flushed(server)
    wait_for(lambda: not tier.objects, what="what was under way is undone")
    Peer(server, "tool").ask(m.Clear())
    assert server.usage["objects"] == 0


# ---- an acknowledged store is found


def test_concurrent_clients_find_every_store_that_was_acknowledged(
    server: LocalServer, tier: HeldTier
) -> None:
    """Four engines that share a model: whatever one was told is stored, the others find at once."""
    stored: list[bytes] = []
    faults: list[str] = []
    stop = threading.Event()

    def write(number: int) -> None:
        worker = Peer(server, engine=f"w{number}").register()
        for i in range(40):
            chunk = bytes([number, i]) * 16
            lease = worker.reserve(chunk)
            worker.fill(lease, 0)
            worker.ask(m.Commit(session=worker.session, lease=lease, indexes=[0]))
            stored.append(chunk)

    def read(number: int) -> None:
        Peer(server, engine=f"r{number}").register()
        scheduler = Peer(server, "scheduler", f"r{number}")
        asked = 0
        while not stop.is_set() or asked < 50:
            seen = list(stored)
            for chunk in seen[-3:]:
                asked += 1
                _, found = scheduler.lookup(f"{number}-{asked}", hashes=chunk, wait=PATIENT)
                if found.chunks != 1:
                    faults.append(f"{chunk.hex()[:8]} was acknowledged and is not found")
                scheduler.ask(m.EndRequest(session=scheduler.session, requests=[f"{number}-{asked}"]))
            if number == 0 and asked % 5 == 0:
                flushed(server)
                Peer(server, "tool").ask(m.Clear(tiers=["l1"]))

    readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join(60)
    stop.set()
    for thread in readers:
        thread.join(60)
    assert faults == []
    assert len(stored) == 160


# ---- metrics


def test_a_scrape_looks_at_accounts_with_a_limit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the server's lock, and of accounts without a limit there may be a hundred thousand."""
    store = Store(disk(tmp_path))
    for account in ("some", "more", "mine"):
        store.put(f"of-{account}", account=account)
    assert store.flush(PATIENT)
    with store.lock:
        for tier in ("l1", "t0"):
            store.set_quota("mine", 1 << 20, tier)
    looked = set[str]()
    used = Accounts.used
    monkeypatch.setattr(
        Accounts, "used", lambda books, account: [looked.add(account), used(books, account)][1]
    )
    service: Any = SimpleNamespace(store=store, l1=store.l1, sessions=SimpleNamespace(by_id={}))
    metrics = Metrics()
    _gauges(metrics, service, store.lock)
    limits = {
        (sample.labels["tier"], sample.labels["account"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "lmcache_mp_account_limit_bytes"
    }
    assert limits == {("l1", "mine"): 1 << 20, ("t0", "mine"): 1 << 20}
    assert looked == {"mine"}
    store.close(5.0)
