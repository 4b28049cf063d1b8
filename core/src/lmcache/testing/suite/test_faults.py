"""What is wrong is refused with a reason, or at least does no harm; and work goes on behind it."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.arrays import same
from lmcache.testing.blocks import GATHER, OP, SCATTER, BlockTransfer
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device", "block-transfer")

_GOOD_IDS = [3, 1, 4]
_HUGE = 1 << 50


@pytest.fixture
def row(ops: DeviceOps) -> KVFormat:
    served = [found for found in ops.supported_formats(OP) if kv_format(found).mark is None]
    assert served, "multi_layer_block_kv_transfer serves no format"
    return kv_format(13 if 13 in served else served[0])


@pytest.fixture(params=["tensors", "pointers"])
def kind(request: pytest.FixtureRequest, ops: DeviceOps) -> str:
    if request.param not in ops.operand_kinds(OP):
        pytest.skip(f"operands not declared: {request.param}")
    return str(request.param)


def _goes_on(ops: DeviceOps, device: Any, dev: Any, row: KVFormat, kind: str) -> None:
    for way in (GATHER, SCATTER):
        one = BlockTransfer(ops, device, row, kind, _GOOD_IDS, 0, way, "bfloat16")
        one.expect()
        one.run()
        dev.synchronize()
        assert not one.fault(), f"after that a sound transfer went wrong: {one.fault()}"


@pytest.mark.parametrize("bad", [9, 10, 1 << 20, -1], ids=["the next", "one more", "far away", "negative"])
@pytest.mark.parametrize("way", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_a_block_id_out_of_range_writes_nothing_outside(
    ops: DeviceOps, device: Any, dev: Any, row: KVFormat, kind: str, bad: int, way: int
) -> None:
    """A kernel cannot refuse ids that lie on the device; it can leave them alone."""
    one = BlockTransfer(ops, device, row, kind, [2, bad, 5], 0, way, "bfloat16")
    try:
        one.run()
        dev.synchronize()
    except Exception:
        assert same(one.pages.tensors, one.before[0].nested), "it was refused, and pages were written before"
        assert same(one.objects.tensors, one.before[1]), "it was refused, and objects were written before"
    assert one.pages.intact() and one.objects.intact(), "memory beside the tensors was written"  # noqa: PT018
    if way == SCATTER:
        _only(one, {2, 5})
    _goes_on(ops, device, dev, row, kind)


def _only(one: BlockTransfer, allowed: set[int]) -> None:
    """Whether no page but those of ``allowed`` differs from what it was."""
    import numpy as np

    from lmcache.testing.arrays import flat, to_host

    axis_of = one.row.block_axis
    assert axis_of is not None
    for mine, was in zip(flat(one.pages.tensors), one.before[0].in_pointer_order(), strict=True):
        for block in set(range(was.shape[axis_of])) - allowed:
            now = np.take(to_host(mine), block, axis_of)
            assert np.array_equal(now, np.take(was, block, axis_of)), f"block {block} was written"


@pytest.mark.parametrize(
    "change",
    [{"chunk_size": 13}, {"chunk_size": 0}, {"skip": -1}, {"way": 7}],
    ids=["chunk is no multiple", "chunk is nothing", "negative skip", "no direction"],
)
def test_arguments_that_make_no_sense_are_refused_and_nothing_moves(
    ops: DeviceOps, device: Any, dev: Any, row: KVFormat, kind: str, change: dict[str, int]
) -> None:
    one = BlockTransfer(ops, device, row, kind, _GOOD_IDS, 0, SCATTER, "bfloat16")
    with pytest.raises(Exception):  # noqa: B017,PT011 -- which class is the backend's choice
        one.run(**change)
    dev.synchronize()
    assert not one.fault()
    _goes_on(ops, device, dev, row, kind)


def test_a_format_that_is_not_served_is_refused_by_name(
    ops: DeviceOps, device: Any, dev: Any, row: KVFormat, kind: str
) -> None:
    absent = [found for found in kv_formats() if found.id not in ops.supported_formats(OP)]
    assert absent, "rows without blocks cannot be served by a block transfer"
    one = BlockTransfer(ops, device, row, kind, _GOOD_IDS, 0, GATHER, "bfloat16")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        one.run(format=absent[0].id)
    dev.synchronize()
    assert absent[0].name in str(caught.value) or str(absent[0].id) in str(caught.value), str(caught.value)
    assert not one.fault()


def test_out_of_memory_is_an_error_and_work_goes_on(
    ops: DeviceOps, device: Any, dev: Any, row: KVFormat, kind: str
) -> None:
    import torch

    with pytest.raises((RuntimeError, MemoryError)):
        torch.empty(_HUGE, dtype=torch.uint8, device=device)
    _goes_on(ops, device, dev, row, kind)
