"""What the allocator promises: ranges never overlap, nothing is lost, and neighbours grow together again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.v1.memory.range_allocator import RangeAllocator

UNIT = 64


class AllocatorHistory(RuleBasedStateMachine):
    """Random histories against a plain map of what is allocated."""

    @initialize(units=st.integers(1, 24), spare=st.integers(0, UNIT - 1))
    def start(self, units: int, spare: int) -> None:
        self.allocator = RangeAllocator(units * UNIT + spare, UNIT)
        self.capacity = units * UNIT
        self.live = {}

    def gaps(self) -> list[tuple[int, int]]:
        """(size, offset) of every maximal free range."""
        found, at = [], 0
        for offset, size in [*sorted(self.live.items()), (self.capacity, 0)]:
            if offset > at:
                found.append((offset - at, at))
            at = offset + size
        return sorted(found)

    @rule(size=st.integers(1, 12 * UNIT))
    def allocate(self, size: int) -> None:
        need = -(-size // UNIT) * UNIT
        fitting = [gap for gap in self.gaps() if gap[0] >= need]
        offset = self.allocator.allocate(size)
        if not fitting:
            assert offset is None
            return
        assert offset == fitting[0][1], "expected the smallest range that fits, and the first of these"
        self.live[offset] = need

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.allocator.free(offset)
        del self.live[offset]
        with pytest.raises(ValueError, match="no allocated range"):
            self.allocator.free(offset)

    @rule(offset=st.integers(-UNIT, 55 * UNIT))
    def free_what_was_never_given(self, offset: int) -> None:
        if offset not in self.live:
            with pytest.raises(ValueError, match="no allocated range"):
                self.allocator.free(offset)

    @precondition(lambda self: self.capacity < 48 * UNIT)
    @rule(units=st.integers(1, 6))
    def grow(self, units: int) -> None:
        self.allocator.grow(units * UNIT)
        self.capacity += units * UNIT
        assert self.allocator.capacity == self.capacity

    @rule(size=st.integers(-3, 0))
    def ask_for_nothing(self, size: int) -> None:
        with pytest.raises(ValueError, match="positive"):
            self.allocator.allocate(size)

    @invariant()
    def nothing_overlaps_and_every_byte_is_accounted_for(self) -> None:
        at = 0
        for offset, size in sorted(self.live.items()):
            assert offset >= at
            assert offset % UNIT == 0
            at = offset + size
        assert at <= self.capacity
        assert self.allocator.used == sum(self.live.values())
        assert self.allocator.largest_free == max(self.gaps(), default=(0, 0))[0]
        assert self.allocator.tail_free == self.capacity - at

    def teardown(self) -> None:
        for offset in self.live:
            self.allocator.free(offset)
        assert self.allocator.allocate(self.capacity) == 0, "all freed neighbours are one range again"


TestAllocatorHistory = AllocatorHistory.TestCase
TestAllocatorHistory.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.permutations(range(8)))
def test_ranges_freed_in_any_order_grow_together_to_the_whole(order: list[int]) -> None:
    allocator = RangeAllocator(8 * UNIT, UNIT)
    offsets = [allocator.allocate(UNIT) for _ in order]
    assert allocator.allocate(1) is None
    for i in order:
        allocator.free(offsets[i] or 0)
    assert (allocator.used, allocator.largest_free) == (0, 8 * UNIT)


@pytest.mark.parametrize(("size", "rounded"), [(1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT)])
def test_a_size_is_rounded_up_to_the_alignment(size: int, rounded: int) -> None:
    allocator = RangeAllocator(8 * UNIT, UNIT)
    allocator.allocate(size)
    assert allocator.used == allocator.rounded(size) == rounded


def test_a_free_range_of_exactly_the_size_is_taken_before_a_longer_one() -> None:
    allocator = RangeAllocator(8 * UNIT, UNIT)
    first, _, third, _ = (allocator.allocate(n * UNIT) for n in (3, 1, 2, 1))
    allocator.free(first or 0)
    allocator.free(third or 0)
    assert allocator.allocate(2 * UNIT) == third


@pytest.mark.parametrize("alignment", [0, -1, 3, 4097])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        RangeAllocator(1 << 20, alignment)


def test_an_arena_smaller_than_one_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one unit"):
        RangeAllocator(UNIT - 1, UNIT)


@pytest.mark.parametrize("nbytes", [0, -UNIT, UNIT + 1])
def test_an_arena_does_not_grow_by_parts_of_a_unit(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"growth by {nbytes} bytes: expected a positive multiple of {UNIT}"):
        RangeAllocator(UNIT, UNIT).grow(nbytes)
