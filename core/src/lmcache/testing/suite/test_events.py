"""Events across processes: they order, they tell the truth, and asking does not wait."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lmcache.testing import needs, not_shown
from lmcache.testing.stall import LONG
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.kv_wire import export_kv_caches

pytestmark = needs("device", "event-ipc")


@pytest.fixture
def backend(spec: DeviceSpec, device: Any) -> Any:
    found = spec.event_ipc_backend
    found.check_event_support(device)
    return found


def _recorded(backend: Any, spec: DeviceSpec, device: Any) -> Any:
    event = backend.create_event(device)
    backend.record_event(event, spec.current_stream(device))
    return event


def test_the_backend_is_one_and_names_its_device(spec: DeviceSpec, backend: Any) -> None:
    assert spec.event_ipc_backend is backend
    assert backend.device_type == spec.device_type


def test_another_device_is_refused(backend: Any) -> None:
    with pytest.raises(RuntimeError):
        backend.check_event_support("another:0")


def test_an_event_that_was_never_recorded_is_complete(backend: Any, device: Any) -> None:
    assert backend.query_event(backend.create_event(device)) is True


def test_a_recorded_event_passes_once_the_work_is_done(
    backend: Any, spec: DeviceSpec, device: Any, stall: Any
) -> None:
    stall(0.05)
    event = _recorded(backend, spec, device)
    backend.synchronize_event(event, device)
    assert backend.query_event(event) is True


def test_handles_are_bytes_and_differ_between_events(backend: Any, spec: DeviceSpec, device: Any) -> None:
    events = [_recorded(backend, spec, device) for _ in range(8)]
    handles = [backend.export_event(event, device) for event in events]
    assert all(isinstance(handle, bytes) and handle for handle in handles)
    assert len(set(handles)) == len(handles), (
        "two events have one handle: waiting for one waits for the other"
    )


@pytest.mark.parametrize("spoiled", [b"", b"\0", b"\xff" * 64])
def test_a_spoiled_handle_is_refused(backend: Any, device: Any, spoiled: bytes) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        backend.import_event(spoiled, device)


@needs("tensor-ipc")
def test_the_other_process_s_stream_waits_for_ours(
    backend: Any, spec: DeviceSpec, device: Any, dev: Any, stall: Any, helper: Any
) -> None:
    import torch

    tensor = torch.zeros(1 << 20, dtype=torch.uint8).to(device)
    dev.synchronize()
    exported = export_kv_caches([tensor])
    with helper as other:
        other.map(exported)
        for value in range(1, 6):
            stall(LONG / 2)
            tensor.fill_(value)
            event = _recorded(backend, spec, device)
            seen = other.after(backend.export_event(event, device))
            assert seen == value * tensor.numel(), f"round {value}: it read before our work was done"
    exported.close()


@needs("asynchronous")
def test_an_event_is_not_complete_while_the_work_before_it_runs(
    backend: Any, spec: DeviceSpec, device: Any, dev: Any, stall: Any
) -> None:
    dev.synchronize()
    began = time.monotonic()
    stall()
    event = _recorded(backend, spec, device)
    first = backend.query_event(event)
    asked = time.monotonic() - began
    backend.synchronize_event(event, device)
    waited = time.monotonic() - began
    assert backend.query_event(event) is True
    dev.synchronize()
    took = time.monotonic() - began
    if took < LONG / 2 or asked > took / 2:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")
    assert not first, f"it was complete after {asked:.3f} s, and the work took {took:.3f} s"
    assert waited > took / 2, f"waiting for it ended after {waited:.3f} s, and the work took {took:.3f} s"


@needs("asynchronous")
def test_asking_does_not_wait(backend: Any, spec: DeviceSpec, device: Any, dev: Any, stall: Any) -> None:
    dev.synchronize()
    stall()
    event = _recorded(backend, spec, device)
    began = time.monotonic()
    for _ in range(10):
        backend.query_event(event)
    asked = time.monotonic() - began
    backend.synchronize_event(event, device)
    left = time.monotonic() - began
    assert asked < LONG / 2, f"asking took {asked:.3f} s of the {left:.3f} s that the work took"
    if left < LONG / 2:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")


@needs("asynchronous")
def test_recording_and_letting_a_stream_wait_do_not_block_the_host(
    backend: Any, spec: DeviceSpec, device: Any, dev: Any, stall: Any
) -> None:
    dev.synchronize()
    began = time.monotonic()
    stall()
    queued = time.monotonic() - began
    event = _recorded(backend, spec, device)
    backend.wait_event(event, spec.current_stream(device))
    asked = time.monotonic() - began - queued
    backend.synchronize_event(event, device)
    left = time.monotonic() - began
    assert asked < LONG / 2, f"it took {asked:.3f} s of the {left:.3f} s that the work took"
    if left < LONG / 2:
        not_shown("the device is done before the host can look; give the spec a conformance_stall")
