"""Rows over whole structures: addresses in the order kernels expect, strides of blocks, constants for rows."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import (
    EngineKVFormat,
    KVFormat,
    block_stride_elems,
    get_group_data_ptrs,
    kv_format,
    kv_formats,
    layer_shape,
    layer_tensors,
    register_kv_format,
    table,
)

QUICK = settings(max_examples=60, deadline=None)
SIZES = {"NB": 6, "NL": 3, "BS": 4, "NH": 5, "HS": 8, "CS": 16, "PBS": 24, "T": 7}


@dataclass
class FakeTensor:
    """Shape, strides and an address, without memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0
    dtype: str = "torch.float16"

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.address


def tensor(row: KVFormat, address: int = 0, pad: int = 0, **other: int) -> FakeTensor:
    size = {**SIZES, **other}
    strides = row.strides(size)
    return FakeTensor(row.shape(size), (strides[0] + pad, *strides[1:]), address)


# --- addresses ---------------------------------------------------------------------------------------------

LAYERS = range(3)
K, V = 100, 200  # address of layer i's K is 100 + i, of its V 200 + i


def structure(row: KVFormat) -> Any:
    """Three layers as an engine nests them in this row."""
    if row.is_cross_layer:
        return tensor(row, K)
    if row.is_kv_list:
        return [[tensor(row, base + i) for i in LAYERS] for base in (K, V)]
    if row.is_kv_second_tuple:
        return [(tensor(row, K + i), tensor(row, V + i)) for i in LAYERS]
    return [tensor(row, K + i) for i in LAYERS]


# What to expect of all layers, and of layers 2 and 0.
_SINGLE = ([100, 101, 102], [102, 100])
_LISTS = ([100, 101, 102, 200, 201, 202], [102, 100, 202, 200])
_TUPLES = ([100, 200, 101, 201, 102, 202], [102, 202, 100, 200])
ORDER = {row.id: _SINGLE for row in kv_formats()} | {
    **{cross_layer: ([100], None) for cross_layer in (0, 8)},
    **dict.fromkeys((4, 9), _LISTS),
    **dict.fromkeys((16, 17, 100), _TUPLES),
}


@pytest.mark.parametrize("row", kv_formats(), ids=lambda row: row.name)
def test_addresses_come_in_the_order_that_kernels_expect(row: KVFormat) -> None:
    everything, some = ORDER[row.id]
    assert get_group_data_ptrs(structure(row), row.id, LAYERS) == everything
    if some is None:  # a bare tensor may come in a list of one
        assert get_group_data_ptrs([structure(row)], row.id, LAYERS) == everything
    else:
        assert get_group_data_ptrs(structure(row), row, [2, 0]) == some


def test_layers_of_a_cross_layer_tensor_have_one_address_together() -> None:
    for wrong in ([0], [0, 1], [2, 1, 0], [0, 1, 2, 3], []):
        with pytest.raises(LayoutError, match="only be taken together"):
            get_group_data_ptrs(structure(kv_format(0)), 0, wrong)


def test_layers_of_other_formats_do_not_matter_to_the_addresses_of_a_group() -> None:
    mla, pairs = kv_format(3), kv_format(16)
    mixed = [tensor(mla, 1), (tensor(pairs, 2), tensor(pairs, 3)), object()]
    assert get_group_data_ptrs(mixed, 3, [0]) == [1]
    assert get_group_data_ptrs(mixed, 16, [1]) == [2, 3]


def test_structures_that_are_not_the_row_s_are_refused() -> None:
    row = kv_format(12)
    cases: list[tuple[Any, int, list[int], str]] = [
        (structure(row), 12, [3], "layer 3: expected 0 to 2"),
        (structure(row), 12, [-1], "layer -1"),
        (tensor(row), 12, [0], "for level NL"),
        (structure(row), 16, [0], "for level 2"),
        ([structure(kv_format(9))[0]], 9, [0], "K and V, got 1"),
        ([structure(kv_format(9))[0], structure(kv_format(9))[1][:2]], 9, [0], "3 K tensors and 2 V"),
        ([structure(row), structure(row)], 0, [0], "expected one tensor"),
    ]
    for kv, fmt, layers, text in cases:
        with pytest.raises(LayoutError, match=text):
            get_group_data_ptrs(kv, fmt, layers)


def test_each_layer_has_its_tensors_whatever_the_nesting() -> None:
    for row in kv_formats():
        per_layer = layer_tensors(structure(row), row)
        assert len(per_layer) == 3
        addresses = {t.address for tensors in per_layer for t in tensors}
        assert addresses == set(ORDER[row.id][0])
        if row.depth:
            assert all(t.address % 100 == i for i, tensors in enumerate(per_layer) for t in tensors)


# --- strides and sizes -------------------------------------------------------------------------------------

STRIDED = {3, 12, 13, 14, 17, 18}


def test_rows_whose_block_is_one_piece_take_a_stride_between_blocks() -> None:
    assert {row.id for row in kv_formats() if row.takes_block_stride} == STRIDED


@pytest.mark.parametrize("row", kv_formats(), ids=lambda row: row.name)
@given(pad=st.integers(0, 9))
@QUICK
def test_padding_between_blocks_is_told_or_refused(row: KVFormat, pad: int) -> None:
    if row.id == 100:
        assert block_stride_elems(row, tensor(row, pad=pad)) == 0  # its outermost axis has one entry
        return
    padded = tensor(row, pad=pad)
    if row.id in STRIDED:
        assert block_stride_elems(row, padded) == row.strides(SIZES)[0] + pad
    elif pad:
        with pytest.raises(LayoutError, match=f"padded.*{row.strides(SIZES)[0]} long"):
            block_stride_elems(row, padded)
    else:
        assert block_stride_elems(row, padded) == 0


def test_the_stride_of_a_single_block_says_nothing() -> None:
    row = kv_format(13)
    assert block_stride_elems(row, tensor(row, pad=7, NB=1)) == 4 * 5 * 16
    wild = replace(tensor(row, NB=1), strides=(3, 80, 16, 1))
    assert block_stride_elems(row, wild) == 4 * 5 * 16


def test_gaps_in_a_page_have_no_block_stride() -> None:
    for strides in [(320, 80, 16, 2), (400, 100, 20, 1), (64, 80, 16, 1)]:
        with pytest.raises(LayoutError, match="gaps inside a page"):
            block_stride_elems(kv_format(13), FakeTensor((6, 4, 5, 16), strides))


@pytest.mark.parametrize("row", [r for r in kv_formats() if r.is_block_addressable], ids=lambda row: row.name)
def test_sizes_of_a_layer_are_read_off_its_tensors(row: KVFormat) -> None:
    (tensors, *_) = layer_tensors(structure(row), row)
    shape = layer_shape(row, tensors)
    heads = 1 if row.is_mla else 5
    head_size = {10: 16, 11: 16, 12: 16, 13: 16, 17: 16}.get(row.id, 8)
    assert shape == (6, 4, heads, head_size, 2)
    assert row.page_bytes(4, heads, head_size, 2) * 6 * (3 if row.is_cross_layer else 1) == sum(
        2 * t.shape[0] * t.strides[0] for t in tensors
    )


# --- constants ---------------------------------------------------------------------------------------------


def test_every_row_is_a_constant_that_is_its_id() -> None:
    assert [(member.value, member.name) for member in EngineKVFormat] == [
        (r.id, r.name) for r in kv_formats()
    ]
    assert EngineKVFormat.NL_X_NB_NH_BS_CS == 12 == EngineKVFormat(12)
    assert kv_format(EngineKVFormat(12)) is kv_format(12)
    assert pickle.loads(pickle.dumps(EngineKVFormat(12))) is EngineKVFormat(12)


@pytest.mark.parametrize("value", [77, -1, "NL_X_NB_BS_HS", None, 1.5])
def test_a_constant_that_no_row_has_is_refused(value: object) -> None:
    with pytest.raises(LayoutError, match="KV format"):
        EngineKVFormat(value)


def test_a_plugin_s_row_is_a_constant_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_by_id", "_by_name"):
        monkeypatch.setattr(table, name, dict(getattr(table, name)))
    with pytest.raises(LayoutError, match="77777"):
        EngineKVFormat(77777)
    register_kv_format(KVFormat(77777, "NB_MINE", "NL x [NB, BS, HS]"))
    mine = EngineKVFormat(77777)
    assert (mine, mine.name) == (77777, "NB_MINE")
    assert mine is EngineKVFormat(77777)
    assert mine not in list(EngineKVFormat)
