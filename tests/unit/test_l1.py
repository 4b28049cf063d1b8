"""What the L1 index promises about visibility, memory, leases and eviction."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.v1.storage.l1 import EXISTS, FULL, L1Cache
from lmcache.v1.storage.shm_pool import PAGE, PoolView, table_bytes

OWNER = "engine"
LEASE_IDS = itertools.count(1000)


def pool_view(pages: int) -> PoolView:
    """A pool of ``pages`` pages that nobody else maps."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, table_bytes(pages * PAGE) + pages * PAGE)
        return PoolView(fd, pages * PAGE)
    finally:
        os.close(fd)


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


# ------------------------------------------------------------------------------------------- random histories

NAMES = [f"k{i}" for i in range(10)]
PAGES_OF = {name: 1 + i % 3 for i, name in enumerate(NAMES)}
SESSIONS = ["s0", "s1"]
LEASES = st.integers(0, 15)
POOL_PAGES = 12


@dataclass
class Write:
    session: str
    mapped: bool
    items: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(name, offset, generation, depth) of what was granted."""


@dataclass
class Read:
    session: str
    request: str
    shares: dict[int, list[str]]


class L1History(RuleBasedStateMachine):
    """Random histories against a model: an order of use, pins, leases, and which bytes lie where."""

    @initialize(policy=st.sampled_from([(None, 0.0), (1.0, 0.0), (0.95, 0.05), (0.6, 0.3)]))
    def start(self, policy: tuple[float | None, float]) -> None:
        self.evicts = policy[0] is not None
        self.view = pool_view(POOL_PAGES)
        self.cache = L1Cache(self.view, *policy)
        self.used: list[str] = []
        """Published, the one used least recently first."""
        self.places: dict[str, tuple[int, int]] = {}
        self.writes: dict[tuple[str, int], Write] = {}
        self.reads: dict[tuple[str, int], Read] = {}
        self.gone: set[tuple[str, int]] = set()

    # ---- the model

    def pins(self) -> Counter[str]:
        return Counter(
            name for read in self.reads.values() for share in read.shares.values() for name in share
        )

    def touch(self, columns: Sequence[Sequence[str]]) -> None:
        for depth in reversed(range(max(map(len, columns), default=0))):
            for column in columns:
                if depth < len(column) and column[depth] in self.used:
                    self.used.remove(column[depth])
                    self.used.append(column[depth])

    def forget_evicted(self) -> list[str]:
        """Take out of the model what the cache no longer has: the oldest that are not pinned, no others."""
        pins = self.pins()
        left = [name for name in self.used if self.cache.prefix_length([[key(name)]])]
        gone = [name for name in self.used if name not in left]
        candidates = [name for name in self.used if not pins[name]]
        assert gone == candidates[: len(gone)]
        assert self.evicts or not gone
        for name in gone:
            del self.places[name]
        self.used = left
        return gone

    def paint(self, name: str, offset: int) -> None:
        """Write ``name`` all over its memory, as its owner would."""
        size = PAGES_OF[name] * PAGE
        self.view.data[offset : offset + size] = name.encode().ljust(8) * (size // 8)

    # ---- writing

    @rule(
        session=st.sampled_from(SESSIONS),
        lease=LEASES,
        columns=st.lists(st.lists(st.sampled_from(NAMES), max_size=4, unique=True), min_size=1, max_size=2),
        mapped=st.booleans(),
    )
    def reserve(self, session: str, lease: int, columns: list[list[str]], mapped: bool) -> None:
        wanted = [[(key(name), PAGES_OF[name] * PAGE - 1) for name in column] for column in columns]
        if (session, lease) in self.gone or (session, lease) in self.writes:
            with pytest.raises(KeyError):
                self.cache.reserve(session, lease, wanted, mapped)
            return
        self.touch(columns)
        existed = set(self.used)
        slots = self.cache.reserve(session, lease, wanted, mapped)
        assert [len(column) for column in slots] == [len(column) for column in columns]
        evicted = set(self.forget_evicted())
        write = self.writes[session, lease] = Write(session, mapped)
        for column, out in zip(columns, slots, strict=True):
            for depth, (name, (offset, generation)) in enumerate(zip(column, out, strict=True)):
                if offset == EXISTS:
                    assert name in existed
                elif offset == FULL:
                    assert not self.evicts or self.pins().keys() >= set(self.used), (
                        "what may be evicted was not"
                    )
                else:
                    assert name not in existed - evicted
                    write.items.append((name, offset, generation, depth))
                    self.paint(name, offset)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    def store(self, names: list[str]) -> None:
        lease = next(LEASE_IDS)
        self.reserve("s0", lease, [names], True)
        self.finish(("s0", lease), set(range(len(self.writes["s0", lease].items))))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        owner_lease = data.draw(st.sampled_from(sorted(self.writes)))
        items = self.writes[owner_lease].items
        chosen = data.draw(st.sets(st.integers(0, len(items) - 1))) if items else set()
        with pytest.raises(IndexError):
            self.cache.commit(*owner_lease, [*chosen, len(items)])
        with pytest.raises(IndexError):
            self.cache.commit(*owner_lease, [*chosen, -1])
        self.finish(owner_lease, chosen)

    def finish(self, owner_lease: tuple[str, int], chosen: set[int]) -> None:
        items = self.writes[owner_lease].items
        del self.writes[owner_lease]
        self.gone.add(owner_lease)
        published = 0
        deepest_first = sorted(range(len(items)), key=lambda i: -items[i][3])
        for i in deepest_first:
            name, offset, generation, _ = items[i]
            if i in chosen and name not in self.used:
                self.used.append(name)
                self.places[name] = (offset, generation)
                published += 1
        assert self.cache.commit(*owner_lease, sorted(chosen)) == published
        with pytest.raises(KeyError):
            self.cache.commit(*owner_lease, [])

    @rule(session=st.sampled_from(SESSIONS), lease=LEASES)
    def abort(self, session: str, lease: int) -> None:
        self.cache.abort(session, lease)
        self.writes.pop((session, lease), None)
        self.gone.add((session, lease))

    # ---- reading

    @rule(lease=LEASES, session=st.sampled_from(SESSIONS), request=st.sampled_from("ab"), data=st.data())
    def pin(self, lease: int, session: str, request: str, data: st.DataObject) -> None:
        column = st.lists(st.sampled_from(self.used or [""]), max_size=3 if self.used else 0)
        held = data.draw(
            st.dictionaries(st.integers(0, 2), st.lists(column, min_size=1, max_size=2), min_size=1)
        )
        wanted = {rank: [keys(*names) for names in mine] for rank, mine in held.items()}
        if (OWNER, lease) in self.gone or (OWNER, lease) in self.reads:
            with pytest.raises(KeyError):
                self.cache.pin(OWNER, lease, session, request, wanted)
            return
        entries = self.cache.pin(OWNER, lease, session, request, wanted)
        self.touch([names for mine in held.values() for names in mine])
        shares = {rank: [name for names in mine for name in names] for rank, mine in held.items()}
        self.reads[OWNER, lease] = Read(session, request, shares)
        for rank, mine in held.items():
            for names, found in zip(mine, entries[rank], strict=True):
                assert [(e.offset, e.generation) for e in found] == [self.places[name] for name in names]

    @rule(lease=LEASES, rank=st.none() | st.integers(0, 3))
    def release(self, lease: int, rank: int | None) -> None:
        self.cache.release(OWNER, lease, rank)
        self.released(lease, rank)

    def released(self, lease: int, rank: int | None) -> None:
        read = self.reads.get((OWNER, lease))
        if read is None:
            if rank is None:
                self.gone.add((OWNER, lease))
            return
        for r in list(read.shares) if rank is None else [rank]:
            read.shares.pop(r, None)
        if not read.shares:
            del self.reads[OWNER, lease]
            self.gone.add((OWNER, lease))

    @rule(lease=LEASES, rank=st.integers(0, 2))
    def read_share(self, lease: int, rank: int) -> None:
        found = [entry.key for entry in self.cache.read_share(OWNER, lease, rank)]
        read = self.reads.get((OWNER, lease))
        assert found == (keys(*read.shares.get(rank, [])) if read else [])

    # ---- ends of owners

    @rule(data=st.data(), how=st.sampled_from(["session", "dead session", "rank", "request", "clear"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if "session" in how:
            self.end_session(data.draw(st.sampled_from(SESSIONS)), how.startswith("dead"))
        elif how == "rank":
            rank = data.draw(st.integers(0, 2))
            self.cache.drop_rank(OWNER, rank)
            self.release_where(lambda read: rank in read.shares, rank)
        elif how == "request":
            request = data.draw(st.sampled_from("ab"))
            self.cache.drop_request(OWNER, request)
            self.release_where(lambda read: read.request == request, None)
        else:
            self.clear()

    def release_where(self, condition: Callable[[Read], bool], rank: int | None) -> None:
        for (_, lease), read in list(self.reads.items()):
            if condition(read):
                self.released(lease, rank)

    def end_session(self, session: str, dead: bool) -> None:
        self.cache.drop_session(session, dead)
        self.release_where(lambda read: read.session == session, None)
        for owner_lease, write in list(self.writes.items()):
            if write.session == session and (dead or not write.mapped):
                del self.writes[owner_lease]
                self.gone.add(owner_lease)

    def clear(self) -> None:
        pins = self.pins()
        dropped = [name for name in self.used if not pins[name]]
        assert self.cache.clear() == len(dropped)
        for name in dropped:
            del self.places[name]
        self.used = [name for name in self.used if pins[name]]

    # ---- what holds at all times

    @invariant()
    def exactly_what_was_committed_is_found(self) -> None:
        for name in NAMES:
            assert bool(self.cache.prefix_length([[key(name)]])) == (name in self.used), name

    @invariant()
    def memory_belongs_to_one_object_or_reservation_and_nothing_leaks(self) -> None:
        ranges = [(offset, generation, name) for name, (offset, generation) in self.places.items()]
        for write in self.writes.values():
            ranges += [(offset, generation, name) for name, offset, generation, _ in write.items]
        at, words = 0, [0] * POOL_PAGES
        for offset, generation, name in sorted(ranges):
            assert offset >= at, "two ranges overlap"
            at = offset + PAGES_OF[name] * PAGE
            words[offset // PAGE] = generation
            assert generation
            for page in range(offset, at, PAGE):
                assert bytes(self.view.data[page : page + 8]) == name.encode().ljust(8)
                assert bytes(self.view.data[page + PAGE - 8 : page + PAGE]) == name.encode().ljust(8)
        assert at <= POOL_PAGES * PAGE
        assert self.view.generations.tolist() == words, (
            "a word is 0 where nothing lives, and an object's otherwise"
        )
        usage = self.cache.usage()
        assert usage["used_bytes"] == sum(PAGES_OF[name] for _, _, name in ranges) * PAGE
        assert usage["objects"] == len(self.used)
        assert usage["pinned_objects"] == len(+self.pins())
        assert usage["read_leases"] == len(self.reads)
        assert usage["write_leases"] == len(self.writes)

    def teardown(self) -> None:
        for session in SESSIONS:
            self.cache.drop_session(session, dead=True)
        self.cache.clear()
        usage = self.cache.usage()
        del usage["capacity_bytes"]
        assert not any(usage.values()), usage


TestL1History = L1History.TestCase
TestL1History.settings = settings(max_examples=100, stateful_step_count=50, report_multiple_bugs=False)


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

    def counted(size: int) -> int | None:
        tries.append(size)
        return allocate(size)

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
