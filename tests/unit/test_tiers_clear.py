"""Clears of one account: what is meant, wherever it is at that moment, and nothing else."""

from __future__ import annotations

from helpers.tiers import Recorder, Store, held, memory, until


def test_a_clear_of_an_account_reaches_what_is_on_its_way_and_nothing_of_others_or_published_after_it() -> (
    None
):
    tier = Recorder(threads=1, batch=1)
    store = Store(tier)
    try:
        store.put("old", account="x")
        store.put("keep", account="y")
        assert store.flush(5)
        tier.gate.clear()
        store.put("under way", account="x")
        assert until(lambda: tier.at_gate == 3)
        store.put("waits", account="x")
        store.put("other", account="y")
        with store.lock:
            cleared = store.clear(account="x")
        store.put("new", account="x")
        tier.gate.set()
        cleared.result(10)
        assert store.flush(5)
        assert until(lambda: held(tier) == {"keep", "other", "new"})
        assert store.in_l1("waits") == 0
        assert store.in_l1("new") == store.in_l1("other") == 1
    finally:
        store.close(5)


def test_a_clear_of_an_account_while_it_is_loaded_lets_nothing_of_it_arrive() -> None:
    tier = Recorder(threads=1)
    store = Store(tier)
    try:
        store.put("mine", account="x")
        store.put("other", account="y")
        assert store.flush(5)
        store.forget()
        tier.gate.clear()
        mine, ended = store.ask("mine", account="x")
        other, arrived = store.ask("other", account="y")
        with store.lock:
            cleared = store.clear(account="x")
        tier.gate.set()
        assert ended.wait(5)
        assert arrived.wait(5)
        cleared.result(10)
        assert store.in_l1("mine") == 0
        assert store.in_l1("other") == 1
        assert held(tier) == {"other"}
        with store.lock:
            for prefetch in (mine, other):
                assert prefetch is not None
                prefetch.release()
    finally:
        tier.gate.set()
        store.close(5)


def test_a_clear_of_an_account_reads_the_headers_of_what_an_engine_does_not_know_the_account_of() -> None:
    tier = memory()
    store = Store(tier)
    store.put(*(f"a{i}" for i in range(40)), account="x")
    assert store.flush(5)
    store.forget()
    store.put(*(f"b{i}" for i in range(40)), account="y")
    assert store.flush(5)
    store.close(5)
    again = Store(tier, pages=128)
    try:
        again.put(*(f"c{i}" for i in range(70)), account="x")  # known, and more than a batch
        assert again.flush(5)
        with again.lock:
            cleared = again.clear(["t0"], account="x")
        assert cleared.result(10) == {"t0": 110}
        assert held(tier) == {f"b{i}" for i in range(40)}
    finally:
        again.close(5)
