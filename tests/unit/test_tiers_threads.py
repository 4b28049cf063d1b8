"""Concurrent clients of one store: what was acknowledged is found by the next lookup."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from helpers.tiers import Store, key, payload, until
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.shm_pool import PAGE

CLIENTS = 6
ROUNDS = 60


def together(work: Callable[[int], None]) -> list[BaseException]:
    """Run ``work`` in a thread per client; what they raised."""
    raised: list[BaseException] = []

    def guarded(client: int) -> None:
        try:
            work(client)
        except BaseException as exc:
            raised.append(exc)

    threads = [threading.Thread(target=guarded, args=[client]) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    return raised


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", [("write_behind", "retain"), ("skip_l1", "drop")])
def test_an_acknowledged_object_is_found_by_the_next_lookup_of_anybody(
    shared: bool, policy: tuple[str, str]
) -> None:
    """L1 has room for a tenth: what it evicts has to come back from below. It always has room for what is under
    way, nothing fails, and nothing is dropped: so nothing may be missing, whoever looks."""
    adapter = FaultAdapter(FaultOptions(shared=shared, latency_ms=0.2, threads=3, batch=4))
    store = Store(adapter, pages=96, store_policy=policy[0], prefetch_policy=policy[1])
    acknowledged: list[list[str]] = []

    def client(number: int) -> None:
        dice = random.Random(number)
        for turn in range(ROUNDS):
            assert until(lambda: store.status()[0]["queued_objects"] <= 24)
            chain = [f"{number}.{turn}.{depth}" for depth in range(dice.randrange(1, 5))]
            assert store.put(*chain) == len(chain)
            acknowledged.append(chain)
            for mine in (chain, dice.choice(acknowledged)):
                assert store.fetch(*mine, seconds=20.0) == len(mine), (mine, store.status())

    assert together(client) == []
    assert store.flush(20.0)
    assert until(store.nothing_is_taken), (store.l1.usage(), store.status())
    assert store.status()[0]["loaded"] > 100, "much had to come back from below"
    for chain in acknowledged:
        assert store.fetch(*chain) == len(chain)
    store.close(5.0)


def test_lookups_prefetches_stores_deletions_and_clears_at_once_leave_the_books_right() -> None:
    adapters = [
        FaultAdapter(FaultOptions(threads=2, batch=2)),
        FaultAdapter(FaultOptions(shared=True, batch=3)),
    ]
    store = Store(*adapters, pages=40)
    names = [f"n{i}" for i in range(24)]

    def client(number: int) -> None:
        dice = random.Random(number)
        for _ in range(ROUNDS):
            start = dice.randrange(len(names))
            chain = names[start : start + dice.randrange(1, 8)]
            what = dice.randrange(10)
            if what < 4:
                store.put(*chain)
            elif what < 8:
                store.fetch(*chain, seconds=dice.choice([0.001, 5.0]))
            elif what == 8:
                with store.lock:
                    store.delete([key(name) for name in chain])
            else:
                with store.lock:
                    store.clear()

    assert together(client) == []
    assert store.flush(20.0)
    assert until(store.nothing_is_taken), (store.l1.usage(), store.status())
    with store.lock:
        for entry in store.l1.entries():
            name = entry.key.rstrip(b".").decode()
            assert bytes(store.view.data[entry.offset : entry.offset + PAGE]) == payload(name)
        assert store.l1.usage()["used_bytes"] == len(store.l1) * PAGE
        gone = store.clear()
    assert gone.result(10.0)["l1"] >= 0
    assert until(lambda: not adapters[0].objects and not adapters[1].objects)
    assert store.status()[0]["objects"] == 0
    store.close(5.0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", [("write_behind", "retain"), ("skip_l1", "drop")])
def test_what_is_stored_after_a_deletion_began_is_in_l1_and_below_whatever_runs_beside_it(
    shared: bool, policy: tuple[str, str]
) -> None:
    adapter = FaultAdapter(FaultOptions(shared=shared, latency_ms=0.5, threads=4, batch=2))
    store = Store(adapter, pages=200, store_policy=policy[0], prefetch_policy=policy[1])
    names = [f"n{i}" for i in range(12)]
    stop = threading.Event()

    def look(number: int) -> None:
        dice = random.Random(number)
        while not stop.is_set():
            store.fetch(*dice.sample(names, 2), seconds=5.0)

    def delete() -> Future[dict[str, int]]:
        with store.lock:
            return store.clear() if dice.random() < 0.5 else store.delete([key(name) for name in names])

    def put(some: list[str]) -> None:
        for name in some:
            store.put(name)
            store.put(f"other {name} {dice.randrange(9)}")

    dice = random.Random(7)
    lookers = [threading.Thread(target=look, args=[number]) for number in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for turn in range(30):
            put(dice.sample(names, 6))
            gone = delete()
            again = dice.sample(names, 3)
            put(again)
            gone.result(20.0)
            assert [store.fetch(name) for name in again] == [1, 1, 1], turn
            assert store.flush(20.0)
            store.forget()
            assert [store.fetch(name) for name in again] == [1, 1, 1], f"below L1, turn {turn}"
            delete().result(20.0)
    finally:
        stop.set()
        for looker in lookers:
            looker.join(20.0)
    assert store.flush(20.0)
    assert until(store.nothing_is_taken)
    store.close(5.0)
