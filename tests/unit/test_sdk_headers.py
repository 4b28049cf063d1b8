"""What the SDK's headers say: numbers that the core has too, layouts of every row, and what is refused."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmcache
from helpers import sdk
from lmcache.v1.kv_layout import canonical_view, kv_format, kv_formats
from lmcache.v1.platform.base.op_contract import NATIVE_ABI
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

ROOT = Path(__file__).resolve().parents[2]
HEADERS = sdk.INCLUDE / "lmcache"
STRIDED = [row.id for row in kv_formats() if row.id < 1000 and row.is_block_addressable and row.id != 17]
QUICK = settings(max_examples=40, deadline=None)
ALIGNED = 1 << 20


def macros(header: str) -> dict[str, int]:
    text = (HEADERS / header).read_text()
    return {name: int(value) for name, value in re.findall(r"^#define (\w+) (\d+)\b", text, re.MULTILINE)}


def numbers(fmt: int, stride: int = 0, **sizes: int) -> tuple[int, ...]:
    """The eight numbers of a small shape that fits the format."""
    row = kv_format(fmt)
    nh = 1 if row.is_mla else sizes.get("nh", 2)
    hs = sizes.get("hs", 8) * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
    desc = PageBufferShapeDesc(
        row.kv_size, sizes.get("nl", 3), sizes.get("nb", 5), sizes.get("bs", 4), nh, hs, 2, stride
    )
    return astuple(desc)


def laid_out(fmt: int, **sizes: int) -> sdk.Layout:
    answer, layout = sdk.layout(fmt, numbers(fmt, **sizes))
    assert answer == sdk.OK
    return layout


def chunk(layout: sdk.Layout, slots: int) -> sdk.Object:
    made = sdk.Object()
    assert sdk.emulation().emu_object(ctypes.byref(made), ctypes.byref(layout), slots) == sdk.OK
    return made


def plan_blocks(layout: Any, chunk: Any, *numbers: int, alignment: int = ALIGNED) -> tuple[int, sdk.Transfer]:
    made = sdk.Transfer()
    return sdk.emulation().emu_block_plan(made, layout, chunk, *numbers, alignment), made


def plan_slots(layout: Any, chunk: Any, *numbers: int, alignment: int = ALIGNED) -> tuple[int, sdk.Transfer]:
    made = sdk.Transfer()
    return sdk.emulation().emu_slot_plan(made, layout, chunk, *numbers, alignment), made


# ------------------------------------------------------------------------------------------ one truth each
def test_the_header_of_formats_is_what_the_layout_table_makes() -> None:
    made = sdk.load(ROOT / "core" / "tools" / "gen_kv_formats.py").header()
    assert (HEADERS / "kv_formats.h").read_text() == made, "run core/tools/gen_kv_formats.py"


def test_the_native_abi_is_the_cores() -> None:
    assert macros("abi.h")["LMCACHE_NATIVE_ABI"] == NATIVE_ABI == sdk.emulation().emu_native_abi()


def test_the_version_is_the_cores() -> None:
    found = macros("abi.h")
    version = ".".join(str(found[f"LMCACHE_VERSION_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))
    assert f'\nversion = "{version}"\n' in (ROOT / "core" / "pyproject.toml").read_text()


def test_directions_and_answers_are_numbered_as_elsewhere() -> None:
    found = macros("layout.h")
    assert (found["LMC_H2D"], found["LMC_D2H"]) == (TransferDirection.H2D, TransferDirection.D2H)
    names = ["VERSION", "FORMAT", "BLOCKS", "PLANES", "SHAPE", "STRIDE", "OBJECT", "RANGE", "WHOLE"]
    assert [found[f"LMC_E_{name}"] for name in names] == [getattr(sdk, name) for name in names]
    assert {f"LMC_E_{name}" for name in names} == {name for name in found if name.startswith("LMC_E_")}


def test_every_answer_has_a_sentence_of_its_own() -> None:
    texts = [sdk.emulation().emu_error_text(answer).decode() for answer in range(sdk.WHOLE + 1)]
    assert len(set(texts)) == len(texts)
    assert [sdk.emulation().emu_error_text(bad) for bad in (-1, sdk.WHOLE + 1)] == [b"unknown answer"] * 2


def test_structures_have_the_sizes_that_their_fields_add_up_to() -> None:
    assert [sdk.emulation().emu_size(i) for i in range(4)] == [ctypes.sizeof(s) for s in sdk.STRUCTURES]
    desc = [name for name, *_ in sdk.ShapeDesc._fields_]
    assert desc == ["size", "version", *PageBufferShapeDesc.__dataclass_fields__]


def test_the_sdk_is_found_without_importing_torch_or_a_device() -> None:
    code = (
        "import lmcache, sys; print(lmcache.get_include(), lmcache.get_cmake_dir(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    include, cmake, torch = done.stdout.split()
    assert (include, torch) == (lmcache.get_include(), "False")
    names = {"abi.h", "kv_body.h", "kv_formats.h", "kv_index.h", "layout.h", "transfer.h"}
    assert {path.name for path in Path(include, "lmcache").iterdir()} == names
    assert Path(cmake, "lmcacheConfig.cmake").is_file()


def test_the_wheel_says_to_scikit_build_core_where_its_cmake_package_is() -> None:
    (found,) = (e for e in importlib.metadata.entry_points(group="cmake.root") if e.name == "lmcache")
    assert Path(lmcache.get_cmake_dir()).parent == Path(found.load().__file__).parent


# ----------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("fmt", STRIDED)
@given(
    nl=st.integers(1, 4), nb=st.integers(1, 9), bs=st.integers(1, 5), nh=st.integers(1, 4), hs=st.integers(1, 9)
)  # fmt: skip
@QUICK
def test_a_layout_is_the_canonical_view_of_the_format_s_tensor(
    fmt: int, nl: int, nb: int, bs: int, nh: int, hs: int
) -> None:
    row = kv_format(fmt)
    sizes = {"NL": nl, "NB": nb, "BS": bs, "NH": nh, "HS": hs, "CS": hs}
    view = canonical_view(row, row.shape(sizes), row.strides(sizes))
    layout = laid_out(fmt, nl=nl, nb=nb, bs=bs, nh=nh, hs=hs)
    assert tuple(layout.shape) == (row.kv_size, *view.shape[1:])
    assert tuple(layout.strides) == view.strides
    assert layout.layer_stride == view.layer_stride
    assert layout.row_width == view.shape[3] * view.shape[4]
    assert layout.plane_bytes * row.kv_size == row.page_bytes(bs, *view.shape[3:], 2)
    assert bool(layout.whole_pages) != row.token_addressable


@pytest.mark.parametrize(
    ("fmt", "first_of"),
    [
        (0, {(0, 0): 0, (1, 0): 0, (0, 2): 0}),
        (1, {(0, 0): 0, (1, 0): 0, (0, 2): 2}),
        (4, {(0, 0): 0, (1, 0): 3, (1, 2): 5}),
        (9, {(0, 0): 0, (1, 0): 3, (1, 2): 5}),
        (16, {(0, 0): 0, (1, 0): 1, (0, 2): 4, (1, 2): 5}),
        (18, {(0, 0): 0, (0, 2): 2}),
    ],
)
def test_pointers_are_taken_in_the_documented_order(fmt: int, first_of: dict[tuple[int, int], int]) -> None:
    made = laid_out(fmt)
    for (kv, layer), index in first_of.items():
        assert made.ptr_first + layer * made.ptr_layer + kv * made.ptr_kv == index


def test_slots_of_one_axis_are_cut_into_blocks() -> None:
    made = laid_out(4)  # [PBS, NH, HS] = [20, 2, 8]
    assert (tuple(made.shape), tuple(made.strides)) == ((2, 5, 4, 2, 8), (0, 64, 16, 8, 1))


@pytest.mark.parametrize(("fmt", "stride", "kv"), [(13, 100, 0), (1, 100, 500), (2, 200, 64), (0, 500, 64)])
def test_a_padded_block_stride_is_taken_and_what_lies_outside_blocks_follows(
    fmt: int, stride: int, kv: int
) -> None:
    answer, made = sdk.layout(fmt, numbers(fmt, stride))
    assert (answer, made.strides[1], made.strides[0]) == (sdk.OK, stride, kv)


def test_planes_of_their_own_width_take_their_columns_and_pointers() -> None:
    shape = numbers(17, hs=9)
    assert sdk.layout(17, shape)[0] == sdk.PLANES
    made = [sdk.layout(17, shape, (4, 3, 2), plane)[1] for plane in range(3)]
    assert [(m.shape[4], m.column, m.row_width) for m in made] == [(4, 0, 9), (3, 4, 9), (2, 7, 9)]
    assert [(m.ptr_first, m.ptr_layer, m.ptr_kv) for m in made] == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    for widths, plane in [((4, 3), 0), ((9, 0), 0), ((4, 3, 2), 3), ((4, 3, 2), -1)]:
        assert sdk.layout(17, shape, widths, plane)[0] == sdk.PLANES
    assert sdk.layout(13, numbers(13), (8,))[0] == sdk.PLANES


@pytest.mark.parametrize(("fmt", "answer"), [(19, sdk.FORMAT), (-1, sdk.FORMAT), (100, sdk.BLOCKS)])
def test_a_format_that_cannot_be_served_is_refused(fmt: int, answer: int) -> None:
    assert sdk.layout(fmt, numbers(2))[0] == answer


FIELDS = list(PageBufferShapeDesc.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fmt", "field", "value", "answer"),
    [
        (2, "kv_size", 1, sdk.SHAPE),
        (13, "kv_size", 2, sdk.SHAPE),
        (2, "nl", 0, sdk.SHAPE),
        (2, "nb", -1, sdk.SHAPE),
        (1, "nb", 0, sdk.SHAPE),  # K and V lie outside the blocks: how many there are must be known
        (2, "bs", 0, sdk.SHAPE),
        (2, "nh", 0, sdk.SHAPE),
        (3, "nh", 2, sdk.SHAPE),
        (2, "hs", 0, sdk.SHAPE),
        (2, "hs", 2**31 - 1, sdk.SHAPE),
        (2, "element_size", 3, sdk.SHAPE),
        (2, "element_size", 0, sdk.SHAPE),
        (2, "block_stride_elems", -1, sdk.SHAPE),
        (2, "block_stride_elems", 127, sdk.STRIDE),
        (13, "block_stride_elems", 63, sdk.STRIDE),
        (4, "block_stride_elems", 65, sdk.STRIDE),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fmt: int, field: str, value: int, answer: int) -> None:
    shape = list(numbers(fmt))
    assert sdk.layout(fmt, shape)[0] == sdk.OK
    shape[FIELDS.index(field)] = value
    assert sdk.layout(fmt, shape)[0] == answer


def test_sizes_whose_product_overflows_are_refused() -> None:
    assert sdk.layout(0, (2, 2**31 - 1, 2**31 - 1, 4, 2, 8, 2, 0))[0] == sdk.SHAPE
    assert sdk.layout(13, (1, 1, 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 8, 0))[0] == sdk.SHAPE


@pytest.mark.parametrize("fault", [{"version": 2}, {"version": 0}, {"size": 72}, {"size": 0}])
def test_a_structure_of_other_headers_is_refused_before_it_is_believed(fault: dict[str, int]) -> None:
    """Eight 64-bit numbers where eight of 32 bits are meant would read as garbage."""
    made, shape = sdk.Layout(), sdk.new(sdk.ShapeDesc)
    for name, value in zip(FIELDS, numbers(2), strict=True):
        setattr(shape, name, value)
    ask = sdk.emulation().emu_layout_of_desc
    assert ask(ctypes.byref(made), 2, ctypes.byref(shape)) == sdk.OK
    for name, value in fault.items():
        setattr(shape, name, value)
    assert ask(ctypes.byref(made), 2, ctypes.byref(shape)) == sdk.VERSION
    for one in ("layout", "object"):
        layout = laid_out(2)
        obj = chunk(layout, 8)
        for name, value in fault.items():
            setattr(layout if one == "layout" else obj, name, value)
        assert plan_blocks(layout, obj, 1, 1, 2, 0)[0] == sdk.VERSION
        assert plan_slots(layout, obj, 1, 2, 0)[0] == sdk.VERSION


# --------------------------------------------------------------------------------------------- transfers
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((1, 2, 4, 0), sdk.OK),
        ((1, 2, 4, 9), sdk.OK),  # all are skipped
        ((2, 2, 4, 0), sdk.RANGE),
        ((-1, 2, 4, 0), sdk.RANGE),
        ((1, 2, 5, 0), sdk.RANGE),  # two objects of two blocks
        ((1, -1, 0, 0), sdk.RANGE),
        ((1, 2, -1, 0), sdk.RANGE),
        ((1, 2, 4, -1), sdk.RANGE),
    ],
)
def test_counts_of_a_block_transfer_are_checked(arguments: tuple[int, ...], answer: int) -> None:
    made = laid_out(2)
    assert plan_blocks(made, chunk(made, 8), *arguments)[0] == answer


def test_objects_that_do_not_fit_are_refused() -> None:
    made = laid_out(2)
    assert plan_blocks(made, chunk(made, 6), 1, 1, 1, 0)[0] == sdk.OBJECT  # blocks of four slots
    assert plan_blocks(made, chunk(laid_out(2, hs=4), 8), 1, 1, 1, 0)[0] == sdk.OBJECT
    assert plan_slots(made, chunk(made, 6), 1, 7, 0)[0] == sdk.OBJECT
    assert sdk.emulation().emu_object(ctypes.byref(sdk.Object()), ctypes.byref(made), 0) == sdk.OBJECT


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("strides", (32, 64, 8, 8, 2), sdk.STRIDE),  # elements of a head must be neighbours
        ("shape", (2, 5, 0, 2, 8), sdk.SHAPE),
        ("shape", (2, 5, 4, 2, 9), sdk.SHAPE),  # not what plane_bytes says
        ("shape", (2, 5, 2**31 - 1, 2**31 - 1, 8), sdk.SHAPE),
        ("num_layers", 0, sdk.SHAPE),
        ("element_size", 0, sdk.SHAPE),
        ("column", 1, sdk.SHAPE),  # it would reach beyond the row
        ("column", -1, sdk.SHAPE),
    ],
)
def test_a_layout_made_by_hand_is_checked(field: str, value: Any, answer: int) -> None:
    made = laid_out(2)
    fits = chunk(made, 8)
    kind = dict(sdk.Layout._fields_)[field]
    setattr(made, field, kind(*value) if isinstance(value, tuple) else value)
    assert plan_blocks(made, fits, 1, 1, 2, 0)[0] == answer
    assert plan_slots(made, fits, 1, 2, 0)[0] == answer


def test_pages_that_may_only_be_moved_whole_are_not_cut() -> None:
    made = laid_out(14)
    assert plan_blocks(made, chunk(made, 8), 1, 1, 2, 0)[0] == sdk.OK
    assert plan_slots(made, chunk(made, 8), 1, 2, 0)[0] == sdk.WHOLE


@pytest.mark.parametrize(
    ("fmt", "runs"),
    [
        (2, (1, 1, 4 * 2 * 8 * 2)),  # NHD: a plane of a page is one run
        (13, (1, 1, 4 * 2 * 8 * 2)),
        (7, (4, 2, 8 * 2)),  # HND: one run per slot and head
        (3, (1, 1, 4 * 8 * 2)),
    ],
)
def test_a_block_is_cut_into_the_longest_runs_of_both_sides(fmt: int, runs: tuple[int, ...]) -> None:
    made = laid_out(fmt)
    plan = plan_blocks(made, chunk(made, 8), 1, 1, 2, 0)[1]
    assert (plan.rows, plan.heads, plan.run, plan.vec) == (*runs, 16)
    one_head = laid_out(fmt, nh=1)
    assert plan_blocks(one_head, chunk(one_head, 8), 1, 1, 2, 0)[1].rows == 1


@pytest.mark.parametrize(
    ("hs", "stride", "alignment", "vec"),
    [
        (8, 0, ALIGNED, 16),
        (8, 0, 8, 8),  # an address
        (8, 0, 2, 2),
        (8, 0, 1, 1),
        (4, 0, ALIGNED, 16),  # the run is a whole page
        (3, 0, ALIGNED, 16),  # as is this one, of 4 * 2 * 3 * 2 bytes
        (8, 68, ALIGNED, 8),  # the stride of blocks
        (8, 65, ALIGNED, 2),
    ],
)
def test_copies_are_as_wide_as_addresses_runs_and_strides_allow(
    hs: int, stride: int, alignment: int, vec: int
) -> None:
    answer, made = sdk.layout(13, numbers(13, stride, hs=hs))
    assert answer == sdk.OK
    assert plan_blocks(made, chunk(made, 8), 1, 1, 2, 0, alignment=alignment)[1].vec == vec


def test_slots_and_heads_that_a_hand_made_layout_spreads_narrow_the_copies() -> None:
    """Slots 9 elements apart, or heads 12: of no format in the table, but of what a plugin may describe."""
    for fmt, axis, stride, vec in [(3, 2, 9, 2), (7, 3, 36, 8)]:
        made = laid_out(fmt)
        made.strides[axis] = stride
        plan = plan_blocks(made, chunk(made, 8), 1, 1, 2, 0)[1]
        assert (plan.rows, plan.run, plan.vec) == (4, 16, vec)


def test_ids_are_checked_where_the_host_has_them() -> None:
    made = laid_out(13)
    plan = plan_blocks(made, chunk(made, 8), 1, 2, 4, 1)[1]
    for ids, fine in [((-1, 0, 4, 2), 1), ((0, 0, 5, 2), 0), ((0, -1, 1, 2), 0)]:
        given = (ctypes.c_longlong * 4)(*ids)
        assert sdk.emulation().emu_ids_in_range(ctypes.byref(plan), given) == fine


# ----------------------------------------------------------------------------------- bytes, without torch
def test_a_chunk_is_indexed_token_major() -> None:
    nl, slots, nh, width = 3, 5, 2, 4
    at = sdk.emulation().emu_chunk_offset
    offsets = [
        at(kv, layer, slot, head, inner, nl, slots, nh, width)
        for kv in range(2)
        for layer in range(nl)
        for slot in range(slots)
        for head in range(nh)
        for inner in range(width)
    ]
    assert offsets == list(range(2 * nl * slots * nh * width))
    assert at(1, 79, 10**6, 7, 0, 80, 2 * 10**6, 8, 128) > 2**32  # sizes are int, offsets are not


@given(
    count=st.integers(0, 200), to=st.integers(0, 31), source=st.integers(0, 31), threads=st.sampled_from([1, 7, 32])
)  # fmt: skip
@QUICK
def test_bytes_are_copied_between_any_two_alignments(count: int, to: int, source: int, threads: int) -> None:
    there = (ctypes.c_ubyte * 256)(*(i % 251 for i in range(256)))
    here = (ctypes.c_ubyte * 256)(*[255] * 256)
    addresses = ctypes.addressof(here) + to, ctypes.addressof(there) + source
    sdk.emulation().emu_copy(*addresses, count, sdk.Four(3, 2, 1, threads))
    assert bytes(here) == b"\xff" * to + bytes(there)[source : source + count] + b"\xff" * (256 - to - count)


def test_a_page_moves_as_its_axes_say_without_torch() -> None:
    """Heads outside slots: [NB, NH, BS, HS] = [2, 2, 2, 2], written out by hand."""
    pages, chunk_bytes = (ctypes.c_ubyte * 16)(*range(16)), (ctypes.c_ubyte * 8)()
    shape = (1, 1, 2, 2, 2, 2, 1, 0)
    vec = sdk.transfer(
        12, 1, shape, [ctypes.addressof(pages)], [ctypes.addressof(chunk_bytes)], [1], 2, grid=(2, 1, 1, 3)
    )
    assert (list(chunk_bytes), vec) == ([8, 9, 12, 13, 10, 11, 14, 15], 2)
