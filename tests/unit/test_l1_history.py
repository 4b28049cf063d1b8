"""The L1 index over random histories, against a model: what is found, where it lies, who holds it, what goes first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.local import pool_view
from lmcache.v1.storage.l1 import EXISTS, FULL, L1Cache
from lmcache.v1.storage.shm_pool import PAGE

OWNER = "engine"
LEASE_IDS = itertools.count(1000)
NAMES = [f"k{i}" for i in range(10)]
PAGES_OF = {name: 1 + i % 3 for i, name in enumerate(NAMES)}
SESSIONS = ["s0", "s1"]
LEASES = st.integers(0, 15)
POOL_PAGES = 12


def key(name: str) -> bytes:
    return name.encode()


def keys(*names: str) -> list[bytes]:
    return [key(name) for name in names]


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
