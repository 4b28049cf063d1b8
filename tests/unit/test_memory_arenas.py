"""Where memory comes from: the selected backend's ops and pinning, wishes that are not granted, growth in steps."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmcache.logging
from helpers.pinning import Pinner, PinningSpec
from lmcache.v1 import memory as memory_package
from lmcache.v1 import memory_management
from lmcache.v1.memory import lazy
from lmcache.v1.memory_management import LazyMemoryAllocator, MixedMemoryAllocator, PinMemoryAllocator
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.torch_ops import memory

STEP = mmap.PAGESIZE


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Addresses and sizes that the selected backend has pinned; none is left at the end."""
    spec = PinningSpec()
    monkeypatch.setattr(lmcache.logging, "_said", set())
    monkeypatch.setattr(memory, "_selected_spec", lambda: spec)
    monkeypatch.setattr(lazy, "_selected_spec", lambda: spec)
    monkeypatch.setattr(Pinner, "pins", {})
    before = {*memory._live}
    yield Pinner.pins
    assert Pinner.pins == {}
    assert {*memory._live} == before


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


# --- pinned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PinMemoryAllocator, MixedMemoryAllocator])
def test_the_arena_is_page_locked_in_full_until_the_last_object_is_released(
    kind: Any, pins: dict[int, int]
) -> None:
    allocator = kind(10 * STEP)
    obj = allocator.allocate((STEP,))
    assert list(pins.values()) == [10 * STEP]
    assert obj.data_ptr in range(min(pins), min(pins) + 10 * STEP)
    allocator.close()
    assert len(pins) == 1
    obj.ref_count_down()
    assert pins == {}


def test_an_allocator_that_nobody_has_any_more_gives_its_memory_back(pins: dict[int, int]) -> None:
    view = PinMemoryAllocator(STEP).allocate((STEP,)).byte_array  # type: ignore[union-attr]
    assert len(pins) == 1, "the view has it"
    view[:] = b"x" * STEP
    del view
    assert pins == {}


@pytest.mark.parametrize("hugepages", [False, True])
@pytest.mark.parametrize("numa_node", [None, 0, 977])
def test_a_wish_that_the_host_does_not_grant_is_one_line_and_the_memory_is_there(
    hugepages: bool, numa_node: int | None, pins: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmcache")
    for _ in range(2):
        with PinMemoryAllocator(STEP, hugepages=hugepages, numa_node=numa_node) as allocator:
            obj = allocator.allocate((STEP,))
            assert obj is not None
            obj.byte_array[:] = b"\xff" * STEP
            obj.ref_count_down()
    about_nodes = [line for line in said(caplog) if "NUMA node" in line]
    assert len(about_nodes) <= 1
    assert len([line for line in said(caplog) if "hugepages" in line]) <= hugepages
    if numa_node == 977:
        assert "NUMA node 977 is not honoured: " in about_nodes[0]


def test_memory_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(MemoryError, match="alloc_pinned_ptr: 1152921504606846976 bytes of host memory"):
        PinMemoryAllocator(1 << 60)


# --- lazy --------------------------------------------------------------------------------------------------


def lazily(init: int, final: int, **more: Any) -> LazyMemoryAllocator:
    return LazyMemoryAllocator(init * STEP, final * STEP, step_bytes=STEP, **more)


def test_steps_are_taken_and_locked_as_they_are_needed_and_no_further(pins: dict[int, int]) -> None:
    allocator = lazily(2, 8)
    assert (allocator.committed, sorted(pins.values())) == (2 * STEP, [STEP] * 2)
    held = [allocator.allocate((STEP,)) for _ in range(2)]
    assert len(pins) == 2
    held.append(allocator.allocate((2 * STEP + 1,)))
    assert allocator.committed == 5 * STEP, "what is free before counts"
    assert [at - min(pins) for at in sorted(pins)] == [i * STEP for i in range(5)]
    for obj in held:
        obj.byte_array[:] = b"\x5a" * obj.get_size()  # type: ignore[union-attr]
        allocator.free(obj)  # type: ignore[arg-type]
    whole = allocator.allocate((8 * STEP,))
    assert whole is not None
    assert whole.data_ptr == min(pins), "steps are one range, not many"
    allocator.free(whole)
    allocator.close()


def test_what_cannot_fit_even_at_the_end_takes_nothing(pins: dict[int, int]) -> None:
    with lazily(1, 4) as allocator:
        assert allocator.allocate((5 * STEP,)) is None
        assert allocator.batched_allocate((STEP,), None, 5) is None
        assert allocator.committed == STEP
        objs = allocator.batched_allocate((STEP,), None, 4)
        assert objs is not None
        assert allocator.committed == 4 * STEP
        assert allocator.allocate((1,)) is None
        assert not allocator.expand()
        allocator.batched_free(objs)


def test_room_that_is_there_only_in_pieces_takes_nothing(pins: dict[int, int]) -> None:
    with lazily(2, 4) as allocator:
        first, second = allocator.allocate((STEP,)), allocator.allocate((STEP,))
        allocator.free(first)  # type: ignore[arg-type]
        assert allocator.allocate((3 * STEP,)) is None
        assert allocator.committed == 2 * STEP
        allocator.free(second)  # type: ignore[arg-type]


def test_steps_are_unlocked_when_nobody_has_the_allocator_any_more(pins: dict[int, int]) -> None:
    allocator = lazily(2, 4)
    obj = allocator.allocate((3 * STEP,))
    del allocator
    assert obj is not None
    assert len(pins) == 3
    del obj
    assert pins == {}


def test_a_step_that_the_host_refuses_is_no_room_and_is_tried_again_later(
    pins: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def refuse(address: int, nbytes: int) -> str:
        tries.append(address)
        return "4096 bytes more cannot be had (Cannot allocate memory)"

    allocator = lazily(1, 4)
    with monkeypatch.context() as patch:
        patch.setattr(lazy, "_populate", refuse)
        assert allocator.allocate((2 * STEP,)) is None
        assert len(tries) == 1, "one try per request, never a loop"
    assert f"LazyMemoryAllocator: it stays at {STEP} bytes: 4096 bytes more cannot be had" in said(caplog)[-1]
    obj = allocator.allocate((2 * STEP,))
    assert obj is not None
    allocator.free(obj)
    allocator.close()


def test_a_start_that_the_host_refuses_is_an_error_and_leaves_nothing(
    pins: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lazy._populate
    tries: list[int] = []

    def refuse_third(address: int, nbytes: int) -> str:
        tries.append(address)
        return "no more" if len(tries) == 3 else real(address, nbytes)

    monkeypatch.setattr(lazy, "_populate", refuse_third)
    with pytest.raises(MemoryError, match=f"init_size={4 * STEP}: no more; ask for less or free memory"):
        lazily(4, 8)


def test_a_backend_that_pins_nothing_is_told_once_and_costs_nothing_else(
    pins: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmcache")
    monkeypatch.setattr(Pinner, "works", False)
    with lazily(3, 4) as allocator:
        obj = allocator.allocate((4 * STEP,))
        assert obj is not None
        allocator.free(obj)
    assert [line for line in said(caplog) if "backend foo did not page-lock memory" in line] == said(caplog)


def test_others_allocate_and_free_while_one_waits_for_pages(
    pins: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = lazily(2, 4)
    real, begun, go_on = lazy._populate, threading.Event(), threading.Event()

    def slowly(address: int, nbytes: int) -> str:
        begun.set()
        assert go_on.wait(60)
        return real(address, nbytes)

    monkeypatch.setattr(lazy, "_populate", slowly)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(allocator.allocate, (3 * STEP,))
        assert begun.wait(60)
        allocator.free(allocator.allocate((STEP,)))  # type: ignore[arg-type]
        go_on.set()
        allocator.free(waiting.result(60))  # type: ignore[arg-type]
    allocator.close()


def test_threads_that_grow_it_together_get_all_of_it_and_nothing_twice(pins: dict[int, int]) -> None:
    allocator = lazily(1, 64)
    start = threading.Barrier(4)

    def work() -> list[Any]:
        start.wait(60)
        return [allocator.allocate((STEP,)) for _ in range(16)]

    with ThreadPoolExecutor(4) as pool:
        objs = [obj for done in [pool.submit(work) for _ in range(4)] for obj in done.result(60)]
    assert None not in objs
    assert allocator.committed == 64 * STEP
    assert len({obj.data_ptr for obj in objs}) == 64
    assert allocator.memcheck()
    allocator.batched_free(objs)
    allocator.close()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * STEP)), max_size=40))
def test_a_lazy_arena_gives_whatever_one_of_the_final_size_would(history: list[tuple[bool, int]]) -> None:
    spec = DeviceSpec()
    with LazyMemoryAllocator(1, 8 * STEP, step_bytes=STEP, spec=spec) as allocator:
        held: list[Any] = []
        for frees, nbytes in history:
            if frees and held:
                allocator.free(held.pop(nbytes % len(held)))
                continue
            obj = allocator.allocate((nbytes,))
            if obj is None:
                assert (allocator.largest_free or 0) < nbytes
                tail = allocator._ranges.tail_free + allocator.final_size - allocator.committed
                assert tail < nbytes, "the end would have had room"
            else:
                held.append(obj)
            assert allocator.memcheck()
        allocator.batched_free(held)
        assert (allocator.used, allocator.largest_free) == (0, allocator.committed)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((0, STEP, STEP), "init_size=0"),
        ((2 * STEP, STEP, STEP), "expected 0 < init_size <= final_size"),
        ((1, STEP, 2 * STEP), "a final_size of one step"),
        ((1, STEP, STEP + 1), f"step_bytes={STEP + 1}: expected a positive multiple of"),
        ((1, STEP, 0), "step_bytes=0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(args: tuple[int, int, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        LazyMemoryAllocator(args[0], args[1], step_bytes=args[2])


def test_every_name_of_the_memory_layer_is_importable_from_its_package_too() -> None:
    for name in memory_management.__all__:
        assert getattr(memory_package, name) is getattr(memory_management, name)
        assert name in dir(memory_package)
    with pytest.raises(AttributeError, match="GPUMemoryAllocator"):
        memory_package.GPUMemoryAllocator  # noqa: B018
