"""Ops that move single tokens, against the numpy reference, slot by slot."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from lmcache.testing import needs, reference
from lmcache.testing.arrays import Guarded, flat, same
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device")

_ALL, _UNILATERAL = "multi_layer_kv_transfer", "multi_layer_kv_transfer_unilateral"
_SINGLE, _PAIR = "single_layer_kv_transfer", "single_layer_kv_transfer_sgl"
_FLASH = ("load_and_reshape_flash", "reshape_and_cache_back_flash")
_GATHER, _SCATTER = 1, 0
_CASE = reference.Case(blocks=6, block_size=4, heads=3)
_SLOTS = [5, 4, -1, 11, 23, 0, 17, -1, 16, 2]


def _forms(op: str) -> list[Any]:
    """Formats with slots, by the kinds of operands that can name their tensors."""
    return [
        pytest.param((row, kind), id=f"{row.name}-{kind}")
        for row, kind in itertools.product(kv_formats(), ("tensors", "pointers"))
        if row.token_addressable
        and (row.is_block_addressable or row.is_pbs_fused)
        and not (kind == "pointers" and "NP" in row.dims.levels)
        and (op == _ALL or (op == _UNILATERAL and (row.is_kv_list or row.is_mla)))
    ]


def _declared(ops: DeviceOps, op: str, row: KVFormat | None = None, kind: str = "tensors") -> None:
    """Skip unless the backend says that ``op`` serves this."""
    if not hasattr(ops, op):
        pytest.skip(f"not there: {op}")
    if row is not None and row.id not in ops.supported_formats(op):
        pytest.skip(f"format not declared: {row.name}")
    if kind not in ops.operand_kinds(op):
        pytest.skip(f"operands not declared: {kind}")


class _Move:
    """Pages and one object on the device, and the same in numpy."""

    def __init__(self, device: Any, row: KVFormat) -> None:
        import torch

        self.device, self.row = device, row
        self.paged = reference.build(row, _CASE, 2)
        (chunk,) = reference.make_objects(self.paged, 3, 1, 2)
        self.chunk = np.ascontiguousarray(chunk[:, :, : len(_SLOTS)])
        self.pages = Guarded(self.paged.nested, device, torch.bfloat16)
        self.slots = torch.tensor(_SLOTS, dtype=torch.int64).to(device)
        self.put(self.chunk)

    def put(self, value: Any) -> Any:
        """Give the object another form; its tensor."""
        import torch

        self.object = Guarded(np.ascontiguousarray(value), self.device, torch.bfloat16)
        return self.object.tensors

    def pointers(self) -> Any:
        import torch

        addresses = [tensor.data_ptr() for tensor in flat(self.pages.tensors)]
        return torch.tensor(addresses, dtype=torch.int64).to(self.device)

    def check(self, dev: Any, way: int, skip: int = 0, layers: Any = (), form: Any = None) -> None:
        """Compare with the reference; ``form`` gives the object the form that the device has it in."""
        dev.synchronize()
        paged, chunk = copy.deepcopy((self.paged, self.chunk))
        part = chunk[:, list(layers)] if layers else chunk
        reference.move_slots(paged, part, _SLOTS, way == _SCATTER, skip, layers)
        assert same(self.pages.tensors, paged.nested), "the engine's pages are not what the reference has"
        wanted = np.ascontiguousarray(form(part) if form else part)
        assert same(self.object.tensors, wanted), "the object is not what the reference has"
        assert self.pages.intact(), "memory beside the pages was written"
        assert self.object.intact(), "memory beside the object was written"


_BOTH = pytest.mark.parametrize("way", [_GATHER, _SCATTER], ids=["gather", "scatter"])


@_BOTH
@pytest.mark.parametrize("form", _forms(_ALL))
def test_exactly_the_named_slots_move(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str], way: int
) -> None:
    row, kind = form
    _declared(ops, _ALL, row, kind)
    for skip in (0, 3):
        move = _Move(device, row)
        hidden = move.chunk.shape[-1]
        ops.multi_layer_kv_transfer(
            move.object.tensors,
            move.pointers() if kind == "pointers" else move.pages.tensors,
            move.slots,
            device,
            _CASE.blocks * _CASE.block_size,
            way,
            row.id,
            _CASE.block_size,
            hidden if row.is_mla else hidden // _CASE.heads,
            skip,
        )
        move.check(dev, way, skip)


@_BOTH
@pytest.mark.parametrize("form", _forms(_UNILATERAL))
def test_buffers_of_k_and_v_apart_move_exactly_the_named_slots(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str], way: int
) -> None:
    row, kind = form
    _declared(ops, _UNILATERAL, row, kind)
    move = _Move(device, row)
    operand = move.pointers() if kind == "pointers" else move.pages.tensors
    total = _CASE.blocks * _CASE.block_size
    ops.multi_layer_kv_transfer_unilateral(
        move.object.tensors, operand, move.slots, device, total, way, row.id
    )
    move.check(dev, way)


@_BOTH
@pytest.mark.parametrize(
    "row", [row for row in kv_formats() if row.dims.levels == ("NL",)], ids=lambda row: row.name
)
def test_one_layer_moves_exactly_the_named_slots(
    ops: DeviceOps, device: Any, dev: Any, row: KVFormat, way: int
) -> None:
    if not row.token_addressable:
        return  # its pages can only be taken whole
    _declared(ops, _SINGLE, row)
    for major in (False, True) if row.kv_size == 2 else (False,):
        move = _Move(device, row)
        form = _one_layer(row, major)
        mine = move.put(form(move.chunk[:, [1]]))
        ops.single_layer_kv_transfer(mine, move.pages.tensors[1], move.slots, way, row.id, major)
        move.check(dev, way, layers=(1,), form=form)


def _one_layer(row: KVFormat, token_major: bool) -> Any:
    def form(chunk: Any) -> Any:
        one = chunk[:, 0]
        return one[0] if row.kv_size == 1 else one.swapaxes(0, 1) if token_major else one

    return form


@_BOTH
@pytest.mark.parametrize("token_major", [False, True], ids=["kv first", "tokens first"])
def test_one_layer_of_k_and_v_moves_exactly_the_named_slots(
    ops: DeviceOps, device: Any, dev: Any, way: int, token_major: bool
) -> None:
    _declared(ops, _PAIR)
    move = _Move(device, kv_format("TWO_X_NL_X_NB_BS_NH_HS"))
    form = _one_layer(move.row, token_major)
    k, v = (part[1] for part in move.pages.tensors)
    ops.single_layer_kv_transfer_sgl(move.put(form(move.chunk[:, [1]])), k, v, move.slots, way, token_major)
    move.check(dev, way, layers=(1,), form=form)


@pytest.mark.parametrize("op", _FLASH)
def test_a_layer_of_the_object_moves_exactly_the_named_slots(
    ops: DeviceOps, device: Any, dev: Any, op: str
) -> None:
    _declared(ops, op)
    move = _Move(device, kv_format("TWO_X_NL_X_NB_BS_NH_HS"))
    k, v = (part[1] for part in move.pages.tensors)
    getattr(ops, op)(move.object.tensors, k, v, move.slots, 1)
    dev.synchronize()
    way = _FLASH.index(op)  # the first reads pages
    paged, chunk = copy.deepcopy((move.paged, move.chunk))
    reference.move_slots(paged, chunk[:, 1:2], _SLOTS, bool(way), layers=(1,))
    assert same(move.pages.tensors, paged.nested)
    assert same(move.object.tensors, chunk)
