"""Plans of the native module: staging and launches in order, direct copies, timings, and what is refused."""

from __future__ import annotations

import array
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from native_rig import D2H, H2D, device_memory, entry, fake, native, read, stream, write

from lmcache.errors import DeviceError, LayoutError
from lmcache.v1.platform.ops_types import PageBufferShapeDesc
from lmcache.v1.platform.transfer_plan import (
    BatchStep,
    DirectCopyGroupSpec,
    DirectCopyObject,
    KernelGroupSpec,
    LaunchVar,
    StagingCopy,
)

LAYERS, BLOCKS, SLOTS, ROW = 2, 8, 2, 32  # rows in bytes
PAGE = SLOTS * ROW
CHUNK = 2 * SLOTS  # two blocks per object
OBJECT = LAYERS * CHUNK * ROW
SHAPE = PageBufferShapeDesc(1, LAYERS, BLOCKS, SLOTS, 2, ROW // 4, 2, 0)
FORMAT = 13  # NL x [NB, BS, NH, CS]
ALIGNMENT = 4096


class Rig:
    """Paged memory of two layers, staging for two objects, host memory for two objects."""

    def __init__(self, stack: ExitStack) -> None:
        self.queue = stack.enter_context(stream())
        self.layers = [stack.enter_context(device_memory(BLOCKS * PAGE)) for _ in range(LAYERS)]
        self.staging = [stack.enter_context(device_memory(OBJECT)) for _ in range(2)]
        self.tables = stack.enter_context(device_memory(8 * LAYERS))
        self.ids = stack.enter_context(device_memory(8 * 64))
        self.host = native.host_alloc(2 * OBJECT)
        stack.callback(native.host_free, self.host)
        write(self.tables, array.array("q", self.layers).tobytes())
        self.pages = [random.Random(at).randbytes(BLOCKS * PAGE) for at in range(LAYERS)]
        for layer, data in zip(self.layers, self.pages, strict=True):
            write(layer, data)
        write(self.host, bytes(2 * OBJECT))

    def set_ids(self, ids: Sequence[int]) -> None:
        write(self.ids, array.array("q", ids).tobytes())

    def group(self, **change: Any) -> KernelGroupSpec:
        return replace(
            KernelGroupSpec(self.tables, self.staging, SHAPE, CHUNK, FORMAT, self.ids, 64), **change
        )

    def copies(self, way: int) -> list[StagingCopy]:
        ends = [(self.host + at * OBJECT, self.staging[at]) for at in range(2)]
        if way == H2D:
            ends = [(there, host) for host, there in ends]
        return [StagingCopy(to, source, OBJECT, at * OBJECT) for at, (to, source) in enumerate(ends)]

    def run(self, way: int, steps: list[Any], groups: list[Any] | None = None, **more: Any) -> None:
        native.execute_object_group_transfer(
            way, 0, self.queue, ALIGNMENT, [self.group()] if groups is None else groups, steps, **more
        )
        native.stream_synchronize(self.queue)

    def direct(self, way: int, groups: list[Any], objects: list[Any], alignment: int = ALIGNMENT) -> None:
        native.execute_direct_copy_transfer(way, 0, self.queue, alignment, groups, objects)
        native.stream_synchronize(self.queue)


@pytest.fixture
def rig() -> Any:
    with ExitStack() as stack:
        fake.reset()
        native.pop_completed_phase_timings()
        yield Rig(stack)


def as_object(pages: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """What an object of these blocks holds: [layers, slots, row]."""
    return b"".join(layer[block * PAGE : (block + 1) * PAGE] for layer in pages for block in ids)


LAUNCH = LaunchVar(0, 0, 4, 2, 0)


def test_a_store_gathers_and_then_stages(rig: Rig) -> None:
    rig.set_ids([5, 0, 3, 6])
    rig.run(D2H, [BatchStep(rig.copies(D2H), [LAUNCH])])
    assert read(rig.host, 2 * OBJECT) == as_object(rig.pages, [5, 0]) + as_object(rig.pages, [3, 6])


def test_a_retrieval_stages_and_then_scatters(rig: Rig) -> None:
    rig.set_ids([5, 0, 3, 6])
    data = random.Random(9).randbytes(2 * OBJECT)
    write(rig.host, data)
    rig.run(H2D, [BatchStep(rig.copies(H2D), [LAUNCH])])
    now = [read(layer, BLOCKS * PAGE) for layer in rig.layers]
    assert as_object(now, [5, 0]) + as_object(now, [3, 6]) == data
    assert as_object(now, [1, 2, 4, 7]) == as_object(rig.pages, [1, 2, 4, 7])


def test_a_batch_may_use_the_staging_of_the_one_before(rig: Rig) -> None:
    rig.set_ids([7, 1, 2, 4])
    first, second = rig.copies(D2H)
    one = LaunchVar(0, 0, 2, 1, 0)
    second = replace(second, src=rig.staging[0])
    rig.run(D2H, [BatchStep([first], [one]), BatchStep([second], [replace(one, block_ids_offset=2)])])
    assert read(rig.host, 2 * OBJECT) == as_object(rig.pages, [7, 1]) + as_object(rig.pages, [2, 4])


def test_blocks_to_skip_are_neither_read_nor_written(rig: Rig) -> None:
    rig.set_ids([5, 0, 3, 6])
    write(rig.staging[0], b"x" * OBJECT)
    rig.run(D2H, [BatchStep(rig.copies(D2H), [replace(LAUNCH, skip_prefix_n_blocks=1)])])
    got = read(rig.host, OBJECT)
    assert got[:PAGE] == b"x" * PAGE
    assert got[PAGE : 2 * PAGE] == rig.pages[0][:PAGE]


def test_staging_is_cut_where_pinned_pieces_end(rig: Rig) -> None:
    copy = StagingCopy(rig.staging[0], rig.host, OBJECT, ALIGNMENT - 100)
    before = fake.calls("cuMemcpyAsync") + fake.calls("hipMemcpyAsync")
    rig.run(H2D, [BatchStep([copy], [])])
    assert fake.calls("cuMemcpyAsync") + fake.calls("hipMemcpyAsync") - before == 2


def test_an_empty_plan_queues_nothing(rig: Rig) -> None:
    rig.run(D2H, [])
    rig.run(D2H, [BatchStep([], [])], phase_timing_enabled=True)
    rig.run(D2H, [BatchStep([], [replace(LAUNCH, total_blocks=0, num_objects=0)])])
    assert fake.launches() == []
    assert native.pop_completed_phase_timings() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_idx": 1}, "group 1 of a launch: expected 0 to 0"),
        ({"group_idx": -1}, "group -1"),
        ({"block_ids_offset": 61}, "block ids 61 to 65: expected within the 64"),
        ({"block_ids_offset": -1}, "block ids -1 to 3"),
        ({"num_objects": 3}, "3 objects of a launch: expected 0 to 2"),
        ({"num_objects": 1}, "out of range"),
        ({"total_blocks": 5}, "out of range"),
        ({"skip_prefix_n_blocks": -1}, "expected 0 or more"),
    ],
)
def test_a_launch_out_of_range_refuses_the_plan_before_its_first_copy(
    rig: Rig, change: Any, words: str
) -> None:
    rig.set_ids([5, 0, 3, 6])
    good = BatchStep(rig.copies(D2H), [LAUNCH])
    with pytest.raises(ValueError, match=words):
        rig.run(D2H, [good, BatchStep([], [replace(LAUNCH, **change)])])
    assert fake.launches() == []
    assert read(rig.host, 2 * OBJECT) == bytes(2 * OBJECT)


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"engine_kv_format": 99}, LayoutError), ({"lmcache_chunk_size": 3}, LayoutError),
     ({"shape_desc": replace(SHAPE, bs=0)}, LayoutError)],
)  # fmt: skip
def test_a_group_that_does_not_fit_is_refused(rig: Rig, change: Any, kind: type) -> None:
    with pytest.raises(kind):
        rig.run(D2H, [BatchStep([], [LAUNCH])], [rig.group(**change)])
    assert fake.launches() == []


@pytest.mark.parametrize(("way", "alignment"), [(2, ALIGNMENT), (D2H, 0), (D2H, 3)])
def test_a_direction_or_alignment_that_makes_no_sense_is_refused(rig: Rig, way: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        native.execute_object_group_transfer(way, 0, rig.queue, alignment, [rig.group()], [])


# ----------------------------------------------------------------------------------------------------- timings
def test_phases_are_timed_when_it_is_asked_for(rig: Rig) -> None:
    rig.set_ids([5, 0, 3, 6])
    fake.delay(2000)
    rig.run(D2H, [BatchStep(rig.copies(D2H), [LAUNCH])], phase_timing_enabled=True, session_id="s1")
    fake.delay(0)
    kernel, staging = native.pop_completed_phase_timings()
    assert (kernel[0], staging[0]) == (0, 1)
    for phase, nbytes in ((kernel, 2 * OBJECT), (staging, 2 * OBJECT)):
        _, direction, device, milliseconds, moved, session, start, end = phase
        assert (direction, device, moved, session) == (D2H, 0, nbytes, "s1")
        assert milliseconds >= 2
        assert end - start == pytest.approx(milliseconds / 1e3, abs=1e-6)
    assert kernel[7] <= staging[6] + 1e-6
    assert native.pop_completed_phase_timings() == []


def test_phases_that_are_not_done_are_not_popped(rig: Rig) -> None:
    with fake.held():
        native.execute_object_group_transfer(
            H2D, 0, rig.queue, ALIGNMENT, [], [BatchStep(rig.copies(H2D), [])], True, "s"
        )
        assert native.pop_completed_phase_timings() == []
    native.stream_synchronize(rig.queue)
    assert [timing[0] for timing in native.pop_completed_phase_timings()] == [1]


@pytest.mark.parametrize("call", ["cuEventRecord", "cuLaunchHostFunc", "cuMemcpyAsync"])
def test_a_timed_plan_that_fails_leaves_no_events_and_no_timings(rig: Rig, call: str) -> None:
    created = fake.calls("cuEventCreate") + fake.calls("hipEventCreateWithFlags")
    destroyed = fake.calls("cuEventDestroy_v2") + fake.calls("hipEventDestroy")
    fake.fail(entry(call), 1, after=1 if call == "cuEventRecord" else 0)
    with pytest.raises(DeviceError, match=entry(call)):
        rig.run(H2D, [BatchStep(rig.copies(H2D), [])], phase_timing_enabled=True)
    created = fake.calls("cuEventCreate") + fake.calls("hipEventCreateWithFlags") - created
    destroyed = fake.calls("cuEventDestroy_v2") + fake.calls("hipEventDestroy") - destroyed
    assert created == destroyed > 0
    native.stream_synchronize(rig.queue)
    assert native.pop_completed_phase_timings() == []


def test_nothing_is_timed_unless_it_is_asked_for(rig: Rig) -> None:
    rig.run(H2D, [BatchStep(rig.copies(H2D), [])], session_id="s")
    assert native.pop_completed_phase_timings() == []


# ------------------------------------------------------------------------------------------------ direct copies
def direct_group(rig: Rig, ids: Sequence[int], offset: int = 0, **change: Any) -> DirectCopyGroupSpec:
    return replace(DirectCopyGroupSpec(rig.layers, SHAPE, FORMAT, CHUNK, offset, ids), **change)


def direct_objects(rig: Rig, count: int = 2, skip: int = 0, nbytes: int = OBJECT) -> list[DirectCopyObject]:
    return [DirectCopyObject(rig.host + at * OBJECT, at * OBJECT, nbytes, at, [skip]) for at in range(count)]


def test_direct_copies_need_no_staging_and_no_kernel(rig: Rig) -> None:
    rig.direct(D2H, [direct_group(rig, [5, 0, 3, 6])], direct_objects(rig))
    assert read(rig.host, 2 * OBJECT) == as_object(rig.pages, [5, 0]) + as_object(rig.pages, [3, 6])
    assert fake.launches() == []
    data = random.Random(3).randbytes(2 * OBJECT)
    write(rig.host, data)
    rig.direct(H2D, [direct_group(rig, [2, 1, 7, 4])], direct_objects(rig))
    now = [read(layer, BLOCKS * PAGE) for layer in rig.layers]
    assert as_object(now, [2, 1]) + as_object(now, [7, 4]) == data


def test_a_short_last_object_and_skipped_blocks_stay_as_they_are(rig: Rig) -> None:
    write(rig.host, b"x" * 2 * OBJECT)
    rig.direct(D2H, [direct_group(rig, [5, 0, 3])], direct_objects(rig, skip=1))
    first = read(rig.host, OBJECT)
    assert first[:PAGE] == b"x" * PAGE
    assert first[PAGE : 2 * PAGE] == rig.pages[0][:PAGE]
    assert read(rig.host + OBJECT, OBJECT) == b"x" * OBJECT  # its only block is skipped


def test_neighbours_on_both_sides_are_one_copy(rig: Rig) -> None:
    before = fake.calls("cuMemcpyAsync") + fake.calls("hipMemcpyAsync") + fake.calls("cuMemcpyBatchAsync_v2")
    rig.direct(D2H, [direct_group(rig, [2, 3])], direct_objects(rig, 1))
    after = fake.calls("cuMemcpyAsync") + fake.calls("hipMemcpyAsync") + fake.calls("cuMemcpyBatchAsync_v2")
    assert after - before <= LAYERS
    assert read(rig.host, OBJECT) == as_object(rig.pages, [2, 3])


def test_one_batch_of_the_driver_per_object(rig: Rig) -> None:
    if not native.batch_memcpy_native():
        assert fake.calls("cuMemcpyBatchAsync_v2") == 0
        return
    rig.direct(D2H, [direct_group(rig, [5, 0, 3, 6])], direct_objects(rig))
    assert fake.calls("cuMemcpyBatchAsync_v2") == 2


def test_of_a_block_that_is_written_twice_the_last_one_stays(rig: Rig) -> None:
    data = random.Random(4).randbytes(OBJECT)
    write(rig.host, data)
    rig.direct(H2D, [direct_group(rig, [6, 6])], direct_objects(rig, 1))
    for at, layer in enumerate(rig.layers):
        assert read(layer + 6 * PAGE, PAGE) == data[(2 * at + 1) * PAGE : (2 * at + 2) * PAGE]


@pytest.mark.parametrize(
    ("group", "objects", "kind", "words"),
    [
        ({"fmt": 12}, {}, LayoutError, "a page is not one piece"),
        ({"byte_offset_in_object": 1}, {}, ValueError, "a group of it ends at byte 257"),
        ({"block_ids": [5, 8]}, {"count": 1}, ValueError, "block id 8: expected 0 to 7"),
        ({"block_ids": [5]}, {"count": 2}, ValueError, "chunk 1"),
        ({}, {"nbytes": OBJECT - 1}, ValueError, "ends at byte 256"),
        ({"paged_layer_ptrs": [4096]}, {}, LayoutError, "1 addresses of pages"),
    ],
)
def test_what_does_not_fit_copies_nothing(rig: Rig, group: Any, objects: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        rig.direct(D2H, [direct_group(rig, [5, 0, 3, 6], **group)], direct_objects(rig, **objects))
    assert read(rig.host, 2 * OBJECT) == bytes(2 * OBJECT)


def test_formats_whose_pages_are_pieces_of_objects_are_declared() -> None:
    assert {0, 1, 2, 3, 13, 14} <= set(native.DIRECT_FORMATS)
    assert not {6, 7, 8, 10, 12, 100} & set(native.DIRECT_FORMATS)
    assert all(
        native.direct_copy_format_supported(fmt) == (fmt in native.DIRECT_FORMATS) for fmt in range(101)
    )
