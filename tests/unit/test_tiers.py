"""What a store of several tiers promises: what is written below, what comes back, and what a policy changes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiers import CHAIN, Recorder, Store, held, key, memory, payload, until
from lmcache.v1.storage.l2 import envelope
from lmcache.v1.storage.l2.adapter import AdapterFull
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.shm_pool import PAGE

# ------------------------------------------------------------------------------------------------ write-behind


def test_what_is_published_is_in_every_tier_with_a_header_that_says_what_it_is() -> None:
    adapters = [memory(), memory(shared=True)]
    store = Store(*adapters)
    assert store.put(*CHAIN, account="acc") == 10
    assert store.flush(10.0)
    for adapter in adapters:
        assert held(adapter) == set(CHAIN)
        found = adapter.objects[key("c3")]
        info = envelope.check(found.header, key("c3"), memoryview(found.payload))
        assert (found.payload, info.account) == (payload("c3"), "acc")
    assert store.nothing_is_taken()
    store.close(5.0)


@settings(max_examples=20)
@given(depths=st.permutations(range(8)), batch=st.integers(1, 5))
def test_the_first_chunks_of_a_prefix_are_written_first(depths: list[int], batch: int) -> None:
    adapter = Recorder(threads=1, batch=batch)
    store = Store(adapter)
    adapter.gate.clear()
    store.put("before")
    assert until(lambda: adapter.at_gate == 1)
    with store.lock:
        item = [store.l1.take(key(f"c{depth}"), PAGE, depth=depth) for depth in range(8)]
        for reservation in item:
            assert reservation is not None
            store.l1.publish(reservation)
        store.published([key(f"c{depth}") for depth in depths])
    adapter.gate.set()
    assert store.flush(10.0)
    assert adapter.order[1:] == [f"c{depth}" for depth in range(8)]
    store.close(5.0)


def test_what_a_tier_holds_already_is_not_written_again() -> None:
    adapter = Recorder()
    store = Store(adapter)
    store.put("a")
    store.flush(10.0)
    store.forget()
    store.put("a", "b")
    store.flush(10.0)
    assert sorted(adapter.order) == ["a", "b"]
    store.close(5.0)


def test_what_a_queue_has_no_room_for_is_dropped_counted_and_stays_in_l1() -> None:
    adapter = Recorder(threads=1)
    store = Store(adapter, queue_bytes=3 * PAGE)
    adapter.gate.clear()
    store.put(*CHAIN)
    assert store.status()[0]["queued_bytes"] <= 3 * PAGE
    adapter.gate.set()
    assert store.flush(10.0)
    assert held(adapter) == {"c0", "c1", "c2"}
    assert store.status()[0]["dropped"] == 7
    assert store.in_l1(*CHAIN) == 10
    assert store.nothing_is_taken()
    store.close(5.0)


def test_a_write_under_way_keeps_its_object_from_being_evicted() -> None:
    adapter = Recorder()
    store = Store(adapter, pages=2)
    adapter.gate.clear()
    store.put("a")
    for i in range(5):
        store.put(f"x{i}")
    assert store.in_l1("a") == 1
    adapter.gate.set()
    assert store.flush(10.0)
    assert "a" in held(adapter)
    store.close(5.0)


def test_with_skip_l1_what_every_tier_has_is_the_first_to_leave() -> None:
    store = Store(memory(), memory(), pages=4, store_policy="skip_l1")
    store.put("a", "b")
    assert store.flush(10.0)
    with store.lock:
        store.l1.pin("e", 1, "s", "r", {0: [[key("a")]]})  # used just now
        store.l1.release("e", 1)
    store.put("x", "y")
    store.put("z")
    assert [store.in_l1(name) for name in "abxyz"] == [1, 0, 1, 1, 1]
    store.close(5.0)


def test_the_end_of_a_write_to_a_sync_tier_can_be_waited_for() -> None:
    adapter, other = Recorder(), memory()
    adapter.sync = True  # type: ignore[attr-defined]
    store = Store(other, adapter)
    adapter.gate.clear()
    store.put("a", "b")
    with store.lock:
        written = store.written([key("a"), key("b")])
        assert store.written([key("missing")]) is None
    assert written is not None
    assert not written.done()
    adapter.gate.set()
    assert written.result(10.0) is True
    adapter.set(error=1.0)
    store.put("c")
    with store.lock:
        written = store.written([key("c")])
    assert written is None or written.result(10.0) is False
    store.close(5.0)


def test_a_wait_for_a_sync_tier_that_hangs_has_an_end() -> None:
    adapter = memory(hang=1.0)
    adapter.sync = True  # type: ignore[attr-defined]
    store = Store(adapter, store_seconds=0.1)
    store.put("a")
    with store.lock:
        written = store.written([key("a")])
    assert written is not None
    assert written.result(5.0) is False
    adapter.calm()
    store.close(5.0)


# ------------------------------------------------------------------------------------------ eviction, deletion


def test_a_tier_of_our_own_stays_below_its_capacity_and_keeps_what_was_used_last() -> None:
    adapter = memory(capacity=20 * (PAGE + 512))
    store = Store(adapter, pages=64)
    for i in range(40):
        store.put(f"n{i}")
        assert store.flush(10.0)
        if i >= 10:
            store.forget()
            assert store.fetch("n5") == 1
    assert "n5" in held(adapter)
    assert "n39" in held(adapter)
    assert adapter.usage().used_bytes <= 20 * (PAGE + 512)
    (tier,) = store.status()
    assert tier["objects"] == len(adapter.objects)
    assert tier["evicted"] == 40 - len(adapter.objects)
    assert tier["failed"] == 0
    store.close(5.0)


def test_an_engine_that_is_full_before_its_time_gets_room_and_is_said_so_and_not_taken_for_broken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Small(FaultAdapter):
        def store(self, objects, call):  # type: ignore[no-untyped-def]
            if len(self.objects) + len(objects) > 5:
                raise AdapterFull("no space left")
            return super().store(objects, call)

    adapter = Small(FaultOptions(batch=1))
    store = Store(adapter, breaker_failures=1)
    for i in range(20):
        store.put(f"n{i}")
        assert store.flush(10.0)
    (tier,) = store.status()
    assert tier["state"] == "up"
    assert tier["breaker_opened"] == 0
    assert tier["stored"] > 5
    said = [record.getMessage() for record in caplog.records if "full before its time" in record.getMessage()]
    assert said == ["tier t0 is full before its time: no space left"]
    store.close(5.0)


def test_for_an_object_that_can_never_fit_nothing_goes() -> None:
    adapter = memory(capacity=20 * (PAGE + 512))
    store = Store(adapter)
    store.put(*CHAIN)
    assert store.flush(10.0)
    with store.lock:
        item = store.l1.take(key("large"), 30 * PAGE)
        assert item is not None
        store.l1.publish(item)
        store.published([key("large")])
    assert store.flush(10.0)
    (tier,) = store.status()
    assert (tier["stored"], tier["failed"], tier["evicted"]) == (len(CHAIN), 1, 0)
    assert held(adapter) == set(CHAIN)
    store.close(5.0)


def test_an_engine_that_comes_to_hold_something_else_is_known_anew() -> None:
    adapter, other = memory(), memory()
    for below, names in ((other, ("b", "c")), (adapter, ("a", "b"))):
        store = Store(below)
        store.put(*names)
        assert store.flush(10.0)
        if below is other:
            store.close(5.0)
    adapter.objects = other.objects
    adapter.scans += 1
    store.forget()
    assert store.fetch("a") == 0
    assert [store.known("t0", key(name)) for name in "abc"] == [False, True, True]
    assert store.fetch("c") == 1
    assert store.status()[0]["objects"] == 2
    store.close(5.0)


def test_after_a_restart_a_tier_of_our_own_knows_what_it_holds() -> None:
    adapter = memory()
    store = Store(adapter)
    store.put(*CHAIN)
    store.close(5.0)
    assert held(adapter) == set(CHAIN), "close flushes"
    store = Store(adapter)
    assert store.status()[0]["objects"] == 10
    assert store.known("t0", key("c1")) is True
    assert {k for k, _ in store.objects("t0") or ()} == {key(name) for name in CHAIN}
    assert store.fetch(*CHAIN) == 10
    store.close(5.0)


def test_a_deletion_reaches_l1_and_every_tier_and_what_is_on_its_way_there() -> None:
    adapter = Recorder(threads=4)
    store = Store(adapter)
    adapter.gate.clear()
    store.put("a", "b")
    assert until(lambda: adapter.at_gate == 1)
    store.put("c", "d")
    with store.lock:
        gone = store.delete([key("a"), key("c")])
    assert gone.result(10.0)["t0"] >= 0, "while a is on its way"
    adapter.gate.set()
    assert store.flush(10.0)
    assert until(lambda: held(adapter) == {"b", "d"})
    store.forget()
    assert store.fetch("a") == 0
    assert store.fetch("b") == 1
    store.close(5.0)


def test_what_is_deleted_while_it_is_loaded_does_not_arrive() -> None:
    adapter = Recorder(threads=4)
    store = Store(adapter)
    store.put("a", "b")
    assert store.flush(10.0)
    store.forget()
    adapter.gate.clear()
    adapter.at_gate = 0
    found, ended = store.ask("a", "b")
    assert found is not None
    assert until(lambda: adapter.at_gate == 2)
    with store.lock:
        store.delete([key("b")])
    adapter.gate.set()
    assert ended.wait(10.0)
    with store.lock:
        assert found.chunks == 1
        assert key("b") not in store.l1
        found.release()
    store.close(5.0)


def test_at_the_deadline_a_chunk_counts_only_with_all_its_parts() -> None:
    fast, slow = memory(), memory()
    store = Store(fast, slow)
    store.put("p", "q")
    store.close(5.0)
    del slow.objects[key("p")], fast.objects[key("q")]
    slow.set(hang=1.0, on=("load",))
    store = Store(fast, slow)
    ended = threading.Event()
    with store.lock:
        found = store.prefetch([[(key("p"), PAGE), (key("q"), PAGE)]], "", 0.3, ended.set)
    assert found is not None
    assert ended.wait(10.0)
    with store.lock:
        assert found.chunks == 0
        assert key("p") not in store.l1
        found.release()
    slow.calm()
    assert until(store.nothing_is_taken)
    store.close(5.0)


def test_a_clear_reaches_what_is_asked_for_and_nothing_that_is_published_after_it_is_lost() -> None:
    first, second = memory(), memory(shared=True)
    store = Store(first, second)
    store.put("a", "b", account="x")
    store.put("c", account="y")
    assert store.flush(10.0)
    with store.lock:
        gone = store.clear(["l1", "t0"], account="x")
    assert gone.result(10.0) == {"l1": 2, "t0": 2}
    assert (held(first), held(second)) == ({"c"}, {"a", "b", "c"})
    with store.lock:
        gone = store.clear()
    store.put("d")
    assert gone.result(10.0) == {"l1": 1, "t0": 1, "t1": 3}
    assert store.flush(10.0)
    assert (held(first), held(second)) == ({"d"}, {"d"})
    with store.lock, pytest.raises(KeyError, match="expected one of l1, t0, t1"):
        store.clear(["t9"])
    store.close(5.0)


def test_a_tier_that_is_down_says_so_when_it_is_to_be_cleared() -> None:
    adapter = memory(shared=True, error=1.0)
    store = Store(adapter, breaker_failures=1, breaker_seconds=60.0)
    store.put("a")
    assert until(lambda: store.status()[0]["state"] == "open")
    assert store.flush(10.0)
    with store.lock:
        gone = store.clear()
    assert gone.result(10.0) == {"l1": 1, "t0": -1}
    store.close(5.0)
