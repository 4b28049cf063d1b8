"""Accounts, quotas, holds, and memory that is filled from below: what L1 promises about them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.local import pool_view
from lmcache.v1.storage.eviction import LRU
from lmcache.v1.storage.l1 import EXISTS, FULL, L1Cache
from lmcache.v1.storage.policies import BUILT_IN
from lmcache.v1.storage.shm_pool import PAGE

LEASES = itertools.count(1)


class Cache(L1Cache):
    def __init__(self, pages: int = 8, policy: str = "LRU", evict_ratio: float = 0.0) -> None:
        self.view = pool_view(pages)
        watermark = None if policy == "noop" else 1.0
        super().__init__(self.view, watermark, evict_ratio, BUILT_IN[policy]())

    def put(self, names: str, account: str = "", size: int = PAGE) -> list[int]:
        """Store each letter as an object; what became of each: EXISTS, FULL or 0."""
        lease = next(LEASES)
        (slots,) = self.reserve("s", lease, [[(name.encode(), size) for name in names]], True, account)
        self.commit("s", lease, range(sum(offset >= 0 for offset, _ in slots)))
        return [min(offset, 0) for offset, _ in slots]

    def left(self, names: str) -> str:
        return "".join(name for name in names if name.encode() in self)

    def used(self) -> dict[str, int]:
        return {name: usage.used_bytes // PAGE for name, usage in self.usage_by_account().items()}


def test_every_byte_counts_against_the_account_that_reserved_it_until_it_is_free() -> None:
    cache = Cache()
    cache.put("ab", "x")
    cache.put("c", "y", 2 * PAGE)
    cache.reserve("s", 1000, [[(b"d", PAGE)]], True, "y")
    assert cache.used() == {"x": 2, "y": 3}
    assert cache.usage_by_account()["y"].objects == 1
    assert cache.clear(account="x") == 2
    cache.abort("s", 1000)
    assert cache.used() == {"y": 2}
    cache.clear()
    assert cache.used() == {}


def test_over_its_quota_an_account_s_own_objects_go_and_nobody_else_s() -> None:
    cache = Cache()
    cache.put("ab", "other")
    cache.set_quota("mine", 2 * PAGE)
    cache.put("cd", "mine")  # of a chain the later chunk goes first
    assert cache.put("e", "mine") == [0]
    assert cache.left("abcde") == "abce"
    assert cache.usage_by_account()["mine"] == (2 * PAGE, 2, 2 * PAGE)


def test_what_an_account_has_pinned_or_held_stays_and_what_is_new_is_refused() -> None:
    cache = Cache()
    cache.set_quota("mine", 2 * PAGE)
    cache.put("ab", "mine")
    cache.pin("engine", 1, "s", "r", {0: [[b"a"]]})
    cache.hold([b"b"])
    assert cache.put("c", "mine") == [FULL]
    assert cache.left("abc") == "ab"
    cache.unhold([b"b"])
    assert cache.put("c", "mine") == [0]
    assert cache.left("abc") == "ac"


def test_what_is_pinned_and_first_to_go_hides_nothing_else_of_its_account() -> None:
    cache = Cache()
    cache.set_quota("mine", 2 * PAGE)
    cache.put("a", "mine")
    cache.put("b", "mine")
    cache.pin("engine", 1, "s", "r", {0: [[b"a"]]})
    cache.touch([[b"b"]])
    cache.demote([b"a"])  # the tiers have it now; it is named among the first, and by the policy
    assert cache.put("c", "mine") == [0]
    assert cache.left("abc") == "ac"


def test_for_an_object_larger_than_l1_an_account_loses_nothing() -> None:
    cache = Cache(pages=8)
    cache.set_quota("mine", 10 * PAGE)
    cache.put("ab", "mine")
    assert cache.put("c", "mine", 9 * PAGE) == [FULL]
    assert cache.left("ab") == "ab"


@pytest.mark.parametrize("quota", [0, PAGE])
def test_an_object_larger_than_the_quota_costs_the_account_nothing(quota: int) -> None:
    cache = Cache()
    cache.put("a", "mine")
    cache.set_quota("mine", quota)
    assert cache.put("b", "mine", 2 * PAGE) == [FULL]
    assert cache.left("ab") == "a"


def test_without_a_quota_the_order_of_eviction_is_never_walked_for_an_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache(pages=64)
    cache.set_quota("limited", 8 * PAGE)
    monkeypatch.setattr(LRU, "victims", lambda self: pytest.fail("walked"))
    for i in range(40):
        assert cache.put(chr(256 + i), "free") == [0]
    assert cache.put("abcd", "limited") == [0, 0, 0, 0]


def test_a_lifted_quota_limits_nobody_and_a_bad_one_is_refused() -> None:
    cache = Cache()
    cache.set_quota("mine", PAGE)
    cache.set_quota("mine", None)
    assert cache.put("abc", "mine") == [0, 0, 0]
    with pytest.raises(ValueError, match="expected 0 or more"):
        cache.set_quota("mine", -1)


@given(
    policy=st.sampled_from(sorted(BUILT_IN)),
    ratio=st.sampled_from([0.0, 0.25]),
    quotas=st.dictionaries(st.sampled_from("xy"), st.integers(0, 6), max_size=2),
    stores=st.lists(
        st.tuples(
            st.sampled_from("xyz"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True)
        ),
        max_size=25,
    ),
    held=st.sets(st.sampled_from("abcdefgh"), max_size=2),
)
def test_no_account_is_ever_above_its_quota_and_all_figures_are_those_of_what_is_there(
    policy: str,
    ratio: float,
    quotas: dict[str, int],
    stores: list[tuple[str, list[str]]],
    held: set[str],
) -> None:
    cache = Cache(6, policy, ratio)
    for account, pages in quotas.items():
        cache.set_quota(account, pages * PAGE)
    for account, names in stores:
        lease = next(LEASES)
        column = [((account + name).encode(), PAGE) for name in names]
        (slots,) = cache.reserve("s", lease, [column], True, account)
        before = [entry.key for entry in cache.entries() if entry.held]
        cache.commit("s", lease, range(sum(offset >= 0 for offset, _ in slots)))
        cache.hold([(account + name).encode() for name in names if name in held])
        assert all(key in cache for key in before), "what is held stays"
        for name, usage in cache.usage_by_account().items():
            mine = [entry for entry in cache.entries() if entry.account == name]
            assert usage.objects == len(mine)
            assert usage.used_bytes == len(mine) * PAGE
            assert name not in quotas or usage.used_bytes <= quotas[name] * PAGE
        assert cache.usage()["held_objects"] == sum(entry.held for entry in cache.entries())
    cache.clear(force=True)
    assert (cache.usage()["used_bytes"], cache.usage()["held_objects"], len(cache)) == (0, 0, 0)


# ---------------------------------------------------------------------------------------------- holds, deletion


def test_a_held_object_survives_every_burst_and_a_clear_unless_it_is_forced() -> None:
    cache = Cache(pages=3)
    cache.put("a")
    assert cache.hold([b"a", b"missing"]) == 1
    for name in "bcdefg":
        assert cache.put(name) == [0]
    assert cache.clear() == 2
    assert cache.left("a") == "a"
    assert cache.delete([b"a"]) == 0
    assert cache.clear(force=True) == 1


def test_deletion_spares_what_is_pinned_and_passes_over_what_is_not_there() -> None:
    cache = Cache()
    cache.put("abc")
    cache.pin("engine", 1, "s", "r", {0: [[b"a"]]})
    assert cache.delete([b"a", b"b", b"b", b"z"], force=True) == 1
    assert cache.left("abc") == "ac"


def test_what_is_demoted_goes_first_unless_it_is_used_again() -> None:
    cache = Cache(pages=4)
    for name in "abcd":
        cache.put(name)
    cache.demote([b"c", b"d", b"missing"])
    cache.touch([[b"c"]])
    cache.put("e")
    assert cache.left("abcde") == "abce"
    cache.put("f")
    assert cache.left("abcef") == "bcef", "after that the policy's order"


# ------------------------------------------------------------------------------------------- filling from below


def test_memory_that_is_being_filled_is_nobody_s_and_its_object_is_found_once_published() -> None:
    cache = Cache(pages=2)
    item = cache.take(b"a", PAGE, "x")
    assert item is not None
    assert b"a" not in cache
    assert cache.clear(force=True) == 0
    assert cache.put("bc") == [0, FULL]
    assert (cache.usage()["reserved_bytes"], cache.used()) == (PAGE, {"": 1, "x": 1})
    entry = cache.publish(item, loaded=True)
    assert cache.get(b"a") is entry
    assert cache.view.generation(entry.offset) == entry.generation
    assert (cache.counters.loaded, cache.counters.stored) == (1, 1)


def test_what_was_stored_meanwhile_stays_and_the_load_is_freed() -> None:
    cache = Cache(pages=2)
    item = cache.take(b"a", PAGE)
    assert item is not None
    cache.put("a")
    stored = cache.get(b"a")
    assert cache.publish(item) is stored
    assert cache.usage()["used_bytes"] == PAGE
    assert cache.put("a") == [EXISTS]


def test_a_load_that_fails_leaves_nothing_and_one_without_room_or_quota_gets_none() -> None:
    cache = Cache(pages=2)
    item = cache.take(b"a", 2 * PAGE)
    assert item is not None
    assert cache.take(b"b", PAGE) is None
    cache.give_back(item)
    assert cache.view.generation(0) == 0
    cache.set_quota("x", 0)
    assert cache.take(b"b", PAGE, "x") is None
    assert cache.usage()["used_bytes"] == 0


def test_a_transient_object_goes_with_its_last_pin() -> None:
    cache = Cache()
    item = cache.take(b"a", PAGE)
    assert item is not None
    entry = cache.publish(item, transient=True)
    cache.pin_entries([entry])
    cache.pin("engine", 1, "s", "r", {0: [[b"a"]]})
    cache.unpin_entries([entry])
    assert b"a" in cache
    cache.release("engine", 1)
    assert b"a" not in cache
    assert cache.usage()["used_bytes"] == 0
