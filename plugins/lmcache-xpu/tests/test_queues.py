"""Queues, completions and USM on the real SYCL runtime: what is ordered, what waits, and what is let go."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin

from lmcache.errors import DeviceError, LayoutError
from lmcache.v1.memory.allocators import AdHocMemoryAllocator
from lmcache.v1.platform.ops_types import PageBufferShapeDesc
from lmcache_xpu import keeping, memory, runtime, streams
from lmcache_xpu.ops import XpuDeviceOps

pytestmark = [pytest.mark.torch]

GATHER, SCATTER = 1, 0
BLOCKS, SLOTS, HEADS, WIDTH, LAYERS = 32, 4, 2, 64, 3
SECONDS = 60
"""At most: what is waited for is an event."""


@pytest.fixture(autouse=True)
def on_the_cpu_device() -> Iterator[None]:
    with standin.installed():
        yield


@pytest.fixture
def ops() -> XpuDeviceOps:
    made = XpuDeviceOps()
    made.ensure_native()
    return made


@pytest.fixture
def queued(queue: int) -> Iterator[int]:
    """A queue of this test's own, on which torch queues now."""
    with standin.queued_on(queue):
        yield queue


@contextmanager
def stalled(module: Any, queue: int) -> Iterator[None]:
    """The queue does nothing inside of this."""
    ticket = module.stall(queue, SECONDS)
    try:
        yield
    finally:
        module.release(ticket)


def pages(kind: str = "device") -> list[Any]:
    shape = (BLOCKS, 2, SLOTS, HEADS, WIDTH)
    return [standin.device_tensor(torch.randn(shape).to(torch.bfloat16), kind) for _ in range(LAYERS)]


def chunks(count: int, kind: str = "device") -> list[Any]:
    shape = (2, LAYERS, 2 * SLOTS, HEADS * WIDTH)
    return [standin.device_tensor(torch.zeros(shape, dtype=torch.bfloat16), kind) for _ in range(count)]


def move(ops: XpuDeviceOps, paged: Any, objects: Any, ids: list[int], way: int) -> None:
    shape = PageBufferShapeDesc(2, LAYERS, BLOCKS, SLOTS, HEADS, WIDTH, 2, 0)
    ops.multi_layer_block_kv_transfer(paged, objects, ids, None, way, shape, 2 * SLOTS, 2, 0)


def wanted(paged: list[Any], ids: list[int]) -> Any:
    """What a chunk has of two blocks, by torch."""
    rows = [page[ids].permute(1, 0, 2, 3, 4).reshape(2, 2 * SLOTS, HEADS * WIDTH) for page in paged]
    return torch.stack(rows, dim=1)


# --- order -------------------------------------------------------------------------------------------------


def test_a_transfer_waits_for_the_work_before_it_and_the_call_does_not(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    paged, (chunk,) = pages(), chunks(1)
    late = torch.randn(paged[0].shape).to(torch.bfloat16)
    with stalled(module, queued):
        ops.lmcache_memcpy_async(paged[0], late, late.numel() * 2, SCATTER, 0, 4096)
        move(ops, paged, [chunk], [5, 2], GATHER)
        assert not module.queue_is_idle(queued)
        assert not chunk.any(), "the transfer ran ahead of its queue"
    module.queue_wait(queued)
    assert torch.equal(paged[0], late)
    assert torch.equal(chunk, wanted(paged, [5, 2]))


def test_calls_in_a_row_take_effect_in_their_order(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    paged, (one, two) = pages(), chunks(2)
    before = [page.clone() for page in paged]
    with stalled(module, queued):
        move(ops, paged, [one], [0, 1], GATHER)
        move(ops, paged, [one], [7, 8], SCATTER)
        move(ops, paged, [two], [8, 7], GATHER)
    module.queue_wait(queued)
    assert torch.equal(two, wanted(before, [1, 0]))


def test_queues_do_not_wait_for_one_another(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    paged, (chunk,) = pages(), chunks(1)
    other = module.queue_create(0)
    with stalled(module, queued), standin.queued_on(other):
        move(ops, paged, [chunk], [3, 4], GATHER)
        module.queue_wait(other)
        assert torch.equal(chunk, wanted(paged, [3, 4]))
        assert not module.queue_is_idle(queued)
    module.queue_destroy(other)


def test_a_queue_without_order_is_refused(module: Any) -> None:
    free = module.queue_create(0, in_order=False)
    with pytest.raises(ValueError, match="expected an in-order queue"):
        module.copy_async(free, 1, 1, 1)
    with pytest.raises(ValueError, match="queue 0"):
        module.mark(0)


def test_of_blocks_that_are_written_twice_the_last_stays(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    # Cores share the ids out by halves, so that each half's end and beginning meet in one block.
    once = list(range(BLOCKS))
    ids = once + once[::-1]
    paged, objects = pages(), chunks(len(ids) // 2)
    for index, chunk in enumerate(objects):
        chunk.fill_(index + 1)
    move(ops, paged, objects, ids, SCATTER)
    module.queue_wait(queued)
    last = {block: place // 2 + 1 for place, block in enumerate(ids)}
    for page in paged:
        assert [int(page[block].float().mean()) for block in once] == [last[block] for block in once]


# --- completion --------------------------------------------------------------------------------------------


def test_a_completion_comes_after_the_work_and_once(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    with stalled(module, queued):
        ops.record_completion_on_stream(queued, "stored", b"one\0\xff")
        assert ops.drain_recorded_completions() == []
    module.queue_wait(queued)
    assert ops.drain_recorded_completions() == [("stored", b"one\0\xff")]
    assert ops.drain_recorded_completions() == []


def test_completions_of_many_threads_keep_the_order_of_each(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    def record(thread: int) -> None:
        for index in range(50):
            ops.record_completion_on_stream(queued, "k", bytes([thread, index]))

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module.queue_wait(queued)
    told = [payload for _, payload in ops.drain_recorded_completions()]
    assert sorted(told) == [bytes([a, b]) for a in range(4) for b in range(50)]
    for number in range(4):
        mine = [payload for payload in told if payload[0] == number]
        assert mine == sorted(mine)


def test_an_event_has_the_time_at_which_its_queue_reached_it(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    with stalled(module, queued):
        ops.record_event_on_stream(queued, "store", "me", {"a": "b"}, {"n": 3})
        assert ops.drain_recorded_events() == []
        released = time.time()
    module.queue_wait(queued)
    ((type, session, seconds, texts, numbers),) = ops.drain_recorded_events()
    assert (type, session, texts, numbers) == ("store", "me", {"a": "b"}, {"n": 3})
    assert released - 1e-3 <= seconds <= time.time()


@pytest.mark.parametrize(
    "arguments", [(1, "s", {}, {}), ("t", "s", {"a": 1}, {}), ("t", "s", {}, {"n": "3"})]
)
def test_events_of_other_types_are_refused(ops: XpuDeviceOps, queued: int, arguments: Any) -> None:
    with pytest.raises(TypeError, match="expected strings"):
        ops.record_event_on_stream(queued, *arguments)


def test_events_that_nobody_drains_do_not_grow_without_end(
    ops: XpuDeviceOps, module: Any, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_EVENTS", 4)
    for index in range(6):
        ops.record_event_on_stream(queued, "t", "s", {}, {"n": index})
    module.queue_wait(queued)
    assert [numbers["n"] for *_, numbers in ops.drain_recorded_events()] == [2, 3, 4, 5]


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "host", "shared"])
@pytest.mark.parametrize("way", [GATHER, SCATTER])
def test_objects_in_every_kind_of_usm_are_moved_where_they_are(
    ops: XpuDeviceOps, module: Any, queued: int, kind: str, way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "staged", None)
    paged, (chunk,) = pages(), chunks(1, kind)
    chunk.copy_(torch.randn(chunk.shape))
    before = chunk.clone()
    move(ops, paged, [chunk], [6, 1], way)
    module.queue_wait(queued)
    assert torch.equal(chunk, wanted(paged, [6, 1]))
    assert (way == GATHER) != torch.equal(chunk, before)


def test_slots_of_an_object_in_pageable_memory_go_through_the_device(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    paged = pages()
    plain = torch.zeros(2, LAYERS, 6, HEADS * WIDTH, dtype=torch.bfloat16)
    addresses = [page.data_ptr() for page in paged]
    mapping = [5, 100, -1, 9, 127, 0]
    staged = runtime.staged
    held: list[Any] = []  # on a GPU torch keeps it as long as its queue needs it

    def waited(tensor: Any, device: Any) -> Any:
        held.append(staged(tensor, device))
        return _Arrives(held[-1], module, queued)

    runtime.staged = waited
    ops.multi_layer_kv_transfer(
        plain, addresses, mapping, None, BLOCKS * SLOTS, GATHER, 2, block_size=SLOTS, head_size=WIDTH
    )
    for token, slot in enumerate(mapping):
        for layer, page in enumerate(paged):
            row = page[slot // SLOTS, :, slot % SLOTS].reshape(2, -1) if slot >= 0 else torch.zeros(2, 128)
            assert torch.equal(plain[:, layer, token], row.to(torch.bfloat16))


class _Arrives:
    """A tensor on the device whose copy to the host waits for its queue, as torch's does."""

    def __init__(self, tensor: Any, module: Any, queue: int) -> None:
        self._tensor, self._wait = tensor, lambda: module.queue_wait(queue)

    def data_ptr(self) -> int:
        return int(self._tensor.data_ptr())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, cls):
                value._wait()
        plain = [value._tensor if isinstance(value, cls) else value for value in args]
        return function(*plain, **(kwargs or {}))


def test_a_copy_keeps_its_host_tensor_until_it_is_done(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    there = standin.empty((1 << 16,), torch.uint8)
    with stalled(module, queued):
        ops.lmcache_memcpy_async(there, torch.full((1 << 16,), 7, dtype=torch.uint8), 1 << 16, SCATTER, 0, 64)
        assert keeping.count() == 1
    module.queue_wait(queued)
    assert keeping.count() == 0
    assert (there == 7).all()


def test_tables_of_launches_are_used_again(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    paged, (chunk,) = pages(), chunks(1)
    move(ops, paged, [chunk], [0, 1], GATHER)
    module.queue_wait(queued)
    before = module.count_tables()
    for index in range(50):
        move(ops, paged, [chunk], [index % BLOCKS, 31], GATHER)
        module.queue_wait(queued)
    assert module.count_tables() == before


def test_tables_of_launches_that_are_under_way_are_left_alone(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    paged, objects = pages(), chunks(20)
    with stalled(module, queued):
        for index, chunk in enumerate(objects):
            move(ops, paged, [chunk], [index, index + 1], GATHER)
    module.queue_wait(queued)
    for index, chunk in enumerate(objects):
        assert torch.equal(chunk, wanted(paged, [index, index + 1]))


def test_pinned_memory_is_usm_that_the_device_works_on(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    size = 3 * 4096 + 5
    for name, more in (("pinned", ()), ("pinned_numa", (0,)), ("hugepage_pinned", ())):
        ptr = getattr(ops, f"alloc_{name}_ptr")(size, *more)
        assert module.usm_kind(queued, ptr) == "host"
        assert ptr % 4096 == 0
        assert ctypes.string_at(ptr, size) == bytes(size)
        getattr(ops, f"free_{name}_ptr")(ptr)
        assert module.usm_kind(queued, ptr) == "unknown"


def test_what_is_not_an_allocator_s_is_not_freed(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    ptr = ops.alloc_pinned_ptr(100)
    with pytest.raises(ValueError, match="expected one of alloc_hugepage_pinned_ptr"):
        ops.free_hugepage_pinned_ptr(ptr)
    with pytest.raises(ValueError, match="expected one of alloc_pinned_ptr"):
        ops.free_pinned_ptr(ptr + 1)
    assert module.usm_kind(queued, ptr) == "host"
    ops.free_pinned_ptr(ptr)
    with pytest.raises(ValueError, match="expected USM"):
        module.usm_free(ctypes.addressof(ctypes.create_string_buffer(64)))


def test_objects_of_the_allocator_are_moved_where_they_are_and_their_room_is_used_again(
    ops: XpuDeviceOps, module: Any, queued: int
) -> None:
    allocator = memory.XPUMemoryAllocator(1 << 18)
    shape = (2, LAYERS, 2 * SLOTS, HEADS * WIDTH)
    paged, obj = pages(), allocator.allocate(shape, torch.bfloat16)
    assert runtime.reaches(queued, obj.tensor)
    move(ops, paged, [obj.tensor], [2, 30], GATHER)
    module.queue_wait(queued)
    assert torch.equal(obj.tensor, wanted(paged, [2, 30]))
    assert allocator.allocate((1 << 18,), torch.uint8) is None
    at = obj.data_ptr
    allocator.free(obj)
    assert allocator.used == 0
    assert allocator.allocate(shape, torch.bfloat16).data_ptr == at
    with pytest.raises(ValueError, match="expected an object of this allocator"):
        allocator.free(AdHocMemoryAllocator().allocate((4,), torch.uint8))
    allocator.close()
    allocator.close()
    with pytest.raises(ValueError, match="closed"):
        allocator.allocate((1,), torch.uint8)


# --- what is refused ---------------------------------------------------------------------------------------


def test_what_is_refused_has_moved_nothing(ops: XpuDeviceOps, module: Any, queued: int) -> None:
    paged, (chunk,) = pages(), chunks(1)
    addresses = [page.data_ptr() for page in paged]
    shape = PageBufferShapeDesc(2, LAYERS, BLOCKS, SLOTS, HEADS, WIDTH, 2, 0)
    block = ops.multi_layer_block_kv_transfer
    for fault, said, arguments in (
        (ValueError, "block id 32: expected below 32", (addresses, [chunk.data_ptr()], [1, 32], None, GATHER)),
        (ValueError, "block id -1", (addresses, [chunk.data_ptr()], [-1, 1], None, GATHER)),
        (ValueError, "direction=2", (addresses, [chunk.data_ptr()], [0, 1], None, 2)),
        (LayoutError, "2 addresses of pages: expected 3", (addresses[:2], [chunk.data_ptr()], [0], None, GATHER)),
        (ValueError, "range", (addresses, [chunk.data_ptr()], [0, 1, 2], None, GATHER)),
    ):  # fmt: skip
        with pytest.raises(fault, match=said):
            block(*arguments, shape, 2 * SLOTS, 2, 0)
    with pytest.raises(ValueError, match="slot 128: expected below 128"):
        ops.multi_layer_kv_transfer(
            chunk, addresses, [0, 128], None, BLOCKS * SLOTS, GATHER, 2, block_size=SLOTS, head_size=WIDTH
        )
    module.queue_wait(queued)
    assert module.queue_is_idle(queued)
    assert not chunk.any()


def test_memory_that_is_not_there_is_refused_in_one_line(module: Any, queued: int) -> None:
    with pytest.raises(DeviceError, match=r"free some, or ask for less|SYCL"):
        module.usm_alloc(queued, 1 << 60, "device")
    with pytest.raises(DeviceError, match="device 999: the SYCL runtime has"):
        module.queue_create(999)
    with pytest.raises(ValueError, match="expected host, device or shared"):
        module.usm_alloc(queued, 64, "pinned")


def test_a_process_that_used_the_device_ends_in_peace() -> None:
    code = (
        "from lmcache_xpu import native; n = native.load(); q = n.queue_create(0)\n"
        "a = n.usm_alloc(q, 4096, 'device')\n"
        "n.transfer('t', q, 2, 1, [2, 1, 1, 4, 1, 8, 4, 0], [a], [a + 2048], [0], 4)\n"
        "n.record(q, 0, 'k', b''); n.mark(q); n.stall(q, 0.01)\n"
        "print(n.kernel_origin(q))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "spirv", "")
