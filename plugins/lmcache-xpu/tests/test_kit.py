"""The ops on the SYCL runtime's CPU device: the conformance kit's own tests, all formats and both ways.

The kit's tests are the functions imported here; they compare with a reference in numpy that shares no code with what
it judges. What follows them is that the kernel serves what it can, and that the rest goes to the baseline.
"""

# ruff: noqa: F401, F403

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin

from lmcache.testing.blocks import GATHER, OP, SCATTER, BlockTransfer
from lmcache.testing.suite import test_slot_transfer as slot_tests
from lmcache.testing.suite.test_block_transfer import *
from lmcache.testing.suite.test_faults import (
    kind,
    row,
    test_a_block_id_out_of_range_writes_nothing_outside,
    test_a_format_that_is_not_served_is_refused_by_name,
    test_arguments_that_make_no_sense_are_refused_and_nothing_moves,
)
from lmcache.testing.suite.test_memory import (
    test_async_copies_move_every_byte_and_no_other,
    test_async_copies_of_nothing_move_nothing,
    test_host_memory_is_zeroed_usable_from_end_to_end_and_freed_once,
    test_host_memory_of_no_size_is_refused,
)
from lmcache.testing.suite.test_slot_transfer import *
from lmcache.v1.kv_layout import kv_format, kv_formats
from lmcache.v1.platform import torch_ops
from lmcache_xpu.ops import XpuDeviceOps

pytestmark = [pytest.mark.torch]


@pytest.fixture(autouse=True)
def on_the_cpu_device(module: Any) -> Iterator[None]:
    with standin.installed(everything_is_device=True):
        yield


@pytest.fixture
def ops() -> XpuDeviceOps:
    made = XpuDeviceOps()
    made.ensure_native()
    return made


@pytest.fixture
def device() -> Any:
    return torch.device("cpu")


@pytest.fixture
def dev(module: Any) -> Any:
    return SimpleNamespace(
        synchronize=lambda: module.queue_wait(standin.current_queue()), device_count=lambda: 1
    )


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the baseline is asked to move anything."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the baseline was asked")

    for name in (OP, "multi_layer_kv_transfer", "single_layer_kv_transfer", "single_layer_kv_transfer_sgl"):
        monkeypatch.setattr(torch_ops, name, refuse)


@pytest.mark.parametrize("operands", ["tensors", "pointers"])
@pytest.mark.parametrize("way", [GATHER, SCATTER])
def test_blocks_of_every_format_go_to_the_kernel(
    ops: XpuDeviceOps, device: Any, dev: Any, no_baseline: None, operands: str, way: int
) -> None:
    served = ops.supported_formats(OP)
    assert served == tuple(row.id for row in kv_formats() if row.is_block_addressable)
    for fmt in served:
        if operands == "pointers" and "NP" in kv_format(fmt).dims.levels:
            continue  # addresses do not tell the widths of planes
        one = BlockTransfer(ops, device, kv_format(fmt), operands, [4, 0, 7, 2], 1, way, "float16")
        one.expect()
        one.run()
        dev.synchronize()
        assert not one.fault(), f"{kv_format(fmt).label}: {one.fault()}"


def test_slots_of_every_format_go_to_the_kernel(ops: XpuDeviceOps, device: Any, no_baseline: None) -> None:
    for fmt in ops.supported_formats("multi_layer_kv_transfer"):
        row = kv_format(fmt)
        for operands in ("tensors",) if "NP" in row.dims.levels else ("tensors", "pointers"):
            slot_tests.test_exactly_the_named_slots_move(
                ops, device, SimpleNamespace(synchronize=int), (row, operands), 1
            )


def test_a_single_layer_goes_to_the_kernel(ops: XpuDeviceOps, device: Any, no_baseline: None) -> None:
    dev = SimpleNamespace(synchronize=int)
    for fmt in ops.supported_formats("single_layer_kv_transfer"):
        if kv_format(fmt).dims.levels == ("NL",):
            slot_tests.test_one_layer_moves_exactly_the_named_slots(ops, device, dev, kv_format(fmt), 0)
    slot_tests.test_one_layer_of_k_and_v_moves_exactly_the_named_slots(ops, device, dev, 1, True)


def test_what_the_contract_has_is_bound_and_nothing_is_refused(ops: XpuDeviceOps) -> None:
    report = ops.binding_report()
    assert report.refused == {}
    assert report.abi == standin.native.load().LMCACHE_NATIVE_ABI
    ordered = {"record_completion_on_stream", "drain_recorded_completions", OP, "lmcache_memcpy_async"}
    assert ordered <= set(report.bound)
    assert set(report.absent) == {
        "batch_memcpy_supported",
        "direct_copy_format_supported",
        "execute_cb_retrieve_plan_flat",
        "execute_direct_copy_transfer",
        "execute_object_group_transfer",
        "pop_completed_phase_timings",
    }
