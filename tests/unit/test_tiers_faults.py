"""Whatever a tier does, nobody gets a wrong byte or waits beyond the deadline, and it recovers by itself."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.tiers import Store, until
from lmcache.v1.storage.l2 import workers
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions

FAST = {"load_seconds": 0.15, "store_seconds": 0.15, "breaker_seconds": 0.03, "breaker_failures": 2}
SLACK = 4.0
"""Seconds that a busy machine may add to a deadline."""
RATES = (
    "error", "hang", "wrong_answer", "miss", "phantom", "short", "empty", "wrong_bytes", "wrong_object", "lost", "torn",
)  # fmt: skip


_BEFORE: set[threading.Thread] = set()
"""Threads that were there when the test began."""


@pytest.fixture(autouse=True)
def nothing_of_ours_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """An error in the log is a fault of ours, which the threads survived."""
    _BEFORE.clear()
    _BEFORE.update(threading.enumerate())
    monkeypatch.setattr(workers, "_GRACE", 0.02)
    monkeypatch.setattr(workers, "_PROBE_SECONDS", 0.2)
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def threads_of_tiers() -> list[str]:
    new = set(threading.enumerate()) - _BEFORE
    return [thread.name for thread in new if thread.name.startswith("lmcache-tier")]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, float]:
    chosen = draw(st.lists(st.sampled_from(RATES), min_size=1, max_size=4, unique=True))
    return {name: draw(st.sampled_from([0.1, 0.5, 1.0])) for name in chosen}


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])  # to shrink a wait takes for ever
@given(
    plan=plans(),
    second=plans(),
    shared=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1 << 16),
    policy=st.sampled_from([("write_behind", "retain"), ("skip_l1", "drop")]),
)
def test_under_any_mix_of_faults_loads_are_right_or_misses_in_time_and_afterwards_all_is_well(
    plan: dict[str, float],
    second: dict[str, float],
    shared: tuple[bool, bool],
    seed: int,
    policy: tuple[str, str],
) -> None:
    adapters = [
        FaultAdapter(FaultOptions(seed=seed + i, shared=s, batch=4, **rates))  # type: ignore[arg-type]
        for i, (s, rates) in enumerate(zip(shared, (plan, second), strict=True))
    ]
    store = Store(*adapters, pages=24, store_policy=policy[0], prefetch_policy=policy[1], **FAST)
    try:
        storm(store, random.Random(seed))
        for adapter in adapters:
            adapter.calm()
        assert until(lambda: all(tier["state"] == "up" for tier in store.status())), store.status()
        assert until(store.nothing_is_taken), (store.l1.usage(), store.status())
        fresh = [f"fresh{i}" for i in range(6)]
        assert store.put(*fresh) == 6
        assert store.flush(10.0)
        store.forget()
        assert store.fetch(*fresh) == 6
        assert until(store.nothing_is_taken), (store.l1.usage(), store.status())
    finally:
        store.close(5.0)
    assert until(lambda: not threads_of_tiers()), threads_of_tiers()


def storm(store: Store, dice: random.Random) -> None:
    """Random stores, loads and clears; every load is checked, and its time."""
    for _ in range(20):
        chain = [f"{dice.randrange(4)}.{depth}" for depth in range(dice.randrange(1, 9))]
        what = dice.randrange(8)
        if what < 3:
            store.put(*chain)
        elif what < 6:
            if dice.randrange(2):
                store.flush(0.05)
            store.forget()
            began, seconds = time.monotonic(), dice.choice([0.05, 0.2])
            store.fetch(*chain, seconds=seconds)
            assert time.monotonic() - began < seconds + SLACK
        elif what == 6:
            found, _ = store.ask(*chain)
            with store.lock:
                if found is not None:
                    found.release()
                    found.release()
        else:
            with store.lock:
                store.clear(dice.choice([None, ["t0"], ["l1", "t1"]]))


def test_memory_of_a_call_that_hangs_is_nobody_else_s_until_it_returns() -> None:
    adapter = FaultAdapter(FaultOptions(threads=1))
    store = Store(adapter, pages=4, **FAST)
    store.put("a", "b")
    assert store.flush(5.0)
    store.forget()
    adapter.set(hang=1.0, on=("load",))
    assert store.fetch("a", "b", seconds=0.1) == 0
    assert until(lambda: store.status()[0]["overdue"] == 1)
    assert store.status()[0]["breaker_opened"] == 1
    with store.lock:
        assert store.l1.usage()["reserved_bytes"] == 2 * 4096
        assert store.l1.clear(force=True) == 0
    assert store.put("x", "y", "z") == 2, "the other half is free, and that alone"
    adapter.calm()
    assert until(store.nothing_is_taken), store.status()
    with store.lock:
        store.check(["x", "y"])
    store.close(5.0)


def test_a_write_that_hangs_keeps_its_object_where_it_is() -> None:
    adapter = FaultAdapter(FaultOptions(threads=1, hang=1.0, on=("store",)))
    store = Store(adapter, pages=2, **FAST)
    store.put("a")
    assert until(lambda: store.status()[0]["overdue"] == 1)
    assert store.flush(1.0), "nobody waits for what hangs"
    for i in range(5):
        store.put(f"x{i}")
    with store.lock:
        store.check(["a"])
    adapter.calm()
    assert until(store.nothing_is_taken)
    store.close(5.0)


def test_a_tier_all_of_whose_threads_hang_is_stuck_answers_at_once_and_comes_back() -> None:
    adapter = FaultAdapter(FaultOptions(threads=1, hang=1.0))
    store = Store(adapter, **FAST)
    store.put("a")
    assert until(lambda: store.status()[0]["state"] == "stuck"), "the write hangs, then the probe"
    assert adapter.running == 2, "the number of threads has a bound"
    began = time.monotonic()
    found, _ = store.ask("b", seconds=5.0)
    assert found is None
    assert time.monotonic() - began < SLACK
    adapter.calm()
    assert until(lambda: store.status()[0]["state"] == "up")
    store.put("c")
    assert store.flush(5.0)
    store.forget()
    assert store.fetch("c") == 1
    store.close(5.0)
    assert until(lambda: not threads_of_tiers())


@pytest.mark.parametrize("fault", ["wrong_bytes", "wrong_object", "short", "empty"])
def test_what_is_not_what_was_stored_is_a_miss_quarantined_and_counted(fault: str) -> None:
    adapter = FaultAdapter(FaultOptions(threads=1))
    store = Store(adapter)
    store.put("a", "b")
    assert store.flush(5.0)
    with store.lock:  # so that memory does not hold by chance what a lie leaves out
        store.l1.clear()
        store.view.data[:] = bytes(len(store.view.data))
    adapter.set(**{fault: 1.0})
    assert store.fetch("a", "b") == 0
    assert until(lambda: not adapter.objects), "what is damaged is deleted"
    assert until(store.nothing_is_taken)
    (tier,) = store.status()
    assert (tier["quarantined"], tier["loaded"], tier["state"]) == (2, 0, "up")
    assert ("quarantine", {"tier": "t0", "objects": 2}) in store.events
    store.close(5.0)


def test_a_bad_copy_costs_nothing_where_the_next_tier_has_a_good_one() -> None:
    first, second = FaultAdapter(FaultOptions(wrong_bytes=1.0)), FaultAdapter(FaultOptions(shared=True))
    store = Store(first, second)
    store.put("a", "b", "c")
    assert store.flush(5.0)
    store.forget()
    assert store.fetch("a", "b", "c") == 3
    store.close(5.0)


def test_a_tier_that_fails_in_a_row_is_left_alone_and_probed() -> None:
    adapter = FaultAdapter(FaultOptions(shared=True, error=1.0))
    store = Store(adapter, breaker_failures=2, breaker_seconds=0.05)
    for _ in range(2):
        store.fetch("a")
    assert until(lambda: store.status()[0]["state"] in ("open", "probing"))
    assert store.ask("a")[0] is None
    adapter.calm()
    assert until(lambda: store.status()[0]["state"] == "up")
    assert store.fetch("a") == 0
    assert {"tier": "t0", "state": "up"} in [
        fields for event, fields in store.events if event == "tier_state"
    ]
    store.close(5.0)


def test_close_does_not_wait_for_a_call_that_is_known_to_hang() -> None:
    bad = FaultAdapter(FaultOptions(hang=1.0))
    store = Store(bad, store_seconds=0.05, breaker_seconds=60.0)
    store.put("a")
    assert until(lambda: store.status()[0]["hung"] == 1)
    began = time.monotonic()
    store.close(30.0)
    assert time.monotonic() - began < 10.0
    assert until(lambda: not threads_of_tiers())


def test_close_leaves_nothing_but_what_truly_hangs_and_stays_in_its_time() -> None:
    good, bad = FaultAdapter(FaultOptions()), FaultAdapter(FaultOptions(hang=1.0))
    released = bad.release
    bad.close = lambda: None  # type: ignore[method-assign]
    store = Store(good, bad, load_seconds=30.0, store_seconds=30.0)
    store.put("a")
    assert until(lambda: bad.running == 1)
    began = time.monotonic()
    store.close(0.5)
    assert time.monotonic() - began < 2.5 + SLACK
    assert threads_of_tiers() == ["lmcache-tier-t1"]
    released()
    assert until(lambda: not threads_of_tiers())
