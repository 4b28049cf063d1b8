"""Memory objects in use: who holds them, when their memory comes back, and that nobody else has it meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.v1.memory_management import (
    AdHocMemoryAllocator,
    BufferAllocator,
    HostMemoryAllocator,
    MemoryAllocator,
    MemoryFormat,
    MemoryObj,
    MixedMemoryAllocator,
    PagedTensorMemoryAllocator,
    PinMemoryAllocator,
    TensorMemoryAllocator,
    host_arena,
)

UNIT, PAGES = 64, 24
SIZE = UNIT * PAGES

KINDS: dict[str, Callable[[], Any]] = {
    "ranges": lambda: TensorMemoryAllocator(host_arena(SIZE), UNIT),
    "pages": lambda: PagedTensorMemoryAllocator(host_arena(SIZE), (UNIT,)),
    "host": lambda: HostMemoryAllocator(SIZE, UNIT),
    "pinned": lambda: PinMemoryAllocator(SIZE, align_bytes=UNIT),
    "pinned pages": lambda: PinMemoryAllocator(SIZE, True, (UNIT,), align_bytes=UNIT),
    "buffers": lambda: BufferAllocator(SIZE),
    "mixed": lambda: MixedMemoryAllocator(SIZE, align_bytes=UNIT),
}
each = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def filled(allocator: Any) -> list[MemoryObj]:
    """Objects until there is no room."""
    objs = [allocator.allocate((UNIT,)) for _ in range(PAGES)]
    assert None not in objs
    assert allocator.allocate((UNIT,)) is None
    return objs


# --- histories ---------------------------------------------------------------------------------------------


class Held:
    """What the model knows of an object: its bytes, its holders."""

    def __init__(self, obj: MemoryObj, mark: int, nbytes: int) -> None:
        self.obj, self.mark, self.nbytes, self.refs, self.pins = obj, mark, nbytes, 1, 0
        obj.byte_array[:] = bytes([mark]) * nbytes


class ObjectHistory(RuleBasedStateMachine):
    """Random histories of holders. Each object's bytes carry its own mark, so that sharing a byte shows."""

    make: Callable[[], MemoryAllocator]
    most = SIZE

    @initialize()
    def start(self) -> None:
        self.allocator = type(self).make()
        self.held: list[Held] = []
        self.mark = 0

    def taken(self, nbytes: int) -> int:
        return -(-nbytes // UNIT) * UNIT

    @rule(nbytes=st.integers(1, 5 * UNIT), count=st.integers(1, 3))
    def allocate(self, nbytes: int, count: int) -> None:
        nbytes = min(nbytes, self.most)
        before = self.allocator.used
        objs = self.allocator.batched_allocate((nbytes,), None, count)
        if objs is None:
            assert self.allocator.used == before, "a batch that does not fit takes nothing"
            largest, free = self.allocator.largest_free, SIZE - before
            assert count > 1 or largest is None or largest < nbytes or free < nbytes
            return
        assert len(objs) == count
        for obj in objs:
            self.mark = self.mark % 250 + 1
            assert (obj.get_ref_count(), obj.get_pin_count(), obj.get_size()) == (1, 0, nbytes)
            self.held.append(Held(obj, self.mark, nbytes))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), what=st.sampled_from(["up", "down", "pin", "unpin", "free", "drop"]))
    def hold_or_let_go(self, data: st.DataObject, what: str) -> None:
        held = data.draw(st.sampled_from(self.held))
        getattr(self, what)(held)
        if held in self.held and not held.refs and not held.pins:
            self.held.remove(held)
            self.is_gone(held.obj)

    def up(self, held: Held) -> None:
        held.obj.ref_count_up()
        held.refs += 1

    def down(self, held: Held) -> None:
        if held.refs:
            held.obj.ref_count_down()
            held.refs -= 1
            return
        with pytest.raises(ValueError, match="no reference is left"):
            held.obj.ref_count_down()

    def pin(self, held: Held) -> None:
        assert held.obj.pin()
        held.pins += 1

    def unpin(self, held: Held) -> None:
        if held.pins:
            assert held.obj.unpin()
            held.pins -= 1
            return
        with pytest.raises(ValueError, match="no pin is left"):
            held.obj.unpin()

    def free(self, held: Held) -> None:
        if held.refs == 1 and not held.pins:
            self.allocator.free(held.obj)
            held.refs = 0
            return
        with pytest.raises(ValueError, match="others hold it"):
            self.allocator.free(held.obj)

    def drop(self, held: Held) -> None:
        self.held.remove(held)
        del held.obj

    def is_gone(self, obj: MemoryObj) -> None:
        assert not obj.is_valid()
        for wrong in (obj.ref_count_up, obj.ref_count_down, obj.pin, obj.unpin, lambda: obj.byte_array):
            with pytest.raises(ValueError, match=r"given back|is left"):
                wrong()
        with pytest.raises(ValueError, match="it is free already"):
            self.allocator.free(obj)

    @invariant()
    def no_byte_is_shared_and_none_is_lost(self) -> None:
        for held in self.held:
            assert held.obj.byte_array == bytes([held.mark]) * held.nbytes
            assert (held.obj.get_ref_count(), held.obj.get_pin_count()) == (held.refs, held.pins)
            assert held.obj.can_evict == (held.refs == 1 and not held.pins)
        assert self.allocator.memcheck()
        assert self.allocator.live == len(self.held)
        assert self.allocator.used == sum(self.taken(held.nbytes) for held in self.held)

    def teardown(self) -> None:
        for held in self.held:
            del held.obj
        assert (self.allocator.used, self.allocator.live) == (0, 0)
        for obj in filled(self.allocator):
            obj.ref_count_down()
        self.allocator.close()


class RangesHistory(ObjectHistory):
    make = KINDS["ranges"]


class PagesHistory(ObjectHistory):
    make = KINDS["pages"]
    most = UNIT


class BuffersHistory(ObjectHistory):
    make = KINDS["buffers"]

    def taken(self, nbytes: int) -> int:
        return nbytes


TestRangesHistory = RangesHistory.TestCase
TestPagesHistory = PagesHistory.TestCase
TestBuffersHistory = BuffersHistory.TestCase
TestRangesHistory.settings = TestPagesHistory.settings = TestBuffersHistory.settings = settings(
    max_examples=30, stateful_step_count=30
)


# --- room --------------------------------------------------------------------------------------------------


@each
def test_a_full_allocator_answers_none_and_serves_again_once_something_is_released(
    make: Callable[[], Any],
) -> None:
    allocator = make()
    objs = filled(allocator)
    assert allocator.allocate((UNIT,)) is None
    assert allocator.batched_allocate((UNIT,), None, 2) is None
    objs[5].ref_count_down()
    assert allocator.batched_allocate((UNIT,), None, 2) is None, "a batch comes whole or not at all"
    again = allocator.allocate((UNIT,))
    assert again.byte_array.nbytes == UNIT
    assert allocator.memcheck()


@each
def test_memory_freed_in_any_order_is_all_there_again(make: Callable[[], Any]) -> None:
    allocator = make()
    for order in (slice(None), slice(None, None, -1)):
        allocator.batched_free(filled(allocator)[order])
        assert (allocator.used, allocator.live) == (0, 0)
    objs = filled(allocator)
    allocator.batched_free(objs[::2])
    allocator.batched_free(objs[1::2])
    allocator.batched_free(filled(allocator))


def test_neighbours_that_are_free_make_room_for_what_needs_both() -> None:
    allocator = KINDS["ranges"]()
    first, second, *_ = filled(allocator)
    allocator.free(first)
    assert allocator.allocate((2 * UNIT,)) is None
    allocator.free(second)
    assert allocator.allocate((2 * UNIT,)) is not None


@each
def test_bytes_begin_at_a_multiple_of_the_alignment(make: Callable[[], Any]) -> None:
    allocator = make()
    least = 16 if isinstance(allocator, BufferAllocator) else UNIT
    assert [obj for obj in filled(allocator) if obj.data_ptr % least] == []


def test_a_page_takes_a_shorter_chunk_and_refuses_a_longer_one() -> None:
    shape = (2, 3, 16, 4)
    allocator = PagedTensorMemoryAllocator(host_arena(3 * 768 + 700), shape, "bfloat16", MemoryFormat.KV_2LTD)
    assert allocator.capacity == 3 * 768
    last = allocator.allocate((2, 3, 5, 4), "bfloat16", MemoryFormat.KV_2LTD)
    assert last is not None
    assert (last.get_num_tokens(), last.get_size(), last.get_physical_size()) == (5, 240, 768)
    with pytest.raises(ValueError, match="allocation of 816 bytes: expected 1 to 768, what a page has"):
        allocator.allocate((2, 3, 17, 4), "bfloat16", MemoryFormat.KV_2LTD)


def test_a_page_that_is_freed_twice_is_an_error_and_has_one_owner() -> None:
    allocator = KINDS["pages"]()
    obj = allocator.allocate((UNIT,))
    obj.ref_count_down()
    with pytest.raises(ValueError, match="no reference is left to give back"):
        obj.ref_count_down()
    objs = filled(allocator)
    assert len({obj.data_ptr for obj in objs}) == PAGES


def test_buffers_keep_to_their_limit_and_leave_the_arena_alone() -> None:
    allocator = MixedMemoryAllocator(SIZE, align_bytes=UNIT, buffer_limit=100)
    held = [allocator.allocate((60,), None, MemoryFormat.BINARY_BUFFER)]
    assert allocator.allocate((41,), None, MemoryFormat.BINARY_BUFFER) is None
    held.append(allocator.allocate((40,), None, MemoryFormat.BINARY_BUFFER))
    assert (allocator.buffers.used, allocator.used) == (100, 0)
    held.append(allocator.allocate((40,), None, MemoryFormat.BINARY))
    assert (allocator.buffers.used, allocator.used, allocator.live) == (100, UNIT, 3)
    allocator.batched_free(held)
    assert (allocator.buffers.used, allocator.used, allocator.live) == (0, 0, 0)


def test_a_buffer_that_the_host_does_not_have_is_answered_with_none() -> None:
    allocator = AdHocMemoryAllocator()
    assert allocator.allocate((1 << 60,)) is None
    assert (allocator.used, allocator.live, allocator.capacity) == (0, 0, None)


# --- holders -----------------------------------------------------------------------------------------------


def test_a_pin_keeps_the_memory_after_the_last_reference() -> None:
    allocator = AdHocMemoryAllocator()
    obj = allocator.allocate((UNIT,))
    assert obj is not None
    obj.pin()
    obj.ref_count_down()
    assert (obj.is_valid(), obj.is_pinned, obj.can_evict, allocator.live) == (True, True, False, 1)
    obj.unpin()
    assert (obj.is_valid(), allocator.live) == (False, 0)


def test_counts_of_many_threads_add_up() -> None:
    allocator = KINDS["ranges"]()
    start = threading.Barrier(4)
    shared = allocator.allocate((UNIT,))

    def work(mark: int) -> None:
        start.wait(60)
        for _ in range(300):
            shared.ref_count_up()
            obj = allocator.allocate((UNIT,))
            assert obj is not None
            obj.byte_array[:] = bytes([mark]) * UNIT
            shared.pin()
            assert obj.byte_array == bytes([mark]) * UNIT
            obj.ref_count_down()
            shared.unpin()
            shared.ref_count_down()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, mark) for mark in range(4)]:
            done.result()
    assert (shared.get_ref_count(), shared.get_pin_count(), allocator.live) == (1, 0, 1)


@each
def test_an_object_that_is_dropped_with_holders_left_is_taken_back_and_told(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    allocator = make()
    filled(allocator)[0].pin()
    gc.collect()
    assert (allocator.used, allocator.live) == (0, 0)
    filled(allocator)
    assert allocator.live == 0
    for _ in range(10):
        allocator.allocate((UNIT,))
    assert allocator.live == 0
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2, "told when it happens first and when it has doubled, not each time"
    assert f"{PAGES} memory objects were dropped with references or pins left" in told[0]


@each
def test_a_view_of_its_bytes_keeps_an_object_from_being_dropped(make: Callable[[], Any]) -> None:
    allocator = make()
    view = allocator.allocate((UNIT,)).byte_array[7:9]
    gc.collect()
    assert allocator.live == 1
    others = [allocator.allocate((UNIT,)) for _ in range(PAGES - 1)]
    assert allocator.allocate((UNIT,)) is None
    for obj in others:
        obj.byte_array[:] = b"\xff" * UNIT
    view[:] = b"ab"
    assert view == b"ab"
    del view
    gc.collect()
    assert allocator.live == PAGES - 1


def test_only_its_own_allocator_frees_an_object() -> None:
    one, other = AdHocMemoryAllocator(), AdHocMemoryAllocator()
    obj = one.allocate((UNIT,))
    assert obj is not None
    with pytest.raises(ValueError, match="expected an object of this allocator"):
        other.free(obj)
    assert obj.parent() is one
    one.free(obj)


# --- the whole ---------------------------------------------------------------------------------------------


@each
def test_a_closed_allocator_gives_nothing_more_and_leaves_objects_whole(make: Callable[[], Any]) -> None:
    allocator = make()
    first, obj = allocator.allocate((UNIT,)), allocator.allocate((UNIT,))
    obj.byte_array[:] = b"x" * UNIT
    allocator.close()
    first.ref_count_down()
    allocator.close()
    with pytest.raises(ValueError, match="it is closed"):
        allocator.allocate((UNIT,))
    assert obj.byte_array == b"x" * UNIT
    obj.ref_count_down()
    assert (allocator.live, allocator.used) == (0, 0)


def test_serialised_bytes_may_be_fewer_or_fill_what_is_there_but_no_more() -> None:
    allocator = KINDS["ranges"]()
    obj = allocator.allocate((UNIT + 1,))
    assert (obj.get_size(), obj.get_physical_size()) == (UNIT + 1, 2 * UNIT)
    for nbytes in (5, 2 * UNIT):
        obj.set_used_size(nbytes)
        assert (obj.get_size(), obj.byte_array.nbytes, obj.tensor) == (nbytes, nbytes, None)
    for nbytes in (0, 2 * UNIT + 1):
        with pytest.raises(ValueError, match=f"used size {nbytes}: expected 1 to {2 * UNIT} bytes"):
            obj.set_used_size(nbytes)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda: TensorMemoryAllocator(host_arena(4096), 4), "align_bytes=4: expected a power of two of 8"),
        (lambda: TensorMemoryAllocator(host_arena(4096), 24), "alignment 24: expected a power of two"),
        (lambda: PagedTensorMemoryAllocator(host_arena(8), (9,)), "at least one page of 16 bytes"),
        (lambda: PagedTensorMemoryAllocator(host_arena(64), (9,), align_bytes=12), "positive multiple of 8"),
        (lambda: PinMemoryAllocator(4096, use_paging=True), "expected the shapes that a page holds"),
        (lambda: PinMemoryAllocator(0), "PinMemoryAllocator: size=0: expected 1 byte or more"),
        (lambda: HostMemoryAllocator(-1), "HostMemoryAllocator: size=-1: expected 1 byte or more"),
        (lambda: AdHocMemoryAllocator().allocate((0,)), "expected sizes of 1 or more"),
        (lambda: AdHocMemoryAllocator().batched_allocate((1,), None, 0), "batch_size=0: expected 1 or more"),
        (lambda: AdHocMemoryAllocator().allocate((1,), "float7"), "dtype 'float7': expected one of"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(wrong: Callable[[], object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        wrong()
    assert "\n" not in str(caught.value)
