"""What every device must do before anything else is asked of it: allocate, copy, wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmcache.testing import needs, not_shown
from lmcache.testing.arrays import DTYPES, on_device, to_host
from lmcache.v1.platform.base.device_spec import DeviceSpec

pytestmark = needs("device")


def test_the_torch_module_has_what_the_guide_asks_for(dev: Any, spec: DeviceSpec) -> None:
    names = ["device_count", "current_device", "set_device", "synchronize"]
    if spec.device_type != "cpu":  # the stand-in for the CPU says that it is no accelerator
        names.append("is_available")
        assert dev.is_available() is True
    assert not [name for name in names if not callable(getattr(dev, name, None))]
    assert dev.device_count() >= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_survive_the_way_to_the_device_and_back(device: Any, dtype: str) -> None:
    import numpy as np
    import torch

    element = getattr(torch, dtype)
    bits = np.arange(4096, dtype=np.uint64).astype(f"u{element.itemsize}").reshape(16, 256)
    tensor = on_device(bits, device, element)
    assert tensor.device.type == device.type
    assert np.array_equal(to_host(tensor), bits)
    assert np.array_equal(to_host(tensor[3:9, 7:]), bits[3:9, 7:])


def test_a_tensor_says_which_device_it_is_on(device: Any, dev: Any) -> None:
    import torch

    if dev.device_count() < 2:
        not_shown("there is one device only")
    for index in range(2):
        tensor = torch.arange(64, dtype=torch.int32).to(torch.device(device.type, index))
        assert tensor.device.index == index, f"asked for device {index}, got {tensor.device}"
        assert torch.equal(tensor.cpu(), torch.arange(64, dtype=torch.int32))


def test_waiting_works_for_a_device_an_index_and_none(spec: DeviceSpec, device: Any) -> None:
    for target in (device, 0, None):
        spec.synchronize_device(target)


def test_the_current_stream_can_be_waited_for(spec: DeviceSpec, device: Any) -> None:
    stream = spec.current_stream(device)
    spec.synchronize_stream(stream)
    event = spec.create_stream_event(device)
    spec.record_stream_event(event, stream)
    spec.synchronize_stream(stream)
    assert spec.is_stream_event_complete(event) is True


@needs("stream-handle")
def test_the_stream_handle_is_an_integer(spec: DeviceSpec, device: Any) -> None:
    assert isinstance(spec.get_stream_handle(spec.current_stream(device)), int)


def test_another_thread_can_use_the_device(spec: DeviceSpec, device: Any) -> None:
    import torch

    found: list[Any] = []

    def work() -> None:
        try:
            tensor = torch.arange(1 << 16, dtype=torch.int32).to(device)
            spec.synchronize_device(device)
            found.append(torch.equal(tensor.cpu(), torch.arange(1 << 16, dtype=torch.int32)))
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [True]


def _torch_knows_pinned_memory() -> bool:
    import torch

    try:
        return bool(torch.empty(1).pin_memory().is_pinned())
    except RuntimeError:
        return False


@needs("pinning")
def test_pinned_memory_can_be_copied_from_and_unpinned_once(spec: DeviceSpec, device: Any) -> None:
    import torch

    host = torch.arange(1 << 18, dtype=torch.int32)
    nbytes = host.numel() * 4
    assert spec.pin_memory(host.data_ptr(), nbytes) is True
    if _torch_knows_pinned_memory():
        assert host.is_pinned(), "it says that memory is pinned, and torch does not find it so"
    assert torch.equal(host.to(device).cpu(), host)
    assert spec.unpin_memory(host.data_ptr()) is True
    assert spec.unpin_memory(host.data_ptr()) is False


@needs("pinning")
def test_pinning_answers_and_does_not_raise(spec: DeviceSpec) -> None:
    assert spec.pin_memory(0, 0) is False
    assert spec.unpin_memory(12345) is False
