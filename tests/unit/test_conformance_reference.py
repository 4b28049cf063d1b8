"""The kit's numpy reference and the torch baseline agree, though they share no code."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lmcache.v1.kv_layout import kv_format, kv_formats
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

BLOCKED = [row for row in kv_formats() if row.is_block_addressable]


@pytest.mark.parametrize("row", BLOCKED, ids=lambda row: row.name)
@pytest.mark.parametrize("way", [0, 1], ids=["scatter", "gather"])
def test_blocks_move_alike(row: Any, way: int) -> None:
    from lmcache.testing.blocks import BlockTransfer

    one = BlockTransfer(CpuDeviceOps(), torch.device("cpu"), row, "tensors", [3, 8, 0, 5], 1, way, "float16")
    one.expect()
    one.run()
    assert one.fault() == ""


def test_a_gather_and_a_scatter_to_other_blocks_carry_the_same_bytes() -> None:
    import numpy as np

    from lmcache.testing import reference

    for row in BLOCKED:
        source = reference.build(row, reference.Case(), 2, seed=1)
        target = reference.build(row, reference.Case(), 2, seed=2)
        objects = reference.make_objects(source, 2, 2, 2)
        reference.gather(source, objects, [1, 2, 3, 4])
        reference.scatter(target, objects, [8, 7, 6, 5])
        for mine, theirs in zip(target.in_pointer_order(), source.in_pointer_order(), strict=True):
            axis = row.block_axis
            assert np.array_equal(np.take(mine, [8, 7, 6, 5], axis), np.take(theirs, [1, 2, 3, 4], axis))


def test_a_fault_of_any_kind_is_noticed() -> None:
    from lmcache.testing.blocks import BlockTransfer

    for spoil in ("pages", "objects", "beside"):
        one = BlockTransfer(
            CpuDeviceOps(), torch.device("cpu"), kv_format(13), "tensors", [3, 8], 0, 1, "uint8"
        )
        one.expect()
        one.run()
        assert one.fault() == ""
        if spoil == "beside":
            one.pages._wholes[0][5] ^= 1
        else:
            tensor = getattr(one, spoil).tensors[0].view(-1)
            tensor[-1] ^= 1
        assert one.fault() != ""


def test_slots_and_blocks_of_the_reference_agree() -> None:
    import numpy as np

    from lmcache.testing import reference

    for row in BLOCKED:
        if not row.token_addressable:
            continue
        paged = reference.build(row, reference.Case(), 2)
        (chunk,) = reference.make_objects(paged, 2, 1, 2)
        by_block, by_slot = [chunk.copy()], copy.deepcopy(chunk)
        reference.gather(paged, by_block, [5, 2])
        reference.move_slots(paged, by_slot, [*range(20, 24), *range(8, 12)], to_pages=False)
        assert np.array_equal(by_block[0], by_slot)
