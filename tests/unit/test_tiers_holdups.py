"""What hangs, fails or is taken back in a tier holds up no write for longer than it must."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from helpers.stored import disk
from helpers.tiers import Store, held, key, memory, until
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions


class SlowDeletions(FaultAdapter):
    """Deletions of what is named wait at a gate."""

    def __init__(self, *names: str, **options: object) -> None:
        super().__init__(FaultOptions(**{"threads": 4, "batch": 1, **options}))  # type: ignore[arg-type]
        self.slow = {key(name) for name in names}
        self.gate = threading.Event()
        self.waiting = 0

    def delete(self, keys, call):  # type: ignore[no-untyped-def]
        if self.slow.intersection(keys):
            self.waiting += 1
            assert self.gate.wait(20)
        return super().delete(keys, call)


def being_deleted(store: Store, tier: SlowDeletions) -> Future[dict[str, int]]:
    """The deletion, under way, of an object that the tier has."""
    store.put("a")
    assert store.flush(10.0)
    with store.lock:
        gone = store.delete([key("a")])
    assert until(lambda: tier.waiting == 1)
    return gone


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_deletion_that_takes_long_holds_up_no_write_of_anything_else(shared: bool) -> None:
    tier = SlowDeletions("a", shared=shared)
    store = Store(tier)
    gone = being_deleted(store, tier)
    store.put("b", "c")
    assert store.flush(10.0)
    assert held(tier) == {"a", "b", "c"}
    tier.gate.set()
    assert gone.result(10.0)["t0"] == 1
    assert held(tier) == {"b", "c"}
    store.close(5.0)


def test_a_deletion_that_hangs_holds_up_what_is_stored_anew_no_longer_than_its_deadline() -> None:
    tier = SlowDeletions("a")
    store = Store(tier, store_seconds=0.2, breaker_seconds=60.0)
    gone = being_deleted(store, tier)
    store.put("a")
    assert gone.result(10.0)["t0"] == -1
    assert store.flush(5.0)
    assert until(store.nothing_is_taken)
    tier.gate.set()
    store.close(5.0)


def test_at_the_end_a_deletion_that_hangs_keeps_no_memory_of_what_waits_for_it() -> None:
    tier = SlowDeletions("a")
    store = Store(tier)
    gone = being_deleted(store, tier)
    store.put("a")
    store.close(0.3)
    tier.gate.set()
    assert gone.result(10.0)["t0"] == 1
    assert until(store.nothing_is_taken)


def test_what_waits_behind_a_store_that_hangs_is_given_up_with_it() -> None:
    """Else it pins L1 until somebody stores again, and whoever flushes waits for nothing."""
    tier = memory(threads=1, batch=1)
    tier.set(hang=1.0, hang_seconds=60.0, on=("store",))
    store = Store(tier, store_seconds=0.2, breaker_seconds=60.0)
    store.put("a", "b", "c")
    assert until(lambda: store.status()[0]["overdue"] == 1)
    assert store.flush(5.0)
    assert store.status()[0]["dropped"] == 2
    tier.release()
    assert until(store.nothing_is_taken)
    store.close(5.0)


def test_a_deletion_whose_answer_nobody_wants_any_more_holds_up_nothing() -> None:
    tier = SlowDeletions("a")
    store = Store(tier)
    gone = being_deleted(store, tier)
    store.put("a")
    gone.cancel()
    tier.gate.set()
    assert store.flush(5.0)
    assert held(tier) == {"a"}
    store.close(5.0)


def with_slow_deletions(path: Path, **options: float) -> StorageAdapter:
    """A disk that takes 20 ms to delete an object."""
    adapter = disk(path, **options)
    delete = adapter.delete

    def slow(keys, call):  # type: ignore[no-untyped-def]
        gone = []
        for one in keys:
            time.sleep(0 if call.over else 0.02)
            gone += delete([one], call)
        return gone

    adapter.delete = slow  # type: ignore[method-assign]
    return adapter


def fill(store: Store, objects: int, account: str = "") -> None:
    for first in range(0, objects, 40):
        store.put(*[f"old-{n}" for n in range(first, min(first + 40, objects))], account=account)
        assert store.flush(10.0)
        store.forget()


def test_a_quota_that_takes_long_to_come_down_to_costs_no_write(tmp_path: Path) -> None:
    store = Store(with_slow_deletions(tmp_path), store_seconds=1.5)
    fill(store, 160, "mine")
    with store.lock:
        store.set_quota("mine", 0, "t0")
    for n in range(20):
        store.put(f"theirs-{n}")
        time.sleep(0.02)
    assert store.flush(10.0)
    assert until(lambda: store._tiers[0].accounts()["mine"].objects == 0)
    (status,) = store.status()
    assert (status["failed"], status["overdue"]) == (0, 0)
    assert status["objects"] == 20
    store.close(5.0)


def test_room_that_takes_long_to_make_costs_no_write(tmp_path: Path) -> None:
    """More goes at once than is needed now; that is not to be waited for."""
    taken, objects = 8192, 2400
    store = Store(with_slow_deletions(tmp_path, max_gb=taken * objects / 2**30), store_seconds=1.5)
    fill(store, int(objects * 0.95))
    for n in range(20):
        store.put(f"new-{n}")
        time.sleep(0.02)
    assert store.flush(10.0)
    (status,) = store.status()
    assert (status["failed"], status["overdue"]) == (0, 0)
    assert status["evicted"] > 0
    store.close(5.0)


def test_room_in_an_account_that_takes_long_to_make_costs_no_write(tmp_path: Path) -> None:
    store = Store(with_slow_deletions(tmp_path), store_seconds=1.5)
    fill(store, 1000, "mine")
    with store.lock:
        store.set_quota("mine", 8192 * 1000, "t0")
    store.put("new", account="mine")
    assert store.flush(10.0)
    (status,) = store.status()
    assert (status["failed"], status["over_quota"], status["overdue"]) == (0, 0, 0)
    assert store.known("t0", key("new"))
    store.close(5.0)
