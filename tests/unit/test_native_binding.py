"""What a native module may replace, what it may not, and what is told about it."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform.base.device_ops import CONTRACT_OPS, NATIVE_ABI, STREAM_ORDERED_OPS, DeviceOps
from lmcache.v1.platform.base.op_contract import OPS, stream_ordered
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps

BLOCK_OP = "multi_layer_block_kv_transfer"


def nothing() -> list[Any]:
    return []


def native(**members: Any) -> ModuleType:
    module = ModuleType("foo_native")
    vars(module).update(members)
    return module


def test_a_report_accounts_for_every_op_once() -> None:
    class Ops(DeviceOps):
        def calculate_cdf(self, symbols: Any, num_bins: int) -> Any:
            return "own"

    class StagingCopy:
        pass

    ops = Ops()
    ops.bind_native(
        native(
            drain_recorded_events=nothing,
            lmcache_memcpy_async=lambda dest, src, nbytes, direction, offset, alignments: None,
            StagingCopy=StagingCopy,
            helper=len,
            LMCACHE_NATIVE_ABI=NATIVE_ABI,
        )
    )
    report = ops.binding_report()
    assert report.bound == ("drain_recorded_events", "lmcache_memcpy_async")
    assert report.overridden == ("calculate_cdf",)
    assert BLOCK_OP in report.baseline
    assert "execute_object_group_transfer" in report.absent
    served = [*report.bound, *report.overridden, *report.baseline, *report.absent]
    assert sorted(served) == sorted(CONTRACT_OPS)
    assert (report.types, report.extras) == (("StagingCopy",), ("helper",))
    assert (report.modules, report.abi, report.refused) == (("foo_native",), NATIVE_ABI, {})
    assert str(report).startswith("2 native, 1 own, ")
    assert report.as_dict()["modules"] == ("foo_native",)
    assert DeviceOps().binding_report().bound == ()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (BLOCK_OP, lambda paged, objects: None, "callers pass (paged, objects, block_ids"),
        (BLOCK_OP, lambda a, b, c, d, e, f, g, h: None, "skip_prefix_n_blocks"),
        ("calculate_cdf", lambda *, symbols, num_bins: None, "callers pass (symbols, num_bins) by position"),
        ("drain_recorded_events", lambda device: None, "callers pass ()"),
        ("calculate_cdf", type("calculate_cdf", (), {}), "expected a function"),
        ("calculate_cdf", 7, "it is int: expected a function"),
        ("StagingCopy", lambda: None, "it is function: expected a class"),
    ],
)
def test_what_cannot_stand_for_a_name_is_refused_and_warned_about(
    name: str, value: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ops = DeviceOps()
    with caplog.at_level(logging.WARNING, "lmcache"):
        ops.bind_native(native(**{name: value}))
    assert why in ops.binding_report().refused[name]
    assert name not in vars(ops)
    assert [r.getMessage() for r in caplog.records if f"foo_native.{name} is not bound: " in r.getMessage()]


def test_a_function_may_take_more_and_one_without_a_signature_is_trusted() -> None:
    ops = DeviceOps()
    ops.bind_native(
        native(
            drain_recorded_events=lambda device=None, *, flag=False: [],
            calculate_cdf=lambda *args: None,
            batched_memcpy=max,
        )
    )
    assert set(ops.binding_report().bound) == {"drain_recorded_events", "calculate_cdf", "batched_memcpy"}


@pytest.mark.parametrize(("declared", "remedy"), [(99, "a newer lmcache"), (0, "a newer foo_native")])
def test_a_module_for_another_native_abi_is_refused_whole(declared: int, remedy: str) -> None:
    ops = DeviceOps()
    with pytest.raises(DeviceError) as caught:
        ops.bind_native(native(LMCACHE_NATIVE_ABI=declared, drain_recorded_events=nothing))
    for part in (f"native ABI {declared}", f"native ABI {NATIVE_ABI}", f"install {remedy}"):
        assert part in str(caught.value)
    assert ops.binding_report().bound == ()


def test_a_baseline_that_keeps_no_stream_order_never_stands_in_for_one_that_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(stream_ptr: int, kind: str, payload: bytes) -> str:
        return "at once"

    monkeypatch.setattr(torch_ops, "record_completion_on_stream", at_once, raising=False)
    monkeypatch.setattr(torch_ops, "drain_recorded_completions", list, raising=False)
    monkeypatch.setattr(
        torch_ops, "record_event_on_stream", stream_ordered(lambda *args: "in order"), raising=False
    )
    ops = DeviceOps()
    assert not hasattr(ops, "record_completion_on_stream")
    with pytest.raises(
        AttributeError, match="no stream-ordered device operation 'record_completion_on_stream'"
    ):
        ops.record_completion_on_stream(0, "k", b"")
    assert ops.drain_recorded_completions() == []
    assert ops.record_event_on_stream(0) == "in order"
    assert CpuDeviceOps().record_completion_on_stream(0, "k", b"") == "at once"

    at_once.stream_ordered = False  # type: ignore[attr-defined]  # a vendor's own admission
    ops.bind_native(native(record_completion_on_stream=at_once))
    assert "not stream-ordered" in ops.binding_report().refused["record_completion_on_stream"]


def test_the_table_names_the_ops_whose_order_callers_rely_on() -> None:
    assert {BLOCK_OP, "lmcache_memcpy_async", "record_completion_on_stream"} <= STREAM_ORDERED_OPS
    assert not {"tensor_from_ptr", "drain_recorded_completions", "batched_memcpy"} & STREAM_ORDERED_OPS
    assert OPS[BLOCK_OP].optional == ("skip_prefix_n_blocks",)
    assert len(OPS[BLOCK_OP].required) == 8
    assert OPS["drain_recorded_events"].required == ()
