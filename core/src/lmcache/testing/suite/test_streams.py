"""Asynchrony told honestly: what is said to be done is done, and saying so waits for nothing else."""

from __future__ import annotations

import threading
import time
from typing import Any

from lmcache.testing import needs, not_shown
from lmcache.testing.arrays import flat
from lmcache.testing.blocks import GATHER, OP, BlockTransfer
from lmcache.testing.stall import LONG
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec

pytestmark = needs("device")

_WAIT_SECONDS = 10.0  # for what comes at once
_KIND = "lmcache.verify"


def _drained(ops: DeviceOps) -> list[bytes]:
    return [payload for kind, payload in ops.drain_recorded_completions() if kind == _KIND]


def _told(ops: DeviceOps, count: int) -> list[bytes]:
    """The next ``count`` completions, once they are there."""
    told: list[bytes] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(told) < count:
        assert time.monotonic() < deadline, f"{len(told)} of {count} completions came"
        told += _drained(ops)
        time.sleep(0.001)
    return told


def _marked(spec: DeviceSpec, device: Any) -> Any:
    """An event at the present end of the current stream."""
    event = spec.create_stream_event(device)
    spec.record_stream_event(event, spec.current_stream(device))
    return event


@needs("completion", "stream-handle")
def test_a_completion_is_told_once_and_after_the_work_before_it(
    ops: DeviceOps, spec: DeviceSpec, device: Any, dev: Any, stall: Any
) -> None:
    _drained(ops)
    stall(0.1)
    event = _marked(spec, device)
    ops.record_completion_on_stream(spec.get_stream_handle(spec.current_stream(device)), _KIND, b"one\0\xff")
    assert _told(ops, 1) == [b"one\0\xff"]
    assert spec.is_stream_event_complete(event), "the completion came before the work was done"
    dev.synchronize()
    assert _drained(ops) == [], "the completion came twice"


@needs("completion", "stream-handle")
def test_completions_of_a_stream_keep_their_order(
    ops: DeviceOps, spec: DeviceSpec, device: Any, dev: Any
) -> None:
    _drained(ops)
    handle = spec.get_stream_handle(spec.current_stream(device))
    payloads = [index.to_bytes(2, "big") for index in range(64)]
    for payload in payloads:
        ops.record_completion_on_stream(handle, _KIND, payload)
    dev.synchronize()
    assert _told(ops, len(payloads)) == payloads


@needs("completion", "stream-handle")
def test_no_completion_of_many_threads_is_lost(
    ops: DeviceOps, spec: DeviceSpec, device: Any, dev: Any
) -> None:
    _drained(ops)
    handle = spec.get_stream_handle(spec.current_stream(device))

    def record(thread: int) -> None:
        for index in range(100):
            ops.record_completion_on_stream(handle, _KIND, bytes([thread, index]))

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dev.synchronize()
    assert sorted(_told(ops, 400)) == [bytes([a, b]) for a in range(4) for b in range(100)]


@needs("completion", "stream-handle", "asynchronous")
def test_a_busy_stream_delays_the_completion(
    ops: DeviceOps, spec: DeviceSpec, device: Any, dev: Any, stall: Any
) -> None:
    _drained(ops)
    stall()
    event = _marked(spec, device)
    ops.record_completion_on_stream(spec.get_stream_handle(spec.current_stream(device)), _KIND, b"late")
    busy = False
    told: list[bytes] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while not told or not spec.is_stream_event_complete(event):
        told += _drained(ops)
        at_work = not spec.is_stream_event_complete(
            event
        )  # asked last: if it is busy now, it was busy before
        assert not (at_work and told), "the completion was told while its stream was at work"
        busy |= at_work
        assert time.monotonic() < deadline, "the completion never came"
        time.sleep(0.01)
    dev.synchronize()
    assert told == [b"late"]
    if not busy:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")


@needs("asynchronous")
def test_an_event_is_not_complete_while_the_work_before_it_runs(
    spec: DeviceSpec, device: Any, dev: Any, stall: Any
) -> None:
    dev.synchronize()
    began = time.monotonic()
    stall()
    event = _marked(spec, device)
    first = spec.is_stream_event_complete(event)
    asked = time.monotonic() - began
    spec.synchronize_stream(spec.current_stream(device))
    took = time.monotonic() - began
    assert spec.is_stream_event_complete(event), "the stream was waited for, and its event is not complete"
    if took < LONG / 2 or asked > took / 2:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")
    assert not first, f"it was complete after {asked:.3f} s, and the work took {took:.3f} s"


@needs("asynchronous")
def test_asking_an_event_does_not_wait(spec: DeviceSpec, device: Any, dev: Any, stall: Any) -> None:
    dev.synchronize()
    stall()
    event = _marked(spec, device)
    began = time.monotonic()
    for _ in range(10):
        spec.is_stream_event_complete(event)
    asked = time.monotonic() - began
    spec.synchronize_stream(spec.current_stream(device))
    left = time.monotonic() - began
    assert asked < LONG / 2, f"asking took {asked:.3f} s of the {left:.3f} s that the work took"
    if left < LONG / 2:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")


@needs("asynchronous", "block-transfer")
def test_a_transfer_begins_after_the_work_before_it_and_ends_before_the_work_behind_it(
    ops: DeviceOps, device: Any, dev: Any, stall: Any
) -> None:
    served = ops.supported_formats(OP)
    kind = sorted(ops.operand_kinds(OP))[-1]
    row = kv_format(13 if 13 in served else served[0])
    one = BlockTransfer(ops, device, row, kind, [4, 0, 7], 0, GATHER, "bfloat16")
    one.expect()
    held = [tensor.clone() for tensor in flat(one.pages.tensors)]
    for tensor in flat(one.pages.tensors):
        tensor.zero_()
    transfer = one.prepared()  # operands on the device, so that nothing waits for the stream below
    dev.synchronize()
    stall(LONG / 2)
    for tensor, was in zip(flat(one.pages.tensors), held, strict=True):
        tensor.copy_(was)  # behind the work that keeps the stream busy
    transfer()
    for tensor in flat(one.pages.tensors):
        tensor.zero_()
    for tensor, was in zip(flat(one.pages.tensors), held, strict=True):
        tensor.copy_(was)
    dev.synchronize()
    assert not one.fault()
