"""What the L1 index promises about visibility, memory, leases and eviction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from helpers.local import pool_view
from lmcache.v1.storage.l1 import EXISTS, FULL, L1Cache
from lmcache.v1.storage.shm_pool import PAGE

OWNER = "engine"
LEASE_IDS = itertools.count(1000)


def key(name: str) -> bytes:
    return name.encode()


def keys(*names: str) -> list[bytes]:
    return [key(name) for name in names]


class Cache(L1Cache):
    """An L1 of ``pages`` pages, and short spellings; an object has one page unless the call says more."""

    def __init__(self, pages: int = 8, watermark: float | None = 1.0, evict_ratio: float = 0.0) -> None:
        self.view = pool_view(pages)
        super().__init__(self.view, watermark, evict_ratio)

    def put(self, *columns: Sequence[str], lease: int = 1, session: str = "s", pages: int = 1) -> int:
        """Reserve and commit all of it; how many were published."""
        slots = self.ask(*columns, lease=lease, session=session, pages=pages)
        return self.commit(session, lease, range(sum(o >= 0 for column in slots for o, _ in column)))

    def ask(
        self,
        *columns: Sequence[str],
        lease: int = 1,
        session: str = "s",
        pages: int = 1,
        mapped: bool = True,
    ) -> list[list[tuple[int, int]]]:
        wanted = [[(key(name), pages * PAGE) for name in column] for column in columns]
        return self.reserve(session, lease, wanted, mapped)

    def hold(
        self, *names: str, lease: int = 1, session: str = "s", request: str = "r", rank: int = 0
    ) -> None:
        self.pin(OWNER, lease, session, request, {rank: [keys(*names)]})

    def has(self, *names: str) -> bool:
        return self.prefix_length([[key(name)] for name in names]) == len(names)


# ------------------------------------------------------------------------------------------------- visibility


def test_an_object_is_not_found_before_its_commit() -> None:
    cache = Cache()
    cache.ask(["a"])
    assert not cache.has("a")
    with pytest.raises(KeyError):
        cache.hold("a")
    cache.commit("s", 1, [0])
    assert cache.has("a")


def test_what_a_commit_leaves_out_is_freed_and_never_found() -> None:
    cache = Cache()
    cache.ask(["a", "b", "c"])
    assert cache.commit("s", 1, [1]) == 1
    assert [cache.has(name) for name in "abc"] == [False, True, False]
    assert cache.usage()["used_bytes"] == PAGE


def test_of_two_writers_of_one_object_the_second_to_commit_changes_nothing() -> None:
    cache = Cache()
    (first,), (second,) = (cache.ask(["a"], lease=lease)[0] for lease in (1, 2))
    assert first[0] != second[0]
    assert cache.commit("s", 2, [0]) == 1
    assert cache.commit("s", 1, [0]) == 0
    cache.hold("a")
    assert [(e.offset, e.generation) for e in cache.read_share(OWNER, 1, 0)] == [second]
    assert (cache.counters.stored, cache.counters.duplicates) == (1, 1)


def test_a_prefix_ends_at_the_first_chunk_that_a_rank_or_group_lacks() -> None:
    cache = Cache()
    cache.put(["a0", "a1", "a2"], ["b0", "b2"])
    assert cache.prefix_length([keys("a0", "b0"), keys("a1", "b1"), keys("a2", "b2")]) == 1
    assert cache.prefix_length([]) == 0


# ----------------------------------------------------------------------------------------------------- leases


def test_a_write_lease_given_back_before_its_request_arrives_is_refused() -> None:
    cache = Cache()
    cache.abort("s", 1)
    with pytest.raises(KeyError):
        cache.ask(["a"])
    assert cache.usage()["used_bytes"] == 0


def test_a_read_lease_given_back_before_its_request_arrives_is_refused() -> None:
    cache = Cache()
    cache.put(["a"])
    cache.release(OWNER, 7)
    with pytest.raises(KeyError):
        cache.hold("a", lease=7)
    assert cache.usage()["pinned_objects"] == 0


def test_giving_back_twice_frees_nobody_else_s_pin() -> None:
    cache = Cache()
    cache.put(["a"])
    cache.hold("a", lease=1)
    cache.hold("a", lease=2)
    for _ in range(2):
        cache.release(OWNER, 1)
        cache.release(OWNER, 1, rank=0)
    assert cache.clear() == 0
    cache.release(OWNER, 2)
    assert cache.clear() == 1


def test_a_lease_ends_with_its_last_rank_s_share() -> None:
    cache = Cache()
    cache.put(["a", "b"])
    cache.pin(OWNER, 1, "s", "r", {0: [keys("a")], 1: [keys("b")]})
    cache.release(OWNER, 1, rank=0)
    assert (cache.usage()["read_leases"], cache.usage()["pinned_objects"]) == (1, 1)
    cache.release(OWNER, 1, rank=0)
    cache.release(OWNER, 1, rank=1)
    assert (cache.usage()["read_leases"], cache.usage()["pinned_objects"]) == (0, 0)


def test_a_lease_is_its_owner_s_alone() -> None:
    cache = Cache()
    cache.put(["a"])
    cache.hold("a", lease=1)
    cache.release("another engine", 1)
    cache.drop_request("another engine", "r")
    cache.drop_rank("another engine", 0)
    cache.drop_session("another session", dead=True)
    assert cache.usage()["pinned_objects"] == 1
    cache.ask(["b"], lease=2)
    cache.abort("another session", 2)
    assert cache.usage()["write_leases"] == 1


def test_memory_that_a_silent_process_may_still_write_to_stays_its_own() -> None:
    cache = Cache()
    mapped, frames = (cache.ask([name], lease=i, mapped=i == 0)[0][0] for i, name in enumerate("ab"))
    cache.drop_session("s", dead=False)
    assert cache.view.generation(mapped[0]) == mapped[1]
    assert cache.view.generation(frames[0]) == 0
    assert cache.usage()["used_bytes"] == PAGE
    cache.drop_session("s", dead=True)
    assert cache.usage()["used_bytes"] == 0


def test_a_dead_rank_s_shares_are_released_and_the_others_stay() -> None:
    cache = Cache()
    cache.put(["a", "b"])
    for lease in (1, 2):
        cache.pin(OWNER, lease, "s", "r", {0: [keys("a")], 1: [keys("b")]})
    cache.drop_rank(OWNER, 1)
    assert cache.clear() == 1
    assert cache.has("a")


def test_the_end_of_a_request_releases_all_its_leases_and_no_other_s() -> None:
    cache = Cache()
    cache.put(["a", "b"])
    cache.hold("a", lease=1, request="r")
    cache.hold("a", lease=2, request="r")
    cache.hold("b", lease=3, request="q")
    cache.drop_request(OWNER, "r")
    assert cache.usage()["read_leases"] == 1
    assert cache.clear() == 1
    assert cache.has("b")


# --------------------------------------------------------------------------------------------------- eviction


def fill(cache: Cache, *names: str) -> None:
    """Store each by itself, in this order."""
    for name in names:
        assert cache.put([name], lease=next(LEASE_IDS)) == 1


def survivors(cache: Cache, *names: str) -> str:
    return "".join(name for name in names if cache.has(name))


def test_a_full_pool_evicts_what_was_used_least_recently() -> None:
    cache = Cache(pages=3)
    fill(cache, *"abc")
    cache.hold("a")
    cache.release(OWNER, 1)
    fill(cache, "d")
    assert survivors(cache, *"abcd") == "acd"


def test_of_a_prefix_the_later_chunks_go_first_in_every_group() -> None:
    cache = Cache(pages=6)
    cache.put(["a0", "a1", "a2"], ["b0", "b1", "b2"])
    rows = [keys(f"a{i}", f"b{i}") for i in range(3)]
    assert cache.prefix_length(rows) == 3
    for left in (2, 1, 0):
        cache.put([f"x{left}", f"y{left}"], lease=10 + left)
        assert cache.prefix_length(rows) == left


def test_a_lookup_puts_the_later_chunks_of_a_prefix_first_in_line_again() -> None:
    cache = Cache(pages=7)
    fill(cache, "a0", "a1", "a2", "b0", "b1", "b2")
    rows = [keys(f"a{i}", f"b{i}") for i in range(3)]
    cache.pin(OWNER, 1, "s", "r", {0: [keys("a0", "a1", "a2")], 1: [keys("b0", "b1", "b2")]})
    cache.release(OWNER, 1)
    fill(cache, "old")
    cache.touch([keys("a0", "a1", "a2"), keys("b0", "b1", "b2")])
    cache.put(["n0", "n1", "n2"], lease=20)
    assert not cache.has("old")
    assert cache.prefix_length(rows) == 2


def test_storing_what_is_stored_already_counts_as_a_use() -> None:
    cache = Cache(pages=3)
    fill(cache, *"abc")
    assert cache.ask(["a", "b"], lease=5)[0] == [(EXISTS, 0), (EXISTS, 0)]
    fill(cache, "d")
    assert survivors(cache, *"abcd") == "abd"
    cache.put(["e"], lease=6)
    assert survivors(cache, *"abde") == "ade", "of the two the later chunk goes first"


def test_a_pool_full_of_pins_refuses_many_chunks_as_fast_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(pages=8)
    fill(cache, *"abcdefgh")
    cache.hold(*"abcdefgh")
    tries: list[int] = []
    allocate = cache._allocate

    def counted(size: int, account: str = "") -> int | None:
        tries.append(size)
        return allocate(size, account)

    monkeypatch.setattr(cache, "_allocate", counted)
    slots = cache.ask([f"new{i}" for i in range(1000)], lease=next(LEASE_IDS))
    assert slots == [[(FULL, 0)] * 1000]
    assert len(tries) == 1, "each try looks at every pin"


def test_what_is_pinned_or_reserved_outlives_any_burst() -> None:
    cache = Cache(pages=4)
    fill(cache, "pinned")
    cache.hold("pinned")
    (slot,) = cache.ask(["reserved"], lease=2)[0]
    for i in range(50):
        cache.put([f"x{i}"], lease=100 + i)
    assert cache.has("pinned")
    assert cache.view.generation(slot[0]) == slot[1]
    assert cache.commit("s", 2, [0]) == 1


def test_a_pool_full_of_pins_drops_what_is_new_and_says_so() -> None:
    cache = Cache(pages=2)
    fill(cache, *"ab")
    cache.hold("a", "b")
    assert cache.ask(["c"], lease=5)[0] == [(FULL, 0)]
    assert survivors(cache, *"abc") == "ab"
    assert cache.counters.dropped_full == 1


def test_without_eviction_a_full_pool_drops_what_is_new() -> None:
    cache = Cache(pages=2, watermark=None)
    fill(cache, *"ab")
    assert cache.ask(["c"], lease=5)[0] == [(FULL, 0)]
    assert (survivors(cache, *"abc"), cache.counters.evicted) == ("ab", 0)


def test_an_object_larger_than_the_pool_costs_nobody_else_its_place() -> None:
    cache = Cache(pages=4)
    fill(cache, *"abcd")
    assert cache.ask(["huge"], lease=5, pages=5)[0] == [(FULL, 0)]
    assert survivors(cache, *"abcd") == "abcd"


def test_above_the_watermark_an_eviction_frees_the_ratio_at_once() -> None:
    cache = Cache(pages=10, watermark=0.8, evict_ratio=0.3)
    fill(cache, *"abcdefgh")
    assert (cache.counters.evicted, cache.usage()["used_bytes"]) == (0, 8 * PAGE)
    fill(cache, "i")
    assert survivors(cache, *"abcdefghi") == "efghi"
    assert cache.usage()["used_bytes"] == 5 * PAGE
    fill(cache, "j", "k", "l")
    assert cache.counters.evicted == 4


def test_only_what_made_room_counts_as_evicted() -> None:
    cache = Cache(pages=4)
    fill(cache, *"abcd")
    assert cache.delete([key("a")]) == 1
    item = cache.take(key("e"), PAGE)
    assert item is not None
    read_once = cache.publish(item, transient=True)
    cache.pin_entries([read_once])
    cache.unpin_entries([read_once])
    assert (survivors(cache, *"abcde"), cache.counters.evicted) == ("bcd", 0)
    fill(cache, "f", "g")
    assert cache.clear() == 4
    assert cache.counters.evicted == 1


def test_eviction_goes_on_until_a_range_is_long_enough() -> None:
    cache = Cache(pages=4)
    fill(cache, *"abcd")
    cache.hold("b")  # in the middle: the free ranges beside it do not join
    assert cache.ask(["long"], lease=5, pages=2)[0][0][0] == 2 * PAGE
    assert survivors(cache, *"abcd") == "b"


def test_a_freed_object_s_generation_is_never_seen_again() -> None:
    cache, seen = Cache(pages=1), set[int]()
    for i in range(200):
        ((_, generation),) = cache.ask(["a"], lease=i)[0]
        cache.abort("s", i)
        assert cache.view.generation(0) == 0
        seen.add(generation)
    assert len(seen) == 200


def test_clearing_drops_all_but_what_is_pinned() -> None:
    cache = Cache()
    fill(cache, *"abc")
    cache.hold("b")
    assert cache.clear() == 2
    assert survivors(cache, *"abc") == "b"
