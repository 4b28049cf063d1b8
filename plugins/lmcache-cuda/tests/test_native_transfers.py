"""Transfers of the native module do what torch does, for every KV format, through the launches that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hypothesis import given, settings
from hypothesis import strategies as st
from native_rig import D2H, H2D, entry, fake, native, refused, stream, table

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, canonical_view, kv_format, kv_formats

QUICK = settings(max_examples=12, deadline=None)
BLOCKS = [row.id for row in kv_formats() if row.id < 100]
SLOTS = [fmt for fmt in BLOCKS if kv_format(fmt).token_addressable]
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMS = ("list", "buffer", "device")


@dataclass(frozen=True)
class Case:
    """Sizes of a transfer. Elements are shifted by so many from where 16 bytes begin."""

    fmt: int
    nl: int = 2
    nb: int = 6
    bs: int = 2
    nh: int = 2
    hs: int = 8
    size: int = 2
    shift: int = 0

    @property
    def row(self) -> KVFormat:
        return kv_format(self.fmt)

    @property
    def heads(self) -> int:
        return 1 if self.row.is_mla or "NP" in self.row.dims.levels else self.nh

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.hs, self.hs + 1, 2) if "NP" in self.row.dims.levels else ()

    @property
    def width(self) -> int:
        packed = self.row.dims.axes[-2:] == ("2", "HS")
        return sum(self.widths) or self.hs * (2 if packed else 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.row.kv_size, self.nl, self.nb, self.bs, self.heads, self.width, self.size, 0)

    def shape(self, width: int) -> tuple[int, ...]:
        sizes = {"NL": self.nl, "NB": self.nb, "BS": self.bs, "PBS": self.nb * self.bs, "NH": self.nh}
        return self.row.shape({**sizes, "HS": width, "CS": width})


def memory(shape: Sequence[int], case: Case) -> Any:
    """A tensor of random bytes with bytes around it, ``shift`` elements behind a multiple of 16 bytes."""
    count = 1
    for size in shape:
        count *= size
    flat = torch.randint(0, 256, ((count + case.shift) * case.size + 64,), dtype=torch.uint8)
    start = -flat.data_ptr() % 16 + 16 + case.shift * case.size
    return flat[start : start + count * case.size].view(DTYPES[case.size]).view(tuple(shape))


def pages_of(case: Case) -> list[Any]:
    """The format's tensors in the order of their addresses."""
    levels = {"NL": case.nl, "2": 2, "NP": max(len(case.widths), 1)}
    count = 1
    for level in case.row.dims.levels:
        count *= levels[level]
    widths = case.widths or (case.hs,)
    return [memory(case.shape(widths[at % len(widths)]), case) for at in range(count)]


def plane_views(case: Case, pages: list[Any], layer: int, kv: int) -> list[Any]:
    """[NB, BS, NH, W] of one plane of one layer, as torch sees it; several where planes have their own widths."""
    row, views = case.row, []
    for part in range(max(len(case.widths), 1)):
        if row.dims.levels[:1] == ("2",):
            page = pages[kv * case.nl + layer]
        elif row.dims.levels == ("NL", "2"):
            page = pages[2 * layer + kv]
        elif row.dims.levels:
            page = pages[layer * max(len(case.widths), 1) + part]
        else:
            page = pages[0]
        axes = list(row.dims.axes)
        if "PBS" in axes:  # slots of all blocks are one axis
            views.append(page.reshape(case.nb, case.bs, case.heads, -1))
            continue
        seen = canonical_view(row, page.shape, page.stride())
        offset = page.storage_offset() + kv * seen.strides[0] + layer * seen.layer_stride
        views.append(page.as_strided(seen.shape[1:], seen.strides[1:], offset))
    return views


def in_torch(
    case: Case, way: int, pages: list[Any], obj: Any, position: int, block: int, slot: slice
) -> None:
    """Copy slots of one block to or from the rows of an object that begin at ``position``."""
    for layer in range(case.nl):
        for kv in range(case.row.kv_size):
            column = 0
            for view in plane_views(case, pages, layer, kv):
                there = view[block, slot]
                width = there.shape[1] * there.shape[2]
                here = obj[kv, layer, position : position + there.shape[0], column : column + width]
                if way == D2H:
                    here.copy_(there.reshape(there.shape[0], width))
                else:
                    there.copy_(here.reshape(there.shape))
                column += width


def objects_of(case: Case, count: int, slots: int) -> list[Any]:
    return [memory((case.row.kv_size, case.nl, slots, case.heads * case.width), case) for _ in range(count)]


def clones(tensors: list[Any]) -> list[Any]:
    """Copies that lie as far from a multiple of 16 bytes."""
    made = []
    for tensor in tensors:
        start = tensor.data_ptr() % 16
        flat = torch.empty(tensor.numel() * tensor.element_size() + 32, dtype=torch.uint8)
        begin = -flat.data_ptr() % 16 + start
        view = flat[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        made.append(view.view(tensor.shape).copy_(tensor))
    return made


def same(ones: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def move_blocks(
    case: Case,
    way: int,
    pages: list[Any],
    objs: list[Any],
    ids: list[int],
    slots: int,
    skip: int,
    forms: tuple[str, str],
) -> None:
    keep: list[Any] = []
    table_of_pages, said = table([page.data_ptr() for page in pages], forms[0], keep)
    table_of_ids, counted = table(ids, forms[1], keep)
    more = {f"page_{k}": v for k, v in said.items()} | {f"id_{k}": v for k, v in counted.items()}
    with stream() as queue:
        for plane in range(max(len(case.widths), 1)):
            native.block_transfer(
                case.fmt, case.numbers, way, 0, queue, table_of_pages, [o.data_ptr() for o in objs], table_of_ids,
                slots, skip, plane=plane, widths=case.widths, **more,
            )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, fmt: int = 0) -> Case:
    return Case(
        fmt,
        nl=draw(st.integers(1, 3)),
        nb=draw(st.integers(1, 7)),
        bs=draw(st.sampled_from([1, 2, 3, 8])),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.sampled_from([1, 3, 8, 64])),
        size=draw(st.sampled_from(sorted(DTYPES))),
        shift=draw(st.sampled_from([0, 0, 1, 4])),
    )


# ------------------------------------------------------------------------------------------------------- blocks
@pytest.mark.parametrize("fmt", BLOCKS)
@given(data=st.data(), forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)))
@QUICK
def test_blocks_move_as_in_torch(fmt: int, data: Any, forms: tuple[str, str]) -> None:
    case = data.draw(cases(fmt))
    ids = data.draw(st.permutations(range(case.nb)))[: data.draw(st.integers(0, case.nb))]
    per_object = data.draw(st.integers(1, 3))
    skip = data.draw(st.integers(0, len(ids) + 1))
    pages = pages_of(case)
    objs = objects_of(case, -(-len(ids) // per_object) + data.draw(st.integers(0, 1)), per_object * case.bs)
    for way in (D2H, H2D):
        mine, theirs = (clones(pages), clones(objs)), (clones(pages), clones(objs))
        move_blocks(case, way, *mine, ids, per_object * case.bs, skip, forms)
        for at, block in enumerate(ids):
            if at >= skip:
                place = at % per_object * case.bs
                in_torch(case, way, theirs[0], theirs[1][at // per_object], place, block, slice(None))
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])


def test_every_format_with_blocks_is_served() -> None:
    assert tuple(BLOCKS) == native.BLOCK_FORMATS
    assert tuple(SLOTS) == native.SLOT_FORMATS


def test_of_a_block_that_is_written_twice_the_last_object_stays() -> None:
    case = Case(13, nl=1, nb=3)
    pages, objs = pages_of(case), objects_of(case, 3, case.bs)
    move_blocks(case, H2D, pages, objs, [1, 2, 1], case.bs, 0, ("list", "list"))
    expected = objs[2].reshape(case.bs, case.nh, case.hs)
    assert torch.equal(pages[0][1], expected)


def test_ids_of_a_table_on_the_device_that_are_out_of_range_are_left_alone() -> None:
    case = Case(13, nl=1, nb=3)
    pages, objs = pages_of(case), objects_of(case, 3, case.bs)
    before = clones(objs)
    move_blocks(case, D2H, pages, objs, [-1, 3, 1], case.bs, 0, ("device", "device"))
    assert same(objs[:2], before[:2])
    assert not torch.equal(objs[2], before[2])


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40])
def test_an_id_out_of_range_is_refused_before_anything_is_queued(bad: int) -> None:
    case = Case(13)
    pages, objs = pages_of(case), objects_of(case, 2, case.bs)
    fake.launches()
    with pytest.raises(ValueError, match=f"block id {bad}: expected 0 to 5"):
        move_blocks(case, D2H, pages, objs, [1, bad], case.bs, 0, ("list", "list"))
    assert fake.launches() == []


def test_more_ids_than_a_launch_can_carry_take_several_launches() -> None:
    case = Case(13, nl=1, nb=1500, bs=1, nh=1)
    pages, objs = pages_of(case), objects_of(case, 1500, 1)
    order = torch.randperm(1500).tolist()
    fake.launches()
    move_blocks(case, D2H, pages, objs, order, 1, 0, ("list", "list"))
    assert len(fake.launches()) > 3
    assert torch.equal(torch.cat([o.reshape(1, -1) for o in objs]), pages[0].reshape(1500, -1)[order])


@pytest.mark.parametrize("per_object", [1, 4])
def test_more_objects_than_a_launch_can_carry_take_several_launches(per_object: int) -> None:
    case = Case(13, nl=1, nb=2048, bs=1, nh=1)
    pages, objs = pages_of(case), objects_of(case, 2048 // per_object, per_object)
    move_blocks(case, D2H, pages, objs, list(range(2048)), per_object, 3, ("device", "device"))
    got = torch.cat([o.reshape(per_object, -1) for o in objs])
    assert torch.equal(got[3:], pages[0].reshape(2048, -1)[3:])


def test_a_launch_is_one_group_per_block_layer_and_plane() -> None:
    case = Case(7, nl=3, nb=5, bs=4, nh=2, hs=64)
    pages, objs = pages_of(case), objects_of(case, 2, 2 * case.bs)
    fake.launches()
    move_blocks(case, D2H, pages, objs, [0, 2, 4], 2 * case.bs, 1, ("list", "list"))
    [(name, grid, threads, queue)] = fake.launches()
    assert (name, grid, queue > 2) == ("lmcache_move", (2, 3, 2), True)
    assert threads == 64  # 4 slots, 2 heads, 64 elements of 2 bytes, 16 at once


def test_a_table_of_no_known_alignment_is_copied_as_wide_as_each_address_allows() -> None:
    even, odd = Case(3, nl=1, nb=4, bs=4, size=1, hs=32), Case(3, nl=1, nb=4, bs=4, size=1, hs=32, shift=3)
    for case in (even, odd):
        pages, objs = pages_of(case), objects_of(even, 1, 16)
        move_blocks(case, D2H, pages, objs, [3, 0, 1, 2], 16, 0, ("device", "list"))
        assert torch.equal(objs[0].reshape(4, -1), pages[0].reshape(4, -1)[[3, 0, 1, 2]])


def test_a_transfer_waits_for_the_stream_and_the_host_does_not() -> None:
    case = Case(13, nl=1)
    pages, objs = pages_of(case), objects_of(case, 1, case.bs)
    before = clones(objs)
    with stream() as queue:
        with fake.held():
            native.block_transfer(
                13, case.numbers, D2H, 0, queue, [pages[0].data_ptr()], [objs[0].data_ptr()], [2], case.bs
            )
            assert same(objs, before)
            assert not native.stream_query(queue)
        native.stream_synchronize(queue)
    assert torch.equal(objs[0].reshape(-1), pages[0][2].reshape(-1))


# -------------------------------------------------------------------------------------------------------- slots
@pytest.mark.parametrize("fmt", SLOTS)
@given(data=st.data(), form=st.sampled_from(FORMS))
@QUICK
def test_slots_move_as_in_torch(fmt: int, data: Any, form: str) -> None:
    case = data.draw(cases(fmt))
    count = case.nb * case.bs
    slots = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
    slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
    skip = data.draw(st.integers(0, len(slots)))
    pages, objs = pages_of(case), objects_of(case, 1, len(slots) + 1)
    for way in (D2H, H2D):
        mine, theirs = (clones(pages), clones(objs)), (clones(pages), clones(objs))
        move_slots(case, way, *mine, slots, skip, form)
        for at, slot in enumerate(slots):
            if at >= skip and slot >= 0:
                block, inside = divmod(slot, case.bs)
                in_torch(case, way, *theirs[:1], theirs[1][0], at, block, slice(inside, inside + 1))
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])


def move_slots(
    case: Case, way: int, pages: list[Any], objs: list[Any], slots: list[int], skip: int, form: str
) -> None:
    keep: list[Any] = []
    mapping, counted = table(slots, form, keep)
    with stream() as queue:
        for plane in range(max(len(case.widths), 1)):
            native.slot_transfer(
                case.fmt, case.numbers, way, 0, queue, [p.data_ptr() for p in pages], objs[0].data_ptr(), mapping,
                objs[0].shape[2], skip, plane=plane, widths=case.widths,
                **({"slot_count": counted["count"]} if counted else {}),
            )  # fmt: skip


def test_tokens_may_be_the_first_axis_of_an_object_of_one_layer() -> None:
    case = Case(7, nl=1)
    pages = pages_of(case)
    obj = memory((5, 2, case.nh * case.hs), case)
    slots = [3, 0, 11, 7, 2]
    with stream() as queue:
        native.slot_transfer(
            7, case.numbers, D2H, 0, queue, [pages[0].data_ptr()], obj.data_ptr(), slots, 5, token_major=True
        )
    flat = pages[0].permute(1, 0, 3, 2, 4).reshape(2, 12, -1)  # [2, slots, row]
    assert torch.equal(obj, flat[:, slots].transpose(0, 1))


# ------------------------------------------------------------------------------------------------------ refusals
CASE = Case(13, nl=2)
FITS: dict[str, Any] = {
    "format": 13, "shape": CASE.numbers, "direction": D2H, "device": 0, "stream": 0, "pages": [4096, 8192],
    "objects": [12288], "ids": [0], "object_slots": 2, "skip": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"format": 77}, LayoutError, "no KV format has this id"),
        ({"format": 100}, LayoutError, "the KV format has no blocks"),
        ({"format": 17}, LayoutError, "planes have their own widths"),
        ({"pages": [4096]}, LayoutError, "1 addresses of pages: expected 2"),
        ({"pages": 4096, "page_count": 3}, LayoutError, "3 addresses of pages: expected 2"),
        ({"shape": (1, 2, 6, 0, 2, 8, 2, 0)}, LayoutError, "a size is out of range"),
        ({"shape": (2, 2, 6, 2, 2, 8, 2, 0)}, LayoutError, "a size is out of range"),
        ({"shape": (1, 2, 6, 2, 2, 8, 2, 1)}, LayoutError, "the block stride is too small"),
        ({"object_slots": 3}, LayoutError, "an object is too small"),
        ({"object_slots": 0}, LayoutError, "an object is too small"),
        ({"direction": 2}, ValueError, "out of range"),
        ({"skip": -1}, ValueError, "expected 0 or more"),
        ({"ids": [0, 1]}, ValueError, "out of range"),
        ({"ids": 4096}, ValueError, "expected 0 or more"),
        ({"shape": (1, 2, 6)}, TypeError, "eight numbers"),
        ({"shape": (1, 2, 6, 2, 2, 8, 2, 1 << 31)}, ValueError, "expected 32 bits"),
        ({"ids": [0.5]}, TypeError, "float"),
        ({"ids": b"12345678"}, TypeError, "expected 64-bit integers"),
        (
            {"shape": (1, 500, 6, 2, 2, 8, 2, 0), "pages": list(range(500))},
            ValueError,
            "expected at most 384",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_queued(change: Any, kind: type, words: str) -> None:
    fake.launches()
    with pytest.raises(kind, match=words) as caught:
        native.block_transfer(**{**FITS, **change})
    assert "\n" not in str(caught.value) or kind is TypeError
    assert isinstance(caught.value, LayoutError) == (kind is LayoutError)
    assert fake.launches() == []


def test_a_format_whose_pages_are_whole_is_not_cut() -> None:
    with pytest.raises(LayoutError, match="may only be moved whole"):
        native.slot_transfer(14, (1, 1, 4, 2, 1, 132, 1, 0), D2H, 0, 0, [4096], 8192, [0], 1)


def test_a_launch_that_the_driver_refuses_is_a_device_error() -> None:
    case = Case(13, nl=1)
    pages, objs = pages_of(case), objects_of(case, 1, case.bs)
    fake.fail(entry("cuLaunchKernel"), 1)
    error = refused(lambda: move_blocks(case, D2H, pages, objs, [2], case.bs, 0, ("list", "list")))
    assert (error.code, error.call) == (1, entry("cuLaunchKernel"))
