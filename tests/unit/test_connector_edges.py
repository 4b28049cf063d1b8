"""What connectors are given that is nearly right: refused in one line before anything moves, or served exactly."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import LayoutError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.connector_cases import LAYERWISE  # noqa: E402
from helpers.slot_cases import Case, build, content, zeroed  # noqa: E402
from lmcache.v1.gpu_connector import lanes  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402
    VLLMBufferLayerwiseGPUConnector,
    VLLMOpaquePagesConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
)
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryFormat  # noqa: E402

CASE = Case(nl=3, nb=4, bs=4, nh=2, hs=8, dtype=torch.bfloat16)
SLOTS = torch.arange(16)
WAYS = ["from_gpu", "to_gpu"]


def v2(fmt: int = 1, **more: Any) -> VLLMPagedMemGPUConnectorV2:
    return VLLMPagedMemGPUConnectorV2(16, 3, layout_hints={"engine_kv_format": fmt}, **more)


def opaque() -> VLLMOpaquePagesConnector:
    return VLLMOpaquePagesConnector(16, 3, layout_hints={"engine_kv_format": 2})


def an_object(shape: Any, fmt: MemoryFormat = MemoryFormat.KV_2LTD, dtype: Any = torch.bfloat16) -> Any:
    obj = AdHocMemoryAllocator().allocate(tuple(shape), dtype, fmt)
    obj.raw_tensor.fill_(7)
    return obj


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.float32])
@pytest.mark.parametrize("slots", [SLOTS, SLOTS.flip(0), SLOTS[:8] + 3])
def test_an_object_of_other_elements_is_refused_whichever_way_its_slots_would_take(
    way: str, dtype: Any, slots: Any
) -> None:
    pages = build(1, CASE)
    held = content(1, pages)
    obj = an_object((2, 3, 8, 16), dtype=dtype)
    with pytest.raises(LayoutError, match=r"memory object of torch\.\w+: expected torch.bfloat16"):
        getattr(v2(), way)(obj, 0, 8, kvcaches=pages, slot_mapping=slots)
    assert (content(1, pages) == held).all()
    assert (obj.raw_tensor == 7).all()


def test_bytes_stand_for_eight_bit_floats_on_either_side() -> None:
    pages = build(1, Case(nl=3, nb=4, bs=4, nh=2, hs=8, dtype=torch.float8_e4m3fn))
    obj = an_object((2, 3, 8, 16), dtype=torch.uint8)
    connector = v2(dtype=torch.uint8)
    connector.from_gpu(obj, 0, 8, kvcaches=pages, slot_mapping=SLOTS)
    target = zeroed(pages)
    connector.to_gpu(obj, 0, 8, kvcaches=target, slot_mapping=SLOTS)
    assert (content(1, target)[:, :, :8] == content(1, pages)[:, :, :8]).all()


def test_pages_of_other_elements_than_the_metadata_says_are_refused_also_of_as_many_bytes() -> None:
    with pytest.raises(LayoutError, match=r"pages of torch.bfloat16: expected torch.float16"):
        v2(dtype=torch.float16).initialize_kvcaches_ptr(kvcaches=build(1, CASE))


@pytest.mark.parametrize("fmt", [1, 7, 12])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 2, 8, 16), (2, 3, 8, 15), (2, 3, 8, 17), (2, 3, 7, 16), (2, 3, 8, 32)])
def test_an_object_of_another_shape_is_refused_by_every_layout(fmt: int, way: str, shape: Any) -> None:
    case = Case(nl=3, nb=4, bs=4, nh=2, hs=16 if fmt == 12 else 8, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"memory object of shape .*: expected \(2, 3, 8, 16\)"):
        getattr(v2(fmt), way)(an_object(shape), 0, 8, kvcaches=build(fmt, case), slot_mapping=SLOTS)


@pytest.mark.parametrize("fmt", [1, 2, 7, 12, 13])
@pytest.mark.parametrize("slots", [SLOTS, SLOTS.flip(0)])
def test_rows_of_an_object_beyond_its_tokens_stay(fmt: int, slots: Any) -> None:
    case = Case(nl=3, nb=4, bs=4, nh=2, hs=16 if fmt in (12, 13) else 8, dtype=torch.bfloat16)
    obj = an_object((2, 3, 12, 16))
    v2(fmt).from_gpu(obj, 0, 8, kvcaches=build(fmt, case), slot_mapping=slots)
    assert (obj.tensor[:, :, 8:].contiguous().view(torch.uint8) == 7).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.complex64, torch.float32])
def test_slots_that_cannot_be_negative_or_are_no_integers_are_refused(dtype: Any) -> None:
    with pytest.raises(
        LayoutError, match=r"slot_mapping=\(16,\) of torch\.\w+: expected a tensor of integers"
    ):
        v2().to_gpu(an_object((2, 3, 8, 16)), 0, 8, kvcaches=build(1, CASE), slot_mapping=SLOTS.to(dtype))


@pytest.mark.parametrize("slots", [SLOTS.int(), SLOTS.short(), torch.stack([SLOTS, SLOTS + 99], 1)[:, 0]])
def test_slots_may_be_narrow_or_lie_apart(slots: Any) -> None:
    pages = build(2, CASE)
    obj, target = an_object((2, 3, 8, 16)), zeroed(pages)
    v2(2).from_gpu(obj, 2, 10, kvcaches=pages, slot_mapping=slots)
    v2(2).to_gpu(obj, 2, 10, kvcaches=target, slot_mapping=slots, vllm_cached_tokens=4)
    found, held = content(2, target), content(2, pages)
    assert (found[:, :, 4:10] == held[:, :, 4:10]).all()
    assert not found[:, :, :4].any()
    assert not found[:, :, 10:].any()
    assert slots[:3].tolist() == [0, 1, 2], "the caller's own slots stay"


@pytest.mark.parametrize("way", ["batched_from_gpu", "batched_to_gpu"])
@pytest.mark.parametrize("make", [v2, opaque])
def test_one_wrong_chunk_keeps_all_of_a_batch_from_moving(way: str, make: Any) -> None:
    connector, pages = make(), build(2 if make is opaque else 1, CASE)
    fmt = connector.memory_format
    good, bad = an_object((2, 3, 4, 16), fmt), an_object((2, 3, 4, 16), fmt)
    held = content(2 if make is opaque else 1, pages)
    slots = SLOTS.clone()
    slots[4:8] += 12
    with pytest.raises(ValueError, match="expected less than"):
        getattr(connector, way)([good, bad], [0, 4], [4, 8], kvcaches=pages, slot_mapping=slots)
    with pytest.raises(LayoutError, match="2 memory objects, 1 starts, 2 ends"):
        getattr(connector, way)([good, bad], [0], [4, 8], kvcaches=pages, slot_mapping=SLOTS)
    assert (good.raw_tensor == 7).all()
    assert (content(2 if make is opaque else 1, pages) == held).all()


@pytest.mark.parametrize("kind", LAYERWISE.values(), ids=LAYERWISE.keys())
def test_layerwise_a_slot_beyond_the_pages_is_refused_before_the_first_step(kind: Any) -> None:
    connector = kind(16, 3, use_gpu=True, layout_hints={"engine_kv_format": 1})
    common = {"kvcaches": build(1, CASE), "slot_mapping": SLOTS + 12, "sync": True}
    objects = [[an_object(connector.get_shape(8), connector.memory_format)] for _ in range(3)]
    with pytest.raises(ValueError, match="slot 19 of token 7: expected less than 16"):
        connector.batched_from_gpu(objects, [0], [8], **common)
    with pytest.raises(ValueError, match="slot 19 of token 7: expected less than 16"):
        connector.batched_to_gpu([0], [8], **common)


@pytest.mark.parametrize("kind", LAYERWISE.values(), ids=LAYERWISE.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layerwise_an_object_of_other_elements_ends_the_store_and_nothing_stays_held(
    kind: Any, dtype: Any
) -> None:
    connector = kind(16, 3, use_gpu=True, layout_hints={"engine_kv_format": 1})
    objects = [[an_object(connector.get_shape(8), connector.memory_format)] for _ in range(2)]
    objects.append([an_object(connector.get_shape(8), connector.memory_format, dtype)])
    steps = connector.batched_from_gpu(
        objects, [0], [8], kvcaches=build(1, CASE), slot_mapping=SLOTS, sync=False
    )
    next(steps)
    next(steps)
    with pytest.raises(LayoutError, match=r"memory object of torch\.\w+: expected torch.bfloat16"):
        next(steps)
    assert {obj.get_ref_count() for (obj,) in objects} == {1}
    assert (objects[2][0].raw_tensor == 7).all()


def test_one_memory_with_other_strides_is_another_cache() -> None:
    memory = torch.randn(8, 2, 4, 4, 8)
    connector = VLLMPagedMemGPUConnectorV2(32, 1, layout_hints={"engine_kv_format": 2})
    for view in (memory[:4], memory[::2]):
        obj = an_object((2, 1, 16, 32), dtype=torch.float32)
        connector.from_gpu(obj, 0, 16, kvcaches=[view], slot_mapping=SLOTS)
        assert obj.tensor.equal(view.transpose(0, 1).reshape(2, 1, 16, 32))


def test_stored_twice_in_one_slot_and_in_chunks_that_overlap_reads_the_slot() -> None:
    """A store may name a slot, and a token, as often as it likes."""
    pages = build(1, CASE)
    held = torch.stack([layer.flatten(1, 2).flatten(2) for layer in pages], 1)
    slots = torch.tensor([3, 3, 9, -1, 3, 9, 0, 15])
    spans = [(0, 5), (2, 8), (4, 4), (1, 2)]
    objs = [an_object((2, 3, max(1, end - start), 16)) for start, end in spans]
    v2().batched_from_gpu(objs, *zip(*spans, strict=True), kvcaches=pages, slot_mapping=slots)
    for obj, (start, end) in zip(objs, spans, strict=True):
        for row, slot in enumerate(slots[start:end].tolist()):
            expected = held[:, :, slot] if slot >= 0 else torch.full((2, 3, 32), 7, dtype=torch.uint8)
            assert (
                obj.tensor[:, :, row]
                .contiguous()
                .view(torch.uint8)
                .equal(expected.contiguous().view(torch.uint8))
            )


def test_an_offset_moves_the_slots_of_opaque_pages_too() -> None:
    connector, pages = opaque(), build(2, CASE)
    obj, target = an_object((2, 3, 4, 16)), zeroed(pages)
    connector.from_gpu(obj, 8, 12, kvcaches=pages, slot_mapping=SLOTS)
    connector.to_gpu(obj, 8, 12, kvcaches=target, slot_mapping=SLOTS[4:], offset=4)
    found = content(2, target)
    assert (found[:, :, 8:12] == content(2, pages)[:, :, 8:12]).all()
    assert not found[:, :, :8].any()
    assert not found[:, :, 12:].any()
    connector.from_gpu(obj, 4, 4, kvcaches=pages, slot_mapping=SLOTS)  # no token: nothing to do
    with pytest.raises(LayoutError, match="of slot_mapping from token 12 on"):
        connector.to_gpu(obj, 8, 12, kvcaches=target, slot_mapping=SLOTS, offset=12)


# --- groups that differ ------------------------------------------------------------------------------------


def grouped() -> tuple[Any, Any]:
    meta = SimpleNamespace(
        kv_shape=(3, 2, 8, 2, 8), use_mla=False, kv_dtype=torch.bfloat16, kv_layer_groups_manager=None
    )
    return meta, VLLMPagedMemGPUConnectorV3(meta, layout_hints={"engine_kv_format": 1})


@pytest.mark.parametrize("other", [{"nh": 4}, {"dtype": torch.float16}])
def test_v3_refuses_another_cache_that_is_not_of_its_groups_and_keeps_the_first(other: Any) -> None:
    _, connector = grouped()
    pages = build(1, CASE)
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    with pytest.raises(LayoutError, match=r"expected 16 of torch.bfloat16, as their kernel group says"):
        connector.initialize_kvcaches_ptr(kvcaches=build(1, Case(**{**CASE.__dict__, **other})))
    obj = an_object((2, 3, 8, 16))
    connector.from_gpu(obj, 0, 8, slot_mapping=SLOTS)
    assert obj.tensor[0, 0, 5].view(torch.int16).equal(pages[0][0, 1, 1].flatten().view(torch.int16))


def test_v3_leaves_no_groups_of_a_cache_that_it_refused() -> None:
    meta, connector = grouped()
    opaque_pages = build(14, Case(nl=3, nb=4, bs=4, nh=2, hs=132, dtype=torch.uint8))
    connector.layout_hints = {"engine_kv_format": 14}
    with pytest.raises(LayoutError, match="can only be taken whole"):
        connector.initialize_kvcaches_ptr(kvcaches=opaque_pages)
    assert meta.kv_layer_groups_manager is None
    connector.layout_hints = {"engine_kv_format": 1}
    connector.initialize_kvcaches_ptr(kvcaches=build(1, CASE))
    assert [tuple(shape) for shape in connector.get_shapes(5)] == [(2, 3, 5, 16)]


# --- devices that fail, threads ----------------------------------------------------------------------------


class Lost(RuntimeError):
    """What a device says that is gone."""


@pytest.mark.parametrize("kind", LAYERWISE.values(), ids=LAYERWISE.keys())
@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("call", ["mark", "lead", "follow"])
def test_a_device_that_is_lost_keeps_no_object_and_no_buffer(
    monkeypatch: pytest.MonkeyPatch, kind: Any, load: bool, call: str
) -> None:
    connector = kind(16, 3, use_gpu=True, layout_hints={"engine_kv_format": 1})
    objects = [[an_object(connector.get_shape(8), connector.memory_format)] for _ in range(3)]
    common = {"kvcaches": build(1, CASE), "slot_mapping": SLOTS, "sync": True}
    steps = (
        connector.batched_to_gpu([0], [8], **common)
        if load
        else connector.batched_from_gpu(objects, [0], [8], **common)
    )
    next(steps)

    def lost(*_: Any, **__: Any) -> Any:
        raise Lost("the device is gone")

    monkeypatch.setattr(lanes.Lane, call, lost)

    def drive() -> None:
        for layer in range(3):
            steps.send(objects[layer] if load else None)
        steps.close()

    with suppress(Lost):  # not every transfer has a use for each call
        drive()
    assert {obj.get_ref_count() for (obj,) in objects} == {1}
    assert getattr(connector, "_pass", None) is None
    if kind is VLLMBufferLayerwiseGPUConnector:
        with pytest.raises(LayoutError, match=r"layers in the buffers now: \[\]"):
            connector.get_kv(0)


def test_threads_that_begin_at_once_share_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, pages = v2(), build(1, CASE)
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    made, here = [], threading.Barrier(4)

    class Slow(lanes.Lane):
        def __init__(self, device: Any) -> None:
            made.append(self)
            threading.Event().wait(0.05)  # so that others come before it is there
            super().__init__(device)

    monkeypatch.setattr("lmcache.v1.gpu_connector.base.Lane", Slow)

    def ask() -> None:
        here.wait(10)
        connector.lane("store")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1
