"""What each eviction policy of our own promises: against plain references, and over random histories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.policies import ARC, BUILT_IN, LFU, S3FIFO
from lmcache.v1.storage.simulation import hits_by_access

NAMES = [name for name in BUILT_IN if name != "noop"]


def key(i: int) -> bytes:
    return i.to_bytes(2, "big")


TRACES = st.lists(st.integers(0, 11).map(key), max_size=120)
SIZES = st.integers(1, 8)


# ---- plain references: an object per access, lists, and nothing clever


class Plain:
    """A cache of ``size`` keys that takes in every key it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, trace: list[bytes]) -> int:
        return sum(self.access(key) for key in trace)

    def access(self, key: bytes) -> bool:
        raise NotImplementedError


class Ranked(Plain):
    """Evicts the key with the least of what ``rank`` makes of (came, last used, uses)."""

    rank: Callable[[int, int, int], Any]

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.held: dict[bytes, tuple[int, int, int]] = {}
        self.clock = itertools.count()

    def access(self, key: bytes) -> bool:
        now = next(self.clock)
        hit = key in self.held
        if not hit and len(self.held) == self.size:
            del self.held[min(self.held, key=lambda k: type(self).rank(*self.held[k]))]
        came, _, uses = self.held.get(key, (now, now, 0))
        self.held[key] = (came, now, uses + 1)
        return hit


class PlainLRU(Ranked):
    rank = staticmethod(lambda came, used, uses: used)


class PlainFIFO(Ranked):
    rank = staticmethod(lambda came, used, uses: came)


class PlainLFU(Ranked):
    rank = staticmethod(lambda came, used, uses: (uses, used))


class PlainARC(Plain):
    """The paper's lists, the oldest in front; room is made before a ghost's return is taken note of."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    def access(self, key: bytes) -> bool:
        for top in (self.t1, self.t2):
            if key in top:
                top.remove(key)
                self.t2.append(key)
                return True
        if len(self.t1) + len(self.t2) == self.size:
            first = self.t1 and (len(self.t1) > self.p or not self.t2)
            top, bottom = (self.t1, self.b1) if first else (self.t2, self.b2)
            bottom.append(top.pop(0))
            self.trim()
        b1, b2 = len(self.b1), len(self.b2)
        if key in self.b1:
            self.p = min(self.size, self.p + max(1, b2 / b1))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, b1 / b2))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        self.trim()
        return False

    def trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.size:
            self.b1.pop(0)
        while self.b2 and sum(map(len, (self.t1, self.t2, self.b1, self.b2))) > 2 * self.size:
            self.b2.pop(0)


class PlainS3FIFO(Plain):
    """The paper's algorithm 1, the oldest in front."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghost: list[bytes] = []
        self.uses: dict[bytes, int] = {}

    def access(self, key: bytes) -> bool:
        if key in self.small or key in self.main:
            self.uses[key] = min(3, self.uses[key] + 1)
            return True
        while len(self.small) + len(self.main) >= self.size:
            self.evict()
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0
        return False

    def evict(self) -> None:
        """One step: it may only move a key."""
        if self.small and (len(self.small) >= max(1, self.size // 10) or not self.main):
            key = self.small.pop(0)
            if self.uses[key] > 1:
                self.uses[key] = 0
                self.main.append(key)
                return
            self.ghost.append(key)
        else:
            key = self.main.pop(0)
            if self.uses[key] > 0:
                self.uses[key] -= 1
                self.main.append(key)
                return
        most = self.size - max(1, self.size // 10)
        self.ghost = self.ghost[max(0, len(self.ghost) - most) :]


REFERENCES: dict[str, type[Plain]] = {
    "LRU": PlainLRU,
    "LFU": PlainLFU,
    "FIFO": PlainFIFO,
    "ARC": PlainARC,
    "S3-FIFO": PlainS3FIFO,
}


@pytest.mark.parametrize("name", NAMES)
@given(trace=TRACES, size=SIZES)
def test_a_policy_evicts_what_its_plain_reference_evicts(name: str, trace: list[bytes], size: int) -> None:
    for end in range(len(trace), max(0, len(trace) - 3), -1):
        part = trace[:end]
        assert hits_by_access(BUILT_IN[name](), [part], size) == REFERENCES[name](size).run(part)


@pytest.mark.parametrize("name", ["ARC", "S3-FIFO"])
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32), size=st.integers(20, 60))
def test_a_policy_agrees_with_its_reference_where_its_shares_are_more_than_one(
    name: str, seed: int, size: int
) -> None:
    chance = random.Random(seed)
    trace = [key(min(int(chance.paretovariate(0.6)), 400)) for _ in range(1200)]
    assert hits_by_access(BUILT_IN[name](), [trace], size) == REFERENCES[name](size).run(trace)


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32), size=st.integers(10, 40))
def test_arc_learns_as_fast_as_its_plain_reference(seed: int, size: int) -> None:
    chance = random.Random(seed)
    policy, plain = ARC(), PlainARC(size)
    trace: list[bytes] = []
    for _ in range(20):  # by turns what favours the often used and what favours the recent
        trace += [key(min(int(chance.paretovariate(0.6)), 400)) for _ in range(60)]
        trace += [key(1000 + i) for i in range(chance.randrange(2 * size))] * 2
    assert hits_by_access(policy, [trace], size) == plain.run(trace)
    assert policy._target == pytest.approx(plain.p)
    assert policy.ghosts == len(plain.b1) + len(plain.b2)


# ---- any history


class History(RuleBasedStateMachine):
    """What L1 may do with a policy, to two of a kind: one is asked for no more than is evicted, one for all."""

    @initialize(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        self.one, self.other = BUILT_IN[name](), BUILT_IN[name]()
        self.held: set[bytes] = set()
        self.most = 0

    @rule(keys=st.lists(st.integers(0, 15).map(key), min_size=1, max_size=6, unique=True))
    def publish(self, keys: list[bytes]) -> None:
        for k in keys:
            if k not in self.held:
                self.one.add(k, 1)
                self.other.add(k, 1)
                self.held.add(k)
        self.most = max(self.most, len(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=8))
        self.one.touch(keys)
        self.other.touch(keys)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def arrange(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.one.arrange(keys)
        self.other.arrange(keys)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 5))
    def evict(self, data: st.DataObject, count: int) -> None:
        pinned = data.draw(st.sets(st.sampled_from(sorted(self.held))))
        unpinned = (k for k in self.one.victims() if k not in pinned)
        going = list(itertools.islice(unpinned, count))
        assert [k for k in self.other.victims() if k not in pinned][:count] == going
        self.drop(going)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.drop(sorted(data.draw(st.sets(st.sampled_from(sorted(self.held))))))

    def drop(self, keys: list[bytes]) -> None:
        for k in keys:
            self.one.remove(k)
            self.other.remove(k)
            self.held.remove(k)

    @invariant()
    def each_held_key_is_named_once_and_asking_changes_nothing(self) -> None:
        named = list(self.other.victims())
        assert sorted(named) == sorted(self.held)
        assert list(self.other.victims()) == named
        assert list(self.one.victims()) == named

    @invariant()
    def ghosts_are_bounded(self) -> None:
        if isinstance(self.one, ARC | S3FIFO):
            assert self.one.ghosts <= 2 * self.most


History.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
test_over_any_history_a_policy_names_every_held_key_once = History.TestCase


class Counted(bytes):
    """A key that counts how often anybody looks it up."""

    lookups = 0

    def __hash__(self) -> int:
        Counted.lookups += 1
        return super().__hash__()


def work(policy: EvictionPolicy, size: int) -> Iterator[int]:
    """Lookups of each call once ``size`` keys are held; of victims as far as the first one."""
    keys = [Counted(i.to_bytes(4, "big")) for i in range(size + 400)]
    calls: list[Callable[[], object]] = []
    for k in keys[:size]:
        policy.add(k, 1)
    for i in range(400):
        again, new = keys[(i * 7) % size], keys[size + i]
        calls.append(lambda again=again: policy.touch([again] if again in held else []))
        calls.append(lambda: policy.remove(gone := next(iter(policy.victims()))) or held.discard(gone))
        calls.append(lambda new=new: policy.add(new, 1) or held.add(new))
    held = set(keys[:size])
    for call in calls:
        before = Counted.lookups
        call()
        yield Counted.lookups - before


@pytest.mark.parametrize("name", NAMES)
def test_a_call_costs_no_more_when_more_is_held(name: str) -> None:
    few, many = (sum(work(BUILT_IN[name](), size)) for size in (200, 20_000))
    assert many <= few + 1200


# ---- what tells them apart


def filled(policy: EvictionPolicy, count: int) -> EvictionPolicy:
    for i in range(count):
        policy.add(key(i), 1)
    return policy


def test_noop_names_nothing() -> None:
    policy = filled(BUILT_IN["noop"](), 3)
    policy.touch([key(0)])
    policy.remove(key(0))
    assert list(policy.victims()) == []


def test_lfu_counts_uses_and_takes_the_least_recent_of_equals() -> None:
    policy = filled(LFU(), 4)
    policy.touch([key(1), key(0), key(1)])
    assert list(policy.victims()) == [key(2), key(3), key(0), key(1)]


@pytest.mark.parametrize("name", ["ARC", "LFU", "S3-FIFO"])
def test_the_end_of_its_request_is_no_use_of_an_object(name: str) -> None:
    policy = BUILT_IN[name]()
    often, once = [key(i) for i in range(5)], [key(i) for i in range(10, 15)]
    for keys in (often, once):
        for k in reversed(keys):
            policy.add(k, 1)
        policy.arrange(keys)
        policy.arrange(keys)
    policy.touch(often)
    policy.touch(often)
    policy.arrange(once)
    assert set(itertools.islice(policy.victims(), 5)) == set(once)


@pytest.mark.parametrize("name", ["LRU", "ARC", "LFU"])
def test_the_end_of_its_request_puts_objects_in_order(name: str) -> None:
    policy = filled(BUILT_IN[name](), 4)
    policy.arrange([key(3), key(1), key(0)])
    assert list(policy.victims()) == [key(2), key(3), key(1), key(0)]


@pytest.mark.parametrize(
    ("name", "survive"), [("ARC", 10), ("S3-FIFO", 10), ("LFU", 10), ("LRU", 0), ("FIFO", 0)]
)
def test_a_scan_drives_out_what_is_used_often_or_does_not(name: str, survive: int) -> None:
    policy = BUILT_IN[name]()
    often, scan = [key(i) for i in range(10)], [key(i) for i in range(100, 200)]
    hits_by_access(policy, [often * 3, scan], 20)
    assert len(set(policy.victims()) & set(often)) == survive


def test_what_arc_evicted_too_early_returns_among_the_often_used() -> None:
    policy = filled(ARC(), 4)
    policy.touch([key(3)])
    assert next(iter(policy.victims())) == key(0)
    policy.remove(key(0))
    policy.add(key(0), 1)
    assert list(policy.victims()) == [key(1), key(3), key(0), key(2)]


def test_what_s3_fifo_evicted_too_early_returns_to_the_main_queue() -> None:
    policy = filled(S3FIFO(), 4)
    policy.touch([key(1), key(1)])
    for gone in (key(0), key(2)):
        assert next(iter(policy.victims())) == gone
        policy.remove(gone)
    policy.add(key(2), 1)
    policy.add(key(4), 1)
    assert list(policy.victims()) == [key(3), key(4), key(1), key(2)]
