"""``multi_layer_block_kv_transfer`` against the numpy reference, for every format that the backend declares."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lmcache.testing import needs
from lmcache.testing.arrays import DTYPES, flat, same, to_host
from lmcache.testing.blocks import GATHER, OP, PER_OBJECT, SCATTER, BlockTransfer
from lmcache.v1.kv_layout import KVFormat, kv_formats
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device", "block-transfer")

CASES = {
    "in order": ([0, 1, 2, 3, 4, 5], 0),
    "permuted": ([7, 2, 5, 0, 8, 3], 0),
    "a tail": ([6, 1, 4, 2], 0),
    "a skipped prefix": ([4, 3, 8, 1, 0, 6], 2),
    "a skipped object": ([4, 3, 8, 1, 0, 6], 4),
    "one block": ([8], 0),
    "all skipped": ([4, 3], 2),
}
_WAYS = {"gather": GATHER, "scatter": SCATTER}


def _forms() -> list[Any]:
    """Formats with blocks, by the kinds of operands that can name their tensors."""
    return [
        pytest.param((row, kind), id=f"{row.name}-{kind}")
        for row, kind in itertools.product(kv_formats(), ("tensors", "pointers"))
        if row.is_block_addressable and not (kind == "pointers" and "NP" in row.dims.levels)
    ]


@pytest.fixture(params=_forms())
def form(request: pytest.FixtureRequest, ops: DeviceOps) -> tuple[KVFormat, str]:
    found: tuple[KVFormat, str] = request.param
    row, kind = found
    if row.id not in ops.supported_formats(OP):
        pytest.skip(f"format not declared: {row.name}")
    if kind not in ops.operand_kinds(OP):
        pytest.skip(f"operands not declared: {kind}")
    return found


def _done(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str], way: int, case: str = "permuted",
    dtype: str = "bfloat16",
) -> BlockTransfer:  # fmt: skip
    ids, skip = CASES[case]
    transfer = BlockTransfer(ops, device, *form, ids, skip, way, dtype)
    transfer.expect()
    transfer.run()
    dev.synchronize()
    return transfer


@pytest.mark.parametrize("way", _WAYS)
def test_exactly_the_named_blocks_move(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str], way: str
) -> None:
    faults = {case: _done(ops, device, dev, form, _WAYS[way], case).fault() for case in CASES}
    assert not any(faults.values()), {case: fault for case, fault in faults.items() if fault}


def test_every_element_type_moves_bit_by_bit(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    types = DTYPES if form[0].mark is None else (form[0].mark[0],)
    for dtype, way in itertools.product(types, _WAYS):
        fault = _done(ops, device, dev, form, _WAYS[way], "a tail", dtype).fault()
        assert not fault, f"{dtype}, {way}: {fault}"


def test_a_copy_that_is_asked_for_is_made(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    gathered = _done(ops, device, dev, form, GATHER)
    assert not same(gathered.objects.tensors, gathered.before[1]), "a gather copied nothing"
    scattered = _done(ops, device, dev, form, SCATTER)
    assert not same(scattered.pages.tensors, scattered.before[0].nested), "a scatter copied nothing"


def test_blocks_come_in_the_order_of_their_ids(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    done = _done(ops, device, dev, form, GATHER)
    size = done.before[0].case.block_size
    found, wanted = (
        _blocks(objects, size) for objects in (map(to_host, done.objects.tensors), done.after[1])
    )
    order = [next((i for i, block in enumerate(wanted) if np.array_equal(block, mine)), -1) for mine in found]
    assert order == list(range(len(wanted))), f"the blocks of ids {done.ids} came in the order {order}"


def _blocks(objects: Any, size: int) -> list[Any]:
    return [chunk[:, :, i * size : (i + 1) * size] for chunk in objects for i in range(PER_OBJECT)]


def test_no_block_is_written_that_was_not_named(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    done = _done(ops, device, dev, form, SCATTER, "a tail")
    axis_of = done.row.block_axis
    assert axis_of is not None
    for mine, was in zip(flat(done.pages.tensors), done.before[0].in_pointer_order(), strict=True):
        changed = [
            block
            for block in range(was.shape[axis_of])
            if not np.array_equal(np.take(to_host(mine), block, axis_of), np.take(was, block, axis_of))
        ]
        beyond = sorted(set(changed) - set(done.ids))
        assert not beyond, f"blocks {beyond} were written, and {sorted(done.ids)} were named"
    assert done.pages.intact(), "memory beside the pages was written"


def test_reading_pages_does_not_write_them(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    done = _done(ops, device, dev, form, GATHER, "a skipped prefix")
    assert same(done.pages.tensors, done.before[0].nested)
    assert done.objects.intact(), "memory beside the objects was written"


def test_writing_pages_does_not_write_the_objects(
    ops: DeviceOps, device: Any, dev: Any, form: tuple[KVFormat, str]
) -> None:
    done = _done(ops, device, dev, form, SCATTER, "a skipped prefix")
    assert same(done.objects.tensors, done.before[1])
