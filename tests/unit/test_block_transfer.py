"""Whole-block transfer against a reference that indexes plainly, for every layout that has blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import kv_format, kv_formats
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
SERVED = [row.id for row in kv_formats() if row.is_block_addressable]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8]
QUICK = settings(max_examples=25, deadline=None)


@dataclass
class Case:
    """Sizes of one transfer."""

    nl: int = 3
    nb: int = 7
    bs: int = 2
    nh: int = 2
    hs: int = 3
    dtype: Any = torch.float32
    pad: int = 0

    def shape_desc(self, fmt: int) -> PageBufferShapeDesc:
        row = kv_format(fmt)
        nh = 1 if row.is_mla else self.nh
        hs = {10: 2 * self.hs, 11: 2 * self.hs, 17: 2 * self.hs + 1}.get(fmt, self.hs)
        return PageBufferShapeDesc(row.kv_size, self.nl, self.nb, self.bs, nh, hs, self.dtype.itemsize)


# Shape of one tensor of a format, how tensors are nested, and one page of one plane as [BS, ...] by hand.
SHAPE: dict[int, Callable[[Case], tuple[int, ...]]] = {
    0: lambda c: (c.nb, c.nl, 2, c.bs, c.nh, c.hs),
    1: lambda c: (2, c.nb, c.bs, c.nh, c.hs),
    2: lambda c: (c.nb, 2, c.bs, c.nh, c.hs),
    3: lambda c: (c.nb, c.bs, c.hs),
    6: lambda c: (2, c.nb, c.nh, c.bs, c.hs),
    7: lambda c: (c.nb, 2, c.nh, c.bs, c.hs),
    8: lambda c: (c.nb, c.nl, 2, c.nh, c.bs, c.hs),
    9: lambda c: (c.nb, c.bs, c.nh, c.hs),
    10: lambda c: (c.nb, c.nh, c.bs, 2, c.hs),
    11: lambda c: (c.nb, c.bs, c.nh, 2, c.hs),
    12: lambda c: (c.nb, c.nh, c.bs, c.hs),
    13: lambda c: (c.nb, c.bs, c.nh, c.hs),
    14: lambda c: (c.nb, c.bs, c.hs),
    15: lambda c: (2, c.nb, c.nh, 1, c.bs, c.hs),
    16: lambda c: (c.nb, c.bs, c.nh, c.hs),
    17: lambda c: (c.nb, c.bs, 1, c.hs),
    18: lambda c: (c.nb, c.bs, c.nh, c.hs),
}
PAGE: dict[int, Callable[[Any, int, int, int], Any]] = {
    0: lambda p, layer, b, kv: p[b, layer, kv],
    1: lambda p, layer, b, kv: p[layer][kv, b],
    2: lambda p, layer, b, kv: p[layer][b, kv],
    3: lambda p, layer, b, kv: p[layer][b],
    6: lambda p, layer, b, kv: p[layer][kv, b].transpose(0, 1),
    7: lambda p, layer, b, kv: p[layer][b, kv].transpose(0, 1),
    8: lambda p, layer, b, kv: p[b, layer, kv].transpose(0, 1),
    9: lambda p, layer, b, kv: p[kv][layer][b],
    10: lambda p, layer, b, kv: p[layer][b].transpose(0, 1),
    11: lambda p, layer, b, kv: p[layer][b],
    12: lambda p, layer, b, kv: p[layer][b].transpose(0, 1),
    13: lambda p, layer, b, kv: p[layer][b],
    14: lambda p, layer, b, kv: p[layer][b],
    15: lambda p, layer, b, kv: p[layer][kv, b, :, 0].transpose(0, 1),
    16: lambda p, layer, b, kv: p[layer][kv][b],
    17: lambda p, layer, b, kv: torch.cat([p[layer][0][b], p[layer][1][b]], dim=-1),
    18: lambda p, layer, b, kv: p[layer][b],
}


def filled(shape: tuple[int, ...], case: Case) -> Any:
    """Random content; with padding, a view whose first axis is spread out in memory."""
    inner = prod(shape[1:])
    flat = torch.randint(0, 256, (shape[0] * (inner + case.pad) * case.dtype.itemsize,), dtype=torch.uint8)
    strides = [prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
    return flat.view(case.dtype).as_strided(shape, (inner + case.pad, *strides))


def build(fmt: int, case: Case) -> Any:
    shape = SHAPE[fmt](case)
    if fmt in (0, 8):
        return filled(shape, case)
    if fmt == 9:
        return [[filled(shape, case) for _ in range(case.nl)] for _ in range(2)]
    if fmt == 16:
        return [(filled(shape, case), filled(shape, case)) for _ in range(case.nl)]
    if fmt == 17:  # planes of different width
        wide = (*shape[:-1], shape[-1] + 1)
        return [(filled(shape, case), filled(wide, case)) for _ in range(case.nl)]
    return [filled(shape, case) for _ in range(case.nl)]


def storages(paged: Any) -> list[Any]:
    """The memory below each tensor, padding included, as bytes."""
    if isinstance(paged, (list, tuple)):
        return [s for part in paged for s in storages(part)]
    return [torch.tensor([], dtype=torch.uint8).set_(paged.untyped_storage())]


def raw(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8)


def objects_for(fmt: int, case: Case, count: int, chunk: int) -> list[Any]:
    desc = case.shape_desc(fmt)
    shape = (desc.kv_size, case.nl, chunk, desc.nh * desc.hs)
    plain = Case(dtype=case.dtype)
    return [filled(shape, plain) for _ in range(count)]


def transfer(
    fmt: int, case: Case, paged: Any, objs: list[Any], ids: Any, way: int, chunk: int, skip: int = 0
) -> None:
    DeviceOps().multi_layer_block_kv_transfer(
        paged, objs, ids, "cpu", way, case.shape_desc(fmt), chunk, fmt, skip
    )


def expected_objects(
    fmt: int, case: Case, paged: Any, before: list[Any], ids: list[int], chunk: int, skip: int
) -> list[Any]:
    """What a gather must leave, one page after the other."""
    after = [obj.clone() for obj in before]
    desc = case.shape_desc(fmt)
    for position in range(skip, len(ids)):
        index, slot = divmod(position * case.bs, chunk)
        for layer in range(case.nl):
            for kv in range(desc.kv_size):
                page = PAGE[fmt](paged, layer, ids[position], kv)
                after[index][kv, layer, slot : slot + case.bs] = page.reshape(case.bs, desc.nh * desc.hs)
    return after


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(raw(a), raw(b)) for a, b in zip(one, other, strict=True))


def copy_of(paged: Any) -> Any:
    """The same tensors over memory of their own."""
    if isinstance(paged, (list, tuple)):
        return [copy_of(part) for part in paged]
    memory = storages(paged)[0].clone()
    return memory.view(paged.dtype).as_strided(paged.shape, paged.stride(), paged.storage_offset())


@st.composite
def plans(draw: st.DrawFn) -> tuple[Case, list[int], int, int, int]:
    """Sizes, permuted ids, objects, slots per object, blocks to skip. The tail may be short or absent."""
    case = Case(
        nl=draw(st.integers(1, 3)),
        nb=draw(st.integers(1, 9)),
        bs=draw(st.integers(1, 3)),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(DTYPES)),
        pad=draw(st.sampled_from([0, 5])),
    )
    ids = draw(st.permutations(range(case.nb)))[: draw(st.integers(0, case.nb))]
    if draw(st.booleans()):
        ids = sorted(ids)
    per_object = draw(st.integers(1, 4))
    count = -(-len(ids) // per_object) + draw(st.integers(0, 1))
    return case, ids, count, per_object * case.bs, draw(st.integers(0, len(ids) + 1))


@pytest.mark.parametrize("fmt", SERVED)
@given(plan=plans())
@QUICK
def test_gather_then_scatter_is_the_identity_on_the_named_blocks_and_touches_nothing_else(
    fmt: int, plan: tuple[Case, list[int], int, int, int]
) -> None:
    case, ids, count, chunk, skip = plan
    source, target = build(fmt, case), build(fmt, case)
    source_before = [s.clone() for s in storages(source)]
    objs = objects_for(fmt, case, count, chunk)
    expected = expected_objects(fmt, case, source, objs, ids, chunk, skip)

    transfer(fmt, case, source, objs, ids, D2H, chunk, skip)
    assert same(objs, expected)
    assert same(storages(source), source_before)

    expected_target = copy_of(target)
    for block in ids[skip:]:
        for layer in range(case.nl):
            for kv in range(kv_format(fmt).kv_size):
                if fmt == 17:  # cat copies, so its page cannot be written through
                    for plane in range(2):
                        expected_target[layer][plane][block] = source[layer][plane][block]
                else:
                    PAGE[fmt](expected_target, layer, block, kv)[:] = PAGE[fmt](source, layer, block, kv)
    objs_before = [obj.clone() for obj in objs]
    transfer(fmt, case, target, objs, ids, H2D, chunk, skip)
    assert same(storages(target), storages(expected_target))
    assert same(objs, objs_before)


@pytest.mark.parametrize("make", [list, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)])
def test_block_ids_may_be_a_list_or_a_tensor(make: Callable[[list[int]], Any]) -> None:
    case, ids = Case(), [6, 0, 3]
    paged = build(13, case)
    objs = objects_for(13, case, 1, 6)
    expected = expected_objects(13, case, paged, objs, ids, 6, 0)
    transfer(13, case, paged, objs, make(ids), D2H, 6)
    assert same(objs, expected)


def test_an_object_without_the_plane_axis_serves_where_there_is_one_plane() -> None:
    case = Case()
    paged = build(3, case)
    objs = objects_for(3, case, 1, 6)
    expected = expected_objects(3, case, paged, objs, [1, 2, 5], 6, 0)
    transfer(3, case, paged, [objs[0][0]], [1, 2, 5], D2H, 6)
    assert same(objs, expected)


def test_a_page_of_values_and_scales_is_moved_as_it_is() -> None:
    case = Case(hs=132, dtype=torch.uint8)
    paged = build(14, case)
    objs = objects_for(14, case, 1, 4)
    transfer(14, case, paged, objs, [4, 1], D2H, 4)
    for layer in range(case.nl):
        assert torch.equal(objs[0][0, layer].flatten(), paged[layer][[4, 1]].flatten())


def test_engine_views_in_any_memory_order_are_served_as_their_row() -> None:
    case = Case(hs=4)
    for strides_of in ("LHBNC", "BHLNC", "BLHNC"):
        sizes = dict(zip("LBHNC", (case.nl, case.nb, case.nh, case.bs, case.hs), strict=True))
        order = torch.randn([sizes[letter] for letter in strides_of])
        logical = order.permute([strides_of.index(letter) for letter in "LBHNC"])
        paged = [logical[layer] for layer in range(case.nl)]
        objs = objects_for(12, case, 1, 6)
        expected = expected_objects(12, case, paged, objs, [5, 0, 2], 6, 0)
        transfer(12, case, paged, objs, [5, 0, 2], D2H, 6)
        assert same(objs, expected), strides_of


@pytest.mark.parametrize("fmt", [4, 5, 100])
def test_a_format_without_blocks_is_refused_by_op_and_name(fmt: int) -> None:
    with pytest.raises(LayoutError, match=f"multi_layer_block_kv_transfer .*{kv_format(fmt).name}"):
        DeviceOps().multi_layer_block_kv_transfer([], [], [], "cpu", 0, PageBufferShapeDesc(bs=1), 1, fmt, 0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"chunk": 5}, "chunk_size=5: expected a positive multiple of bs=2"),
        ({"chunk": 0}, "chunk_size=0"),
        ({"skip": -1}, "skip_prefix_n_blocks=-1"),
        ({"ids": [0, 7]}, "block id 7: expected 0 to 6"),
        ({"ids": [-1]}, "block id -1"),
        ({"ids": [0, 1, 2, 3]}, "4 block ids: expected at most 3"),
        ({"way": 2}, "TransferDirection"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_anything_moves(
    change: dict[str, Any], fault: str
) -> None:
    case = Case()
    call: dict[str, Any] = {"ids": [0], "way": D2H, "chunk": 6, "skip": 0, **change}
    objs = objects_for(13, case, 1, 6)
    before = [obj.clone() for obj in objs]
    with pytest.raises(ValueError, match=fault):
        transfer(13, case, build(13, case), objs, call["ids"], call["way"], call["chunk"], call["skip"])
    assert same(objs, before)


def test_skipped_ids_are_not_looked_at() -> None:
    case = Case()
    objs = objects_for(13, case, 1, 6)
    paged = build(13, case)
    expected = expected_objects(13, case, paged, objs, [0, 0, 4], 6, 2)
    transfer(13, case, paged, objs, [-1, 999, 4], D2H, 6, skip=2)
    assert same(objs, expected)


@pytest.mark.parametrize("field", ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size"])
def test_a_descriptor_that_contradicts_the_tensors_is_refused(field: str) -> None:
    case = Case()
    desc = case.shape_desc(2)
    setattr(desc, field, getattr(desc, field) + 1)
    with pytest.raises(LayoutError, match=f"shape_desc.{field}="):
        DeviceOps().multi_layer_block_kv_transfer(
            build(2, case), objects_for(2, case, 2, 6), [0], "cpu", D2H, desc, 6, 2, 0
        )


def test_an_object_of_another_shape_or_dtype_is_refused() -> None:
    case = Case()
    good = objects_for(13, case, 1, 6)[0]
    for bad in (good[:, :2], good[..., :-1], good[:, :, :1], good.half(), good.flatten()):
        with pytest.raises(LayoutError, match="object 0 is"):
            transfer(13, case, build(13, case), [bad], [0], D2H, 6)
    first = good.clone()
    with pytest.raises(LayoutError, match="object 1 is"):
        transfer(13, case, build(13, case), [good, good.half()], [0, 1, 2, 3], D2H, 6)
    assert same([good], [first])  # the good object before the bad one was not touched
    with pytest.raises(TypeError, match="expected tensors, got int"):
        transfer(13, case, build(13, case), [good.data_ptr()], [0], D2H, 6)


def test_tensors_nested_otherwise_than_the_row_says_are_refused() -> None:
    case = Case()
    one = filled(SHAPE[9](case), case)
    for fmt, paged in [(13, one), (13, [[one]]), (9, [[one]] * 3), (13, []), (0, [one, one])]:
        with pytest.raises((LayoutError, TypeError), match=kv_format(fmt).name):
            transfer(fmt, case, paged, objects_for(13, case, 1, 6), [0], D2H, 6)


def test_float8_pages_go_into_byte_objects_but_not_into_another_float8() -> None:
    case = Case(dtype=torch.float8_e4m3fn)
    paged = build(13, case)
    objs = objects_for(13, case, 1, 6)
    expected = expected_objects(13, case, paged, objs, [3], 6, 0)
    transfer(13, case, paged, [objs[0].view(torch.uint8)], [3], D2H, 6)
    assert same(objs, expected)
    with pytest.raises(LayoutError, match="object 0 is"):
        transfer(13, case, paged, [objs[0].view(torch.float8_e5m2)], [3], D2H, 6)
