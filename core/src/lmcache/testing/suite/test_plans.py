"""Ops that only native modules have: a plan does what its steps do one by one, in numpy."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.arrays import flat
from lmcache.testing.blocks import GATHER, SCATTER
from lmcache.testing.plans import DIRECT, GROUPS, DirectPlan, GroupPlan
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device")

_WAYS = {"gather": GATHER, "scatter": SCATTER}


def _faults(plan_of: Any, op: str, ops: DeviceOps, device: Any, dev: Any, way: int) -> dict[str, str]:
    """Per declared format, what is wrong."""
    found = {}
    for number in ops.supported_formats(op):
        row = kv_format(number)
        plan = plan_of(ops, device, row, way)
        plan.expect()
        plan.run()
        dev.synchronize()
        if fault := plan.fault():
            found[row.name] = fault
    return found


@needs("group-plans")
@pytest.mark.parametrize("way", _WAYS)
def test_a_plan_does_its_steps_one_after_the_other(ops: DeviceOps, device: Any, dev: Any, way: str) -> None:
    assert not _faults(GroupPlan, GROUPS, ops, device, dev, _WAYS[way])


@needs("group-plans", "asynchronous")
def test_a_plan_begins_after_the_work_before_it(ops: DeviceOps, device: Any, dev: Any, stall: Any) -> None:
    plan = GroupPlan(ops, device, kv_format(ops.supported_formats(GROUPS)[0]), GATHER)
    late = [tensor.clone() for tensor in flat(plan.groups[0].there.tensors)]
    for tensor in flat(plan.groups[0].there.tensors):
        tensor.zero_()
    plan.expect()
    dev.synchronize()
    stall()
    for tensor, good in zip(flat(plan.groups[0].there.tensors), late, strict=True):
        tensor.copy_(good, non_blocking=True)
    plan.run()
    dev.synchronize()
    assert not plan.fault()


@needs("group-plans")
def test_a_plan_that_is_timed_says_how_long_each_phase_took(ops: DeviceOps, device: Any, dev: Any) -> None:
    if not hasattr(ops, "pop_completed_phase_timings"):
        pytest.skip("not there: pop_completed_phase_timings")
    dev.synchronize()
    ops.pop_completed_phase_timings()
    plan = GroupPlan(ops, device, kv_format(ops.supported_formats(GROUPS)[0]), GATHER)
    began = time.time()
    plan.run(True, "a session")
    dev.synchronize()
    timed = ops.pop_completed_phase_timings()
    assert {int(row[0]) for row in timed} == {int(phase) for phase in ops.TransferPhase}
    for _, way, where, spent, nbytes, session, start, end in timed:
        assert (int(way), session) == (GATHER, "a session"), where
        assert spent >= 0, "milliseconds"
        assert nbytes > 0
        assert began - 1 <= start <= end <= time.time() + 1, "seconds since 1970"
    assert ops.pop_completed_phase_timings() == [], "what was taken is told again"


@needs("direct-copies")
@pytest.mark.parametrize("way", _WAYS)
def test_a_direct_copy_moves_exactly_the_named_objects(
    ops: DeviceOps, device: Any, dev: Any, way: str
) -> None:
    if not ops.batch_memcpy_supported():
        pytest.skip("batch_memcpy_supported() is False: the driver has no batched copies")
    assert not _faults(DirectPlan, DIRECT, ops, device, dev, _WAYS[way])


def test_the_ops_of_direct_copies_come_together_and_agree(ops: DeviceOps) -> None:
    names = (DIRECT, "batch_memcpy_supported", "direct_copy_format_supported")
    there = [name for name in names if hasattr(ops, name)]
    if not there:
        pytest.skip("not declared: direct-copies")
    assert there == list(names), f"of {names} only {there} are there"
    from lmcache.v1.kv_layout import kv_formats

    said = tuple(row.id for row in kv_formats() if ops.direct_copy_format_supported(row.id))
    assert said == ops.supported_formats(DIRECT), "direct_copy_format_supported and supported_formats differ"


def test_no_op_is_there_whose_plan_is_not_settled(ops: DeviceOps) -> None:
    assert not hasattr(ops, "execute_cb_retrieve_plan_flat"), "the widths of its rows are not fixed yet"
