"""What a prefetch promises: what comes back from the tiers, how far, for whom, and until when."""

from __future__ import annotations

import threading

import pytest

from helpers.tiers import CHAIN, Recorder, Store, held, key, memory, until
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.shm_pool import PAGE


@pytest.mark.parametrize("shared", [False, True])
def test_what_l1_lost_comes_back_as_far_as_the_tiers_have_it(shared: bool) -> None:
    adapter = memory(shared=shared)
    store = Store(adapter)
    store.put(*CHAIN)
    store.flush(10.0)
    del adapter.objects[key("c6")]
    store.forget()
    assert store.fetch(*CHAIN) == 6
    assert store.in_l1(*CHAIN) == 6
    assert [store.in_l1(name) for name in CHAIN[6:]] == [0] * 4, "nothing is kept that extends no prefix"
    assert until(store.nothing_is_taken)
    store.close(5.0)


def test_a_chunk_counts_only_with_all_ranks_and_groups_and_parts_come_from_several_tiers() -> None:
    first, second = memory(), memory(shared=True)
    store = Store(first, second)
    names = [f"{part}{i}" for i in range(4) for part in "pq"]
    store.put(*names)
    store.flush(10.0)
    for name in ("p1", "q2"):
        del first.objects[key(name)]
    del second.objects[key("p0")]
    del first.objects[key("q3")], second.objects[key("q3")]
    restarted = Store(first, second)
    store.close(5.0)
    ended = threading.Event()
    rows = [[(key(f"{part}{i}"), PAGE) for part in "pq"] for i in range(4)]
    with restarted.lock:
        found = restarted.prefetch(rows, "", 10.0, ended.set)
    assert found is not None
    assert ended.wait(10.0)
    with restarted.lock:
        assert found.chunks == 3
        restarted.check([f"{part}{i}" for i in range(3) for part in "pq"])
        assert key("p3") not in restarted.l1
        found.release()
    restarted.close(5.0)


def test_where_nothing_below_could_help_there_is_no_prefetch_and_nothing_is_pinned() -> None:
    store = Store(memory())
    store.put("a")
    assert store.flush(10.0)
    assert store.ask("a")[0] is None, "L1 has it all"
    assert store.ask("b")[0] is None, "the tier's index does not"
    assert store.ask()[0] is None
    assert store.nothing_is_taken()
    store.close(5.0)


def test_what_is_known_to_be_there_does_not_wait_for_what_may_be() -> None:
    class Counting(FaultAdapter):
        asked = 0

        def contains(self, keys, call):  # type: ignore[no-untyped-def]
            self.asked += 1
            return super().contains(keys, call)

    adapter = Counting(FaultOptions(shared=True, threads=1, batch=1, latency_ms=2))
    store = Store(adapter, pages=300)
    names = [f"n{i}" for i in range(200)]
    store.put(*names)
    assert store.flush(20.0)
    store.forget()
    assert store.fetch(*names, seconds=0.1) > 5
    assert adapter.asked < 100
    store.close(5.0)


def test_what_came_stays_pinned_until_it_is_released() -> None:
    store = Store(memory(), pages=4)
    store.put("a", "b")
    store.flush(10.0)
    store.forget()
    found, ended = store.ask("a", "b")
    assert found is not None
    assert ended.wait(10.0)
    for i in range(6):
        store.put(f"x{i}")
    assert store.in_l1("a", "b") == 2
    with store.lock:
        found.release()
    for i in range(6):
        store.put(f"y{i}")
    assert store.in_l1("a", "b") == 0
    store.close(5.0)


def test_two_that_want_the_same_share_its_load_and_one_that_leaves_takes_nothing_from_the_other() -> None:
    adapter = Recorder(threads=2)
    store = Store(adapter)
    store.put("a")
    store.flush(10.0)
    store.forget()
    calls = adapter.calls
    adapter.gate.clear()
    first, _ = store.ask("a")
    second, ended = store.ask("a")
    third, _ = store.ask("a", "b")
    assert first is not None
    assert second is not None
    assert third is not None
    with store.lock:
        first.release()
        third.release()
        assert store.l1.usage()["reserved_bytes"] <= PAGE
    adapter.gate.set()
    assert ended.wait(10.0)
    with store.lock:
        assert second.chunks == 1
        second.release()
    assert until(store.nothing_is_taken)
    assert adapter.calls == calls + 1
    store.close(5.0)


def test_one_that_leaves_before_the_end_is_not_called_back_and_frees_everything() -> None:
    adapter = Recorder(threads=1, batch=2)
    store = Store(adapter)
    store.put(*CHAIN)
    store.flush(10.0)
    store.forget()
    adapter.gate.clear()
    found, ended = store.ask(*CHAIN)
    assert found is not None
    with store.lock:
        found.release()
    adapter.gate.set()
    assert until(store.nothing_is_taken)
    assert not ended.is_set()
    assert store.in_l1(*CHAIN) == 0
    store.close(5.0)


def test_at_its_deadline_a_prefetch_ends_with_what_is_there() -> None:
    fast, slow = memory(), memory()
    store = Store(fast, slow)
    store.put("a", "b")
    store.close(5.0)
    del slow.objects[key("a")], fast.objects[key("b")]
    slow.set(hang=1.0, on=("load",))
    store = Store(fast, slow)
    assert store.fetch("a", "b", seconds=0.3) == 1
    assert not until(store.nothing_is_taken, 0.0), "the call that hangs has its memory"
    slow.calm()
    assert until(store.nothing_is_taken)
    assert store.in_l1("a", "b") == 1, "what comes too late is dropped"
    store.close(5.0)


def test_short_of_room_the_first_chunks_come() -> None:
    store = Store(memory(), pages=16)
    store.put(*CHAIN)
    store.flush(10.0)
    store.forget()
    with store.lock:
        blocker = store.l1.reserve("s", 999, [[(b"big", 12 * PAGE)]], True)
        assert blocker[0][0][0] >= 0
    assert store.fetch(*CHAIN) == 4
    store.close(5.0)


def test_a_prefetch_counts_against_the_quota_of_its_account() -> None:
    store = Store(memory())
    store.put(*CHAIN)
    store.flush(10.0)
    store.forget()
    with store.lock:
        store.l1.set_quota("x", 3 * PAGE)
    found, ended = store.ask(*CHAIN, account="x")
    assert found is not None
    assert ended.wait(10.0)
    with store.lock:
        assert found.chunks == 3
        assert store.l1.usage_by_account()["x"].used_bytes == 3 * PAGE
        found.release()
    store.close(5.0)


def test_with_drop_what_came_from_below_leaves_with_its_last_reader() -> None:
    store = Store(memory(), prefetch_policy="drop")
    store.put("a", "b")
    store.flush(10.0)
    with store.lock:
        store.l1.delete([key("b")])
    found, ended = store.ask("a", "b")
    assert found is not None
    assert ended.wait(10.0)
    with store.lock:
        store.l1.pin("e", 1, "s", "r", {0: [[key("a"), key("b")]]})
        found.release()
    assert store.in_l1("a", "b") == 2
    with store.lock:
        store.l1.release("e", 1)
    assert store.in_l1("a", "b") == 1, "a was stored here, and stays"
    store.close(5.0)


def test_what_somebody_stores_again_meanwhile_stays() -> None:
    store = Store(memory(), prefetch_policy="drop")
    store.put("a")
    store.flush(10.0)
    store.forget()
    found, ended = store.ask("a")
    assert found is not None
    assert ended.wait(10.0)
    store.put("a")
    with store.lock:
        found.release()
    assert store.in_l1("a") == 1
    store.close(5.0)


@pytest.mark.parametrize("promote", [True, False])
def test_what_a_tier_gave_is_written_to_the_tiers_of_our_own_above_it(promote: bool) -> None:
    above, beside, below = memory(), memory(shared=True), memory(shared=True)
    store = Store(below)
    store.put("a", "b")
    store.flush(10.0)
    store.close(5.0)
    store = Store(above, beside, below, promote=promote)
    assert store.fetch("a", "b") == 2
    assert store.flush(10.0)
    assert held(above) == ({"a", "b"} if promote else set())
    assert held(beside) == set()
    store.close(5.0)
