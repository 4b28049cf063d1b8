"""Whatever the policy, what has just been stored is the last to go: whoever stored it is about to look for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from helpers.local import pool_view
from lmcache.v1.storage import l1_objects
from lmcache.v1.storage.l1 import FULL, L1Cache
from lmcache.v1.storage.policies import BUILT_IN
from lmcache.v1.storage.shm_pool import PAGE

PAGES = 96
GRACE = 2.0
NAMES = [name for name in BUILT_IN if name != "noop"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(l1_objects, "monotonic", lambda: now[0])
    return now


class Cache(L1Cache):
    def __init__(self, policy: str, ratio: float = 0.25) -> None:
        self.leases = itertools.count()
        super().__init__(pool_view(PAGES), 1.0, ratio, BUILT_IN[policy](), grace_seconds=GRACE)

    def put(self, names: Sequence[str], account: str = "") -> int:
        lease = next(self.leases)
        column = [(name.encode(), PAGE) for name in names]
        (slots,) = self.reserve("s", lease, [column], True, account)
        return self.commit("s", lease, range(sum(offset != FULL for offset, _ in slots)))

    def use(self, names: Sequence[str]) -> None:
        self.touch([[name.encode() for name in names]])

    def has(self, names: Sequence[str]) -> int:
        return sum(name.encode() in self for name in names)

    def full_of_what_is_used_often(self, clock: list[float]) -> None:
        old = [f"old{i}" for i in range(PAGES)]
        assert self.put(old) == PAGES
        for _ in range(3):
            self.use(old)
        clock[0] += 2 * GRACE


A, B = [f"a{i}" for i in range(6)], [f"b{i}" for i in range(6)]
"""Together an eighth of what fits."""


@pytest.mark.parametrize("policy", NAMES)
def test_a_store_does_not_cost_what_another_has_just_stored(policy: str, clock: list[float]) -> None:
    cache = Cache(policy)
    cache.full_of_what_is_used_often(clock)
    assert (cache.put(A), cache.put(B)) == (6, 6)
    assert (cache.has(A), cache.has(B)) == (6, 6)
    assert cache.counters.evicted > 12


@pytest.mark.parametrize("policy", NAMES)
def test_where_all_is_new_the_newest_part_goes_last(policy: str, clock: list[float]) -> None:
    cache = Cache(policy, ratio=0.0)
    newest = PAGES // 8
    for number in range(3 * PAGES):
        assert cache.put([f"n{number}"]) == 1
        cache.use([f"n{number - newest}"])
        assert cache.has([f"n{number - i}" for i in range(min(newest, number + 1))]) == min(
            newest, number + 1
        )


def test_beyond_the_newest_part_the_policy_alone_decides(clock: list[float]) -> None:
    cache = Cache("LFU", ratio=0.0)
    names = [f"n{i}" for i in range(PAGES)]
    cache.put(names)
    cache.use(names[:10])
    assert cache.put(A) == 6
    assert cache.has(names[:10]) == 10


def test_after_its_time_of_grace_a_newcomer_goes_as_the_policy_says(clock: list[float]) -> None:
    cache = Cache("LFU", ratio=0.0)
    cache.full_of_what_is_used_often(clock)
    cache.put(A)
    clock[0] += GRACE
    cache.put(B)
    assert (cache.has(A), cache.has(B)) == (0, 6)


def test_what_is_below_already_goes_first_however_new_it_is(clock: list[float]) -> None:
    cache = Cache("LRU", ratio=0.0)
    cache.full_of_what_is_used_often(clock)
    cache.put(A)
    cache.demote([name.encode() for name in A])
    cache.put(B)
    assert (cache.has(A), cache.has(B)) == (0, 6)


def test_an_account_over_its_quota_loses_its_older_objects_before_the_new_ones(clock: list[float]) -> None:
    cache = Cache("LFU", ratio=0.0)
    cache.set_quota("x", 12 * PAGE)
    cache.put(A, account="x")
    for _ in range(3):
        cache.use(A)
    clock[0] += 2 * GRACE
    assert cache.put(B, account="x") == 6
    assert cache.put([f"c{i}" for i in range(3)], account="x") == 3
    assert (cache.has(A), cache.has(B)) == (3, 6)
