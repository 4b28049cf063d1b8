"""What eviction policies promise to L1, and L1 to them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable

import pytest

from lmcache.v1.storage.eviction import LRU, EvictionPolicy, GuardedPolicy
from lmcache.v1.storage.l1 import FULL, L1Cache
from lmcache.v1.storage.shm_pool import PAGE, PoolView, table_bytes


class FIFO(EvictionPolicy):
    """Oldest first, whatever was used since."""

    def __init__(self) -> None:
        self.keys: dict[bytes, int] = {}

    def add(self, key: bytes, size: int) -> None:
        assert key not in self.keys
        self.keys[key] = size

    def touch(self, keys: list[bytes]) -> None:
        assert set(keys) <= set(self.keys)

    def remove(self, key: bytes) -> None:
        del self.keys[key]

    def victims(self) -> Iterable[bytes]:
        return self.keys


class Cache(L1Cache):
    """An L1 of four pages, and a way to store one page each."""

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(fd, table_bytes(4 * PAGE) + 4 * PAGE)
        super().__init__(PoolView(fd, 4 * PAGE), 1.0, 0.0, policy)
        os.close(fd)
        self.leases = itertools.count(1)

    def put(self, *names: bytes) -> None:
        for name in names:
            lease = next(self.leases)
            ((slot, _),) = self.reserve("s", lease, [[(name, PAGE)]], True)[0]
            self.commit("s", lease, [0] if slot >= 0 else [])

    def holds(self) -> set[bytes]:
        return set(self._index)


def test_l1_evicts_in_the_order_of_its_policy() -> None:
    for policy, left in ((LRU(), {b"a", b"d", b"e", b"f"}), (FIFO(), {b"c", b"d", b"e", b"f"})):
        cache = Cache(policy)
        cache.put(b"a", b"b", b"c", b"d")
        cache.touch([[b"a"]])
        cache.put(b"e", b"f")
        assert cache.holds() == left


def test_a_policy_hears_of_every_object_that_comes_or_goes() -> None:
    policy = FIFO()
    cache = Cache(policy)
    cache.put(b"a", b"b", b"c", b"d", b"e")
    assert policy.keys == {b"b": PAGE, b"c": PAGE, b"d": PAGE, b"e": PAGE}
    assert cache.clear() == 4
    assert policy.keys == {}


def test_what_a_policy_does_not_name_or_what_is_pinned_is_not_evicted() -> None:
    class Shy(FIFO):
        def victims(self) -> Iterable[bytes]:
            return [key for key in self.keys if key != b"a"]

    cache = Cache(Shy())
    cache.put(b"a", b"b", b"c", b"d")
    cache.pin("engine", 900, "s", "r", {0: [[b"b"]]})
    cache.put(b"e", b"f", b"g")
    assert cache.holds() >= {b"a", b"b"}
    assert len(cache.holds()) == 4


@pytest.mark.parametrize("named", [[b"a"] * 3, [b"never", b"a"]])
def test_a_key_named_twice_or_never_held_does_no_harm(named: list[bytes]) -> None:
    class Confused(FIFO):
        def victims(self) -> Iterable[bytes]:
            return named

    cache = Cache(Confused())
    cache.put(b"a", b"b", b"c", b"d")
    cache.reserve("s", 900, [[(b"e", PAGE)]], True)
    assert cache.holds() == {b"b", b"c", b"d"}
    ((slot, _),) = cache.reserve("s", 901, [[(b"f", PAGE)]], True)[0]
    assert slot == FULL
    assert cache.usage()["used_bytes"] == 4 * PAGE


def test_columns_of_one_request_go_last_chunk_first_whatever_their_lengths() -> None:
    for columns, order in (
        ([[b"1", b"2"], [b"3", b"4"]], [b"2", b"4", b"1", b"3"]),
        ([[b"1", b"2", b"3"], [b"4"]], [b"3", b"2", b"1", b"4"]),
        ([[b"1", b"2"]], [b"2", b"1"]),
    ):
        policy = LRU()
        cache = Cache(policy)
        cache.put(*sorted(order))
        cache.touch(columns)
        assert list(policy.victims())[-len(order) :] == order


# ---- the guard


def guarded(policy: EvictionPolicy) -> tuple[GuardedPolicy, list[str]]:
    faults: list[str] = []
    return GuardedPolicy(policy, lambda name, exc: faults.append(f"{name}: {exc!r}")), faults


def raising(name: str) -> EvictionPolicy:
    def fail(*_: object) -> None:
        raise SystemExit(name)

    policy = FIFO()
    setattr(policy, name, fail)
    return policy


@pytest.mark.parametrize("name", ["add", "touch", "arrange", "remove", "victims"])
def test_lru_takes_over_from_a_policy_that_raises(name: str) -> None:
    policy, faults = guarded(raising(name))
    cache = Cache(policy)
    cache.put(b"a", b"b", b"c", b"d")
    cache.touch([[b"a"]])
    cache.put(b"e")
    cache.touch([[b"c"]], used=False)
    cache.put(b"f")
    assert faults == [f"{name}: SystemExit({name!r})"]
    assert len(cache.holds()) == 4
    assert list(policy.victims())[-1] == b"f"


@pytest.mark.parametrize(
    "victims",
    [lambda keys: itertools.repeat(b"zz"), lambda keys: ["a"], lambda keys: [[]], lambda keys: None],
    ids=["endless", "text", "unhashable", "none"],
)
def test_an_answer_that_is_none_of_what_was_asked_for_ends_and_harms_nothing(
    victims: Callable[[object], Iterable[bytes]],
) -> None:
    inner = FIFO()
    inner.victims = lambda: victims(inner.keys)  # type: ignore[method-assign]
    policy, _ = guarded(inner)
    cache = Cache(policy)
    cache.put(b"a", b"b", b"c", b"d", b"e")
    assert cache.usage()["used_bytes"] == 4 * PAGE
