"""Clears of one account: what is meant, wherever it is at that moment, and nothing else."""

from __future__ import annotations

from helpers.tiers import Recorder, Store, held, until


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
