"""Deletions beside stores, writes and lookups: what is published later stays, and what went stays away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from helpers.tiers import Store, held, key, until
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions


class Gated(FaultAdapter):
    """Calls wait at a gate: stores and deletions before they are done, loads after."""

    def __init__(self, shared: bool) -> None:
        super().__init__(FaultOptions(threads=4, batch=1, shared=shared))
        self.gates = {what: threading.Event() for what in ("store", "delete", "load")}
        for gate in self.gates.values():
            gate.set()
        self.came = dict.fromkeys(self.gates, 0)

    def shut(self, what: str) -> None:
        self.came[what] = 0
        self.gates[what].clear()

    def open(self, what: str) -> None:
        self.gates[what].set()

    def _at(self, what: str) -> None:
        self.came[what] += 1
        assert self.gates[what].wait(20)

    def store(self, objects, call):  # type: ignore[no-untyped-def]
        self._at("store")
        return super().store(objects, call)

    def delete(self, keys, call):  # type: ignore[no-untyped-def]
        self._at("delete")
        return super().delete(keys, call)

    def clear(self, call):  # type: ignore[no-untyped-def]
        self._at("delete")
        return super().clear(call)

    def load(self, wants, call):  # type: ignore[no-untyped-def]
        headers = super().load(wants, call)
        self._at("load")
        return headers


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def tier(request: pytest.FixtureRequest) -> Gated:
    return Gated(request.param)


@pytest.fixture
def store(tier: Gated) -> Iterator[Store]:
    made = Store(tier)
    yield made
    for what in tier.gates:
        tier.open(what)
    assert made.flush(10.0)
    assert until(made.nothing_is_taken)
    made.close(5.0)


Remove = Callable[[Store], "Future[dict[str, int]]"]


def clear(store: Store) -> Future[dict[str, int]]:
    with store.lock:
        return store.clear()


def delete(store: Store) -> Future[dict[str, int]]:
    with store.lock:
        return store.delete([key("a")])


def clear_account(store: Store) -> Future[dict[str, int]]:
    with store.lock:
        return store.clear(account="x")


ALL = pytest.mark.parametrize("remove", [clear, delete])


@ALL
def test_what_is_published_anew_while_a_deletion_waits_is_written_after_it(
    tier: Gated, store: Store, remove: Remove
) -> None:
    store.put("a")
    assert store.flush(10.0)
    tier.shut("delete")
    gone = remove(store)
    assert until(lambda: tier.came["delete"] == 1)
    tier.shut("store")
    assert store.put("a", "b") == 2
    assert tier.came["store"] == 0, "a write that overtakes the deletion would be undone by it"
    tier.open("store")
    tier.open("delete")
    assert gone.result(10.0)["t0"] == 1
    assert store.flush(10.0)
    assert held(tier) == {"a", "b"}


@ALL
def test_what_is_published_anew_while_the_deleted_one_is_written_is_written_again(
    tier: Gated, store: Store, remove: Remove
) -> None:
    tier.shut("store")
    store.put("a")
    assert until(lambda: tier.came["store"] == 1)
    remove(store).result(10.0)
    store.put("a")
    store.put("a")
    assert store.status()[0]["queued_objects"] == 1
    tier.open("store")
    assert store.flush(10.0)
    assert held(tier) == {"a"}
    assert tier.came["store"] == 2


@ALL
def test_what_is_published_anew_and_deleted_again_while_the_first_is_written_goes(
    tier: Gated, store: Store, remove: Remove
) -> None:
    tier.shut("store")
    store.put("a")
    assert until(lambda: tier.came["store"] == 1)
    for _ in range(3):
        remove(store).result(10.0)
        store.put("a")
    remove(store).result(10.0)
    tier.open("store")
    assert store.flush(10.0)
    assert until(lambda: held(tier) == set())


@ALL
def test_what_is_about_to_go_is_not_loaded_any_more(tier: Gated, store: Store, remove: Remove) -> None:
    """Else it would be back in L1 when the deletion is done."""
    store.put("a")
    assert store.flush(10.0)
    tier.shut("delete")
    gone = remove(store)
    assert until(lambda: tier.came["delete"] == 1)
    assert store.fetch("a") == 0
    tier.open("delete")
    gone.result(10.0)
    assert store.fetch("a") == 0


def test_a_deletion_that_the_tier_refuses_holds_up_nothing(tier: Gated) -> None:
    store = Store(tier, breaker_failures=1, breaker_seconds=0.05)
    tier.set(error=1.0, on=("store",))
    store.put("a")
    assert until(lambda: store.status()[0]["state"] != "up")
    assert clear(store).result(10.0)["t0"] == -1
    tier.calm()
    assert until(lambda: store.status()[0]["state"] == "up")
    store.put("b")
    assert store.flush(10.0)
    assert held(tier) == {"b"}
    store.close(5.0)


def test_what_was_damaged_is_written_again_while_the_damaged_one_is_being_deleted() -> None:
    tier = Gated(shared=False)
    store = Store(tier)
    store.put("a")
    assert store.flush(10.0)
    store.forget()
    tier.set(wrong_bytes=1.0)
    tier.shut("delete")
    assert store.fetch("a") == 0
    tier.calm()
    assert until(lambda: tier.came["delete"] == 1)
    store.put("a")
    tier.open("delete")
    assert store.flush(10.0)
    assert held(tier) == {"a"}
    store.close(5.0)


# ---- one account's


def test_what_of_an_account_is_on_its_way_down_goes_with_it_and_nothing_of_another() -> None:
    tier = Gated(shared=False)
    store = Store(tier)
    tier.shut("store")
    for name, account in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "x"), ("e", "y")):
        store.put(name, account=account)
    assert until(lambda: tier.came["store"] == 3), "the others wait"
    gone = clear_account(store)
    tier.open("store")
    gone.result(10.0)
    assert store.flush(10.0)
    assert until(lambda: held(tier) == {"e"})
    store.close(5.0)


def test_what_of_an_account_is_on_its_way_up_does_not_arrive() -> None:
    tier = Gated(shared=False)
    store = Store(tier)
    store.put("a", account="x")
    store.put("b", account="y")
    assert store.flush(10.0)
    store.forget()
    tier.shut("load")
    waiting = [store.ask(name, account=account) for name, account in (("a", "x"), ("b", "y"))]
    assert until(lambda: tier.came["load"] == 2)
    clear_account(store).result(10.0)
    tier.open("load")
    for found, ended in waiting:
        assert ended.wait(10.0)
        with store.lock:
            assert found is not None
            found.release()
    assert (store.in_l1("a"), store.in_l1("b")) == (0, 1)
    store.close(5.0)


# ---- a load that was under way


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_stored_anew_during_a_load_that_found_nothing_of_use_stays(damaged: bool) -> None:
    tier = Gated(shared=False)
    store = Store(tier)
    store.put("a", "b")
    assert store.flush(10.0)
    store.forget()
    tier.shut("load")
    if damaged:
        tier.set(wrong_bytes=1.0)
    else:
        tier.objects.clear()
    waiting = [store.ask(name) for name in "ab"]
    assert until(lambda: tier.came["load"] == 2)
    tier.calm()
    delete(store).result(10.0)
    store.put("a")
    assert store.flush(10.0)
    tier.open("load")
    for found, ended in waiting:
        assert found is not None
        assert ended.wait(10.0)
    assert until(lambda: store.known("t0", key("b")) is False), "b is of no use, and goes"
    assert until(lambda: not store._tiers[0].removals)
    assert held(tier) == {"a"}
    store.forget()
    assert store.fetch("a") == 1
    store.close(5.0)


def test_what_is_deleted_during_a_clear_is_not_taken_for_being_there_after_it() -> None:
    class Slow(Gated):
        """Its list is made before the deletion, and read after it."""

        def scan(self):  # type: ignore[no-untyped-def]
            found = list(super().scan())
            if self.came["delete"]:
                assert until(lambda: key("a") not in self.objects)
            return iter(found)

        def clear(self, call):  # type: ignore[no-untyped-def]
            self.came["delete"] += 1
            return 0  # nothing could go

    tier = Slow(shared=False)
    store = Store(tier)
    store.put("a", "b")
    assert store.flush(10.0)
    gone = clear(store)
    delete(store).result(10.0)
    gone.result(10.0)
    assert [store.known("t0", key(name)) for name in "ab"] == [False, True]
    store.put("a")
    assert store.flush(10.0)
    assert held(tier) == {"a", "b"}
    store.close(5.0)


def test_what_is_stored_again_on_its_way_down_is_not_taken_for_being_there() -> None:
    """By ``skip_l1`` it would be the first to leave L1, and be lost if its write fails."""
    tier = Gated(shared=False)
    store = Store(tier, pages=4, store_policy="skip_l1", breaker_failures=99)
    tier.set(error=1.0, on=("store",))
    store.put("older")
    assert store.flush(10.0)
    tier.shut("store")
    store.put("a")
    store.put("a")
    tier.open("store")
    assert store.flush(10.0)
    assert until(store.nothing_is_taken)
    store.put("b", "c", "d")
    assert (store.in_l1("older"), store.in_l1("a")) == (0, 1)
    store.close(5.0)


# ---- what goes for want of room


def test_what_is_stored_anew_while_the_tier_evicts_it_is_there_after_that() -> None:
    tier = Gated(shared=False)
    store = Store(tier)
    store.put("a")
    store.put("b", "c")
    assert store.flush(10.0)
    store.forget()
    tier.set(capacity=tier.usage().used_bytes)
    tier.shut("delete")
    store.put("d")
    assert until(lambda: tier.came["delete"] == 1), "room is made for it"
    store.put("a")
    assert store.status()[0]["queued_objects"] == 2
    tier.open("delete")
    assert store.flush(10.0)
    assert until(lambda: not store._tiers[0].removals)
    known = {name for name in "abcd" if store.known("t0", key(name))}
    assert known == held(tier)
    assert "a" in known
    store.close(5.0)


# ---- calls that hang


@pytest.mark.parametrize("well_before", [False, True])
def test_what_was_deleted_while_its_write_hung_goes_when_the_write_is_over_after_all(
    well_before: bool,
) -> None:
    tier = FaultAdapter(FaultOptions(threads=3, batch=1, hang=1.0, hang_seconds=60.0, on=("store",)))
    store = Store(tier, store_seconds=1.0, breaker_seconds=0.1)
    store.put("a")
    assert until(lambda: tier.running == 1)
    assert delete(store).result(10.0)["t0"] == 1
    tier.set(hang=0.0, error=0.0 if well_before else 1.0, on=("contains",))
    assert until(lambda: store.status()[0]["overdue"] == 1)
    if well_before:
        assert until(lambda: store.status()[0]["state"] == "up")
    tier.release()
    assert until(lambda: store.status()[0]["stored"] == 1)
    tier.calm()
    assert until(lambda: store.status()[0]["state"] == "up")
    assert until(lambda: held(tier) == set())
    assert until(lambda: not store._tiers[0].removals)
    assert not store.known("t0", key("a"))
    store.close(5.0)
