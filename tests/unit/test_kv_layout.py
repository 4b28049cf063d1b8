"""What the table of KV layouts promises. Geometry is checked against brute force over element offsets."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import (
    DECLARED_ORDERS,
    Dims,
    KVFormat,
    PagedLayout,
    PageGeometry,
    canonical_view,
    declared_order,
    describe,
    describe_declared,
    kv_format,
    kv_formats,
    register_kv_format,
    table,
)

BLOCK_ROWS = [row for row in kv_formats() if row.is_block_addressable]
QUICK = settings(max_examples=60, deadline=None)
small = st.integers(1, 4)

# How an element is found by hand: (kv, block, layer, slot, head, element of the head, HS) to an index.
Place = Callable[[int, int, int, int, int, int, int], tuple[int, ...]]
PLACE: dict[int, Place] = {
    0: lambda kv, b, layer, t, h, x, hs: (b, layer, kv, t, h, x),
    1: lambda kv, b, layer, t, h, x, hs: (kv, b, t, h, x),
    2: lambda kv, b, layer, t, h, x, hs: (b, kv, t, h, x),
    3: lambda kv, b, layer, t, h, x, hs: (b, t, x),
    6: lambda kv, b, layer, t, h, x, hs: (kv, b, h, t, x),
    7: lambda kv, b, layer, t, h, x, hs: (b, kv, h, t, x),
    8: lambda kv, b, layer, t, h, x, hs: (b, layer, kv, h, t, x),
    9: lambda kv, b, layer, t, h, x, hs: (b, t, h, x),
    10: lambda kv, b, layer, t, h, x, hs: (b, h, t, x // hs, x % hs),
    11: lambda kv, b, layer, t, h, x, hs: (b, t, h, x // hs, x % hs),
    12: lambda kv, b, layer, t, h, x, hs: (b, h, t, x),
    13: lambda kv, b, layer, t, h, x, hs: (b, t, h, x),
    14: lambda kv, b, layer, t, h, x, hs: (b, t, x),
    15: lambda kv, b, layer, t, h, x, hs: (kv, b, h, 0, t, x),
    16: lambda kv, b, layer, t, h, x, hs: (b, t, h, x),
    17: lambda kv, b, layer, t, h, x, hs: (b, t, 0, x),
    18: lambda kv, b, layer, t, h, x, hs: (b, t, h, x),
}


@dataclass
class FakeTensor:
    """Shape and strides without memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int = 2

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.itemsize


def at(strides: tuple[int, ...], index: tuple[int, ...]) -> int:
    return sum(s * i for s, i in zip(strides, index, strict=True))


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    return {symbol: draw(small) for symbol in ("NB", "NL", "BS", "NH", "HS", "CS", "PBS", "T")}


# --- the table ---------------------------------------------------------------------------------------------


def test_the_table_needs_no_torch() -> None:
    code = "import sys, lmcache.v1.kv_layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_ids_are_those_that_native_code_uses() -> None:
    assert [row.id for row in kv_formats()] == [*range(19), 100]


@pytest.mark.parametrize("row", kv_formats(), ids=lambda row: row.name)
def test_a_name_spells_its_dimension_string(row: KVFormat) -> None:
    assert str(Dims.parse(row.dims_text)) == row.dims_text
    assert row.dims.name == row.name or row.id == 14  # which spells the two regions of its page


def test_flags_follow_from_the_dimension_strings() -> None:
    def ids(flag: str) -> set[int]:
        return {row.id for row in kv_formats() if getattr(row, flag)}

    assert ids("is_cross_layer") == {0, 8}
    assert ids("is_kv_list") == {4, 9}
    assert ids("is_kv_second_tuple") == {16, 17, 100}
    assert ids("is_layer_list") == set(range(19)) - {0, 8, 4, 9} | {100}
    assert ids("is_mla") == {3, 5, 14, 17}
    assert ids("is_hnd") == {6, 7, 8, 10, 12, 15, 100}
    assert ids("is_two_major") == {1, 6, 15}
    assert ids("is_packed") == {10, 11, 12, 13}
    assert ids("is_pbs_fused") == {4, 5}
    assert ids("is_single_kv") == {18}
    assert {row.id for row in kv_formats() if row.kv_size == 2} == {0, 1, 2, 4, 6, 7, 8, 9, 15, 16, 100}
    assert {row.id for row in kv_formats() if not row.is_block_addressable} == {4, 5, 100}
    assert {row.id for row in kv_formats() if not row.token_addressable} == {14}


def test_rows_are_found_by_id_by_name_and_by_an_integer_of_another_type() -> None:
    class NativeEnum:
        def __int__(self) -> int:
            return 12

    for key in (12, "NL_X_NB_NH_BS_CS", NativeEnum(), kv_format(12)):
        assert kv_format(key).id == 12  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [77, -1, "NHD", "", None, [], 1.0, 1.9])
def test_an_unknown_format_is_refused_with_what_is_known(key: Any) -> None:
    with pytest.raises(LayoutError, match="known: 0 NB_NL_TWO_BS_NH_HS"):
        kv_format(key)


@pytest.mark.parametrize(
    "text",
    ["", "NL x", "[NB, BS", "XX x [NB, BS, HS]", "[NB, BS, QQ]", "[NB, NB, BS, HS]", "[NB, HS]", "[HS, BS]"],
)
def test_a_malformed_dimension_string_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="dims="):
        Dims.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "NL x [2, NB, BS, NH, CS]",
        "NL x 2 x [NB, BS, NH, CS]",
        "NL x [NB, HS, BS, CS]",
        "NL x [NB, PBS, HS]",
        "NL x [NB, T, HS]",
        "NP x [NB, BS, HS]",
        "NL x 2 x NP x [NB, BS, HS]",
        None,
    ],
)
def test_symbols_that_contradict_each_other_are_refused(text: Any) -> None:
    with pytest.raises(LayoutError, match="dims="):
        Dims.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": -1},
        {"id": 50},
        {"id": 999},
        {"id": 1 << 31},
        {"id": "1002"},
        {"id": 1002.5},
        {"id": None},
        {"name": ""},
        {"name": 5},
        {"name": "NL x NB"},
        {"engines": ["vllm"]},
        {"engines": "vllm"},
        {"mark": "uint8"},
        {"mark": ["uint8", "132"]},
    ],
    ids=str,
)
def test_a_row_that_would_break_the_table_for_others_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_by_id", dict(table._by_id))
    monkeypatch.setattr(table, "_by_name", dict(table._by_name))
    before = kv_formats()
    fields: dict[str, Any] = {"id": 1002, "name": "MINE", "dims_text": "NL x [NB, BS, HS]", **wrong}
    with pytest.raises(LayoutError, match="expected"):
        register_kv_format(KVFormat(**fields))
    assert kv_formats() == before


def test_rows_can_be_added_but_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_by_id", dict(table._by_id))
    monkeypatch.setattr(table, "_by_name", dict(table._by_name))
    mine = KVFormat(1000, "NB_X", "[NB, NH, HS, BS, CS]".replace("HS, ", ""))
    register_kv_format(mine)
    register_kv_format(replace(mine))
    assert kv_format("NB_X") is kv_format(1000)
    for clash in (replace(mine, id=12), replace(mine, name="NL_X_NB_BS_HS"), replace(mine, note="other")):
        with pytest.raises(LayoutError, match="taken"):
            register_kv_format(clash)
    with pytest.raises(LayoutError, match="dims="):
        register_kv_format(KVFormat(1001, "BAD", "[NB"))


@pytest.mark.parametrize("row", kv_formats(), ids=lambda row: row.name)
@given(size=sizes())
@QUICK
def test_shape_and_sizes_are_inverse_and_strides_are_tight(row: KVFormat, size: dict[str, int]) -> None:
    shape = row.shape(size)
    assert row.shape(row.sizes(shape)) == shape
    offsets = {at(row.strides(size), index) for index in itertools.product(*map(range, shape))}
    assert offsets == set(range(len(offsets)))


def test_a_tensor_of_another_form_is_refused() -> None:
    for shape in [(4, 2, 8, 16), (2, 4, 8, 2, 16, 1), (4, 3, 8, 2, 16)]:
        with pytest.raises(LayoutError, match=r"\[NB, 2, BS, NH, HS\]"):
            kv_format(2).sizes(shape)
    with pytest.raises(LayoutError, match="no size given for HS"):
        kv_format(3).shape({"NB": 1, "BS": 1})


# --- canonical views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", BLOCK_ROWS, ids=lambda row: row.name)
@given(size=sizes())
@QUICK
def test_the_canonical_view_finds_each_element_where_indexing_by_hand_does(
    row: KVFormat, size: dict[str, int]
) -> None:
    shape, strides = row.shape(size), row.strides(size)
    view = canonical_view(row, shape, strides)
    for layer in range(view.num_layers):
        for kv, b, t, h, x in itertools.product(*map(range, view.shape)):
            by_hand = at(strides, PLACE[row.id](kv, b, layer, t, h, x, size["HS"]))
            assert at(view.strides, (kv, b, t, h, x)) + layer * view.layer_stride == by_hand


def test_packed_k_and_v_that_are_not_adjacent_have_no_canonical_view() -> None:
    with pytest.raises(LayoutError, match="not adjacent"):
        canonical_view(kv_format(11), (2, 3, 1, 2, 4), (32, 4, 4, 16, 1))


def test_rows_without_blocks_have_no_canonical_pages() -> None:
    with pytest.raises(LayoutError, match="no block axis"):
        canonical_view(kv_format(100), (1, 2, 5, 4), (40, 20, 4, 1))


# --- pages -------------------------------------------------------------------------------------------------


def pages_by_hand(
    row: KVFormat, shape: tuple[int, ...], strides: tuple[int, ...]
) -> dict[tuple[int, int], set[int]]:
    """Element offsets of each page (layer, block)."""
    pages: dict[tuple[int, int], set[int]] = {}
    for index in itertools.product(*map(range, shape)):
        named = dict(zip(row.dims.axes, index, strict=True))
        pages.setdefault((named.get("NL", 0), named["NB"]), set()).add(at(strides, index))
    return pages


@pytest.mark.parametrize("row", BLOCK_ROWS, ids=lambda row: row.name)
@given(
    size=sizes(),
    order=st.permutations(range(6)),
    gaps=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    itemsize=st.sampled_from([1, 2, 4]),
)
@QUICK
def test_a_page_is_described_exactly_if_it_is_one_run(
    row: KVFormat, size: dict[str, int], order: list[int], gaps: list[int], itemsize: int
) -> None:
    shape = row.shape(size)
    strides, running = [0] * row.rank, 1
    for axis in (a for a in order if a < row.rank):  # any order in memory, any gap after any axis
        strides[axis] = running
        running = running * shape[axis] + (gaps[axis] if gaps[axis] < 3 else 0)
    pages = pages_by_hand(row, shape, tuple(strides))
    one_run = all(max(p) - min(p) + 1 == len(p) for p in pages.values())
    if not one_run:
        with pytest.raises(LayoutError, match="not one contiguous run"):
            describe(row, shape, strides, itemsize)
        return
    geometry = describe(row, shape, strides, itemsize)
    assert geometry.num_blocks * geometry.num_layers == len(pages)
    for (layer, block), elements in pages.items():
        assert geometry.offset(block, layer) == min(elements) * itemsize
        assert geometry.page_bytes == len(elements) * itemsize


def test_overlapping_pages_are_refused() -> None:
    with pytest.raises(LayoutError, match="overlap"):
        describe(kv_format(3), (4, 2, 8), (8, 8, 1), 2)
    with pytest.raises(LayoutError, match="overlap"):
        describe(kv_format(0), (3, 2, 2, 1, 1, 4), (8, 8, 4, 4, 4, 1), 2)


def test_the_k_and_v_halves_of_a_two_major_tensor_are_not_one_page() -> None:
    row = kv_format(1)
    size = {"NB": 3, "BS": 2, "NH": 2, "HS": 4}
    with pytest.raises(LayoutError, match="not one contiguous run"):
        describe(row, row.shape(size), row.strides(size), 2)


def test_strides_that_lead_nowhere_are_refused() -> None:
    for strides in [(16, -8, 1), (16, 8)]:
        with pytest.raises(LayoutError, match="bad geometry"):
            describe(kv_format(3), (4, 2, 8), strides, 2)
    with pytest.raises(LayoutError, match="not one contiguous run"):
        describe(kv_format(3), (4, 2, 8), (16, 0, 1), 2)


@given(ratio=st.integers(1, 4), groups=st.integers(1, 4), pad=st.integers(0, 1))
@QUICK
def test_kernel_blocks_group_into_blocks_if_they_touch(ratio: int, groups: int, pad: int) -> None:
    kernel = describe(kv_format(12), (ratio * groups, 2, 4, 6), (48 + pad, 24, 6, 1), 2)
    if ratio * groups > 1 and ratio > 1 and pad:
        with pytest.raises(LayoutError, match="not one run"):
            kernel.grouped(ratio)
        return
    whole = kernel.grouped(ratio)
    assert (whole.num_blocks, whole.block_size) == (groups, 4 * ratio)
    assert [whole.offset(b) for b in range(groups)] == [kernel.offset(b * ratio) for b in range(groups)]
    assert whole.token_addressable == (ratio == 1)
    with pytest.raises(LayoutError, match="do not group"):
        kernel.grouped(ratio * groups + 1)


# --- declared orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", DECLARED_ORDERS)
@given(counts=st.tuples(small, small, small, small, small))
@QUICK
def test_a_declared_order_gives_the_strides_of_its_letters(letters: str, counts: tuple[int, ...]) -> None:
    order = declared_order(letters)
    strides = dict(zip("LBHNC", order.strides(counts), strict=True))
    size = dict(zip("LBHNC", counts, strict=True))
    for i, letter in enumerate(letters):
        expected = 1
        for inner in letters[i + 1 :]:
            expected *= size[inner]
        assert strides[letter] == expected


@pytest.mark.parametrize(
    ("letters", "row", "one_run"),
    [
        ("LBHNC", 12, True),
        ("LBNHC", 13, True),
        ("BLHNC", 12, True),
        ("BLNHC", 13, True),
        ("LHBNC", 12, False),
        ("BHLNC", 12, False),
    ],
)
def test_a_layer_as_an_engine_hands_it_over_is_described_by_its_order(
    letters: str, row: int, one_run: bool
) -> None:
    layers, blocks, heads, slots, content = counts = (3, 5, 2, 4, 8)
    order = declared_order(letters)
    strides = order.strides(counts)
    tensor = FakeTensor((blocks, heads, slots, content), strides[1:])
    assert (order.row.id, order.page_is_one_run) == (row, one_run)
    assert order.is_block_major == letters.startswith("B")
    if not one_run:
        with pytest.raises(LayoutError, match="not one contiguous run"):
            describe_declared(letters, tensor)
        return
    pages = describe_declared(letters, tensor)
    assert (pages.block_size, pages.num_heads, pages.head_size) == (slots, heads, content)
    assert pages.page_bytes == heads * slots * content * 2
    assert pages.page_stride_bytes == pages.page_bytes * (layers if order.is_block_major else 1)


def test_mla_caches_are_described_with_and_without_a_head_axis() -> None:
    flat = describe_declared("LBHNC", FakeTensor((5, 16, 576), (16 * 576, 576, 1)), mla=True)
    headed = describe_declared("LBNHC", FakeTensor((5, 1, 16, 576), (16 * 576, 9, 576, 1)), mla=True)
    assert flat == headed
    assert (flat.row.id, flat.num_heads, flat.head_size, flat.page_bytes) == (3, 1, 576, 16 * 576 * 2)


def test_older_names_of_orders_are_aliases_and_others_are_refused() -> None:
    assert declared_order("NHD") is declared_order("LBNHC")
    assert declared_order("HND") is declared_order("LBHNC")
    with pytest.raises(LayoutError, match="known: LBHNC"):
        declared_order("BNHLC")


# --- what a stored object knows ----------------------------------------------------------------------------


def page(opaque: bool = False, blocks: int = 5, pad: int = 0) -> PageGeometry:
    return describe(kv_format(12), (blocks, 2, 4, 8), (64 + pad, 32, 8, 1), 2, opaque=opaque)


def test_equal_layouts_have_equal_fingerprints_wherever_their_pages_lie() -> None:
    ours = PagedLayout.of([page(), page()], "torch.bfloat16")
    theirs = PagedLayout.of([page(blocks=9), page(pad=64)], "bfloat16")
    assert ours.fingerprint() == theirs.fingerprint()
    assert (ours.num_layers, ours.page_bytes, ours.block_bytes) == (2, (128, 128), 256)


def test_every_field_is_in_the_fingerprint() -> None:
    layout = PagedLayout.of([page()], "bfloat16")
    others: dict[str, object] = {
        "format": "NL_X_NB_BS_NH_CS",
        "dtype": "float16",
        "block_size": 8,
        "num_kv_heads": 4,
        "head_size": 16,
        "page_bytes": (128, 128),
        "packing": "cpu-vec",
        "split": 2,
        "planes": 2,
    }
    layout = replace(layout, page_bytes=(64, 64))
    assert set(others) == {name for name, _ in layout.fingerprint()} == set(vars(layout))
    for name, value in others.items():
        changed = replace(layout, **{name: value})  # type: ignore[arg-type]
        assert changed.fingerprint() != layout.fingerprint(), name


def test_an_opaque_page_is_never_token_addressable() -> None:
    opaque = PagedLayout.of([page(opaque=True)], "bfloat16", packing="cpu-vec")
    assert opaque.opaque
    assert not opaque.token_addressable
    assert PagedLayout.of([page()], "bfloat16").token_addressable
    for geometry, packing in [(page(opaque=True), "plain"), (page(), "cpu-amx")]:
        with pytest.raises(LayoutError, match="does not go with"):
            PagedLayout.of([geometry], "bfloat16", packing=packing)


def test_a_cross_layer_tensor_counts_as_all_its_layers() -> None:
    row = kv_format(0)
    size = {"NB": 5, "NL": 3, "BS": 4, "NH": 2, "HS": 8}
    layout = PagedLayout.of([describe(row, row.shape(size), row.strides(size), 2)], "float16")
    assert layout.page_bytes == (row.page_bytes(4, 2, 8, 2),) * 3


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    layout = PagedLayout.of([page()], "bfloat16")
    bad: list[tuple[str, object]] = [
        ("format", "NHD"),
        ("block_size", 0),
        ("page_bytes", ()),
        ("page_bytes", (128, 0)),
        ("dtype", ""),
        ("packing", "Cpu Vec"),
        ("split", 0),
        ("planes", 0),
        ("planes", 2),
    ]
    for name, value in bad:
        with pytest.raises(LayoutError):
            replace(layout, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="differ"):
        PagedLayout.of([page(), replace(page(), head_size=4)], "bfloat16")
    with pytest.raises(LayoutError, match="at least one layer"):
        PagedLayout.of([], "bfloat16")
