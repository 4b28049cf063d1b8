"""The contracts beside DeviceSpec and DeviceOps: events, wrappers, cache contexts, pinning."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.v1.platform.base import event_ipc
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend, EventIPCBackend
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend
from lmcache.v1.platform.base_cache_context import BaseCacheContext as Alias
from lmcache.v1.platform.cpu.stub_cpu_device import STUB_CPU_DEVICE


class Event:
    """What a CUDA-style event does, written down."""

    log: list[Any] = []  # noqa: RUF012

    def __init__(self, interprocess: bool = False) -> None:
        self.interprocess = interprocess

    def record(self, stream: Any) -> None:
        self.log.append(("record", stream))

    def query(self) -> int:
        return 1

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def ipc_handle(self) -> bytearray:
        return bytearray(b"handle")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> tuple[Any, bytes]:
        return device, handle


def module(**members: Any) -> Any:
    return SimpleNamespace(__name__="torch.foo", **{"Event": Event, **members})


def test_an_event_goes_from_one_process_to_another() -> None:
    entered: list[Any] = []
    torch_foo = module(device=lambda device: entered.append(device) or nullcontext())
    backend = DefaultEventIPCBackend(event_module=torch_foo)
    assert isinstance(backend, EventIPCBackend)
    assert backend.device_type == "foo"
    backend.check_event_support("foo:1")
    event = backend.create_event("foo:1")
    assert event.interprocess
    assert backend.export_event(event, "foo:1") == b"handle"
    assert backend.import_event(b"handle", "foo:1") == ("foo:1", b"handle")
    assert backend.import_event(b"handle", 2) == ("foo:2", b"handle")
    stream = SimpleNamespace(wait_event=lambda event: Event.log.append("wait"))
    Event.log.clear()
    backend.record_event(event, stream)
    backend.wait_event(event, stream)
    backend.synchronize_event(event, "foo:1")
    assert Event.log == [("record", stream), "wait", "synchronize"]
    assert backend.query_event(event) is True
    assert entered == ["foo:1"] * 3


def test_exported_events_are_kept_alive_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DefaultEventIPCBackend(event_module=module(), device_type="foo")
    for _ in range(event_ipc._KEPT_EXPORTS + 10):
        backend.export_event(Event(), None)
    assert len(backend._exported) == event_ipc._KEPT_EXPORTS


@pytest.mark.parametrize(
    ("members", "device", "fault"),
    [
        ({"Event": None}, "foo:0", "its torch module has no Event"),
        ({"Event": SimpleNamespace}, "foo:0", "no Event.from_ipc_handle"),
        (
            {"Event": type("E", (Event,), {"__init__": lambda self: None})},
            "foo:0",
            r"Event\(interprocess=True\)",
        ),
        ({}, "bar:0", "event IPC of 'foo' does not serve device bar:0"),
    ],
)
def test_a_device_without_such_events_is_refused_before_any_is_made(
    members: dict[str, Any], device: str, fault: str
) -> None:
    backend = DefaultEventIPCBackend(event_module=module(**members), device_type="foo")
    with pytest.raises(RuntimeError, match=fault):
        backend.check_event_support(device)


def test_the_module_is_looked_up_when_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="event_module"):
        DefaultEventIPCBackend()
    backend = DefaultEventIPCBackend(device_type="foo")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    with pytest.raises(RuntimeError, match="torch has no module 'foo'"):
        backend.check_event_support(None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(foo=module()))
    backend.check_event_support(0)


def test_the_cpu_stub_s_events_are_good_enough_for_the_default_backend() -> None:
    backend = DefaultEventIPCBackend(event_module=STUB_CPU_DEVICE, device_type="cpu")
    backend.check_event_support("cpu")
    event = backend.create_event("cpu")
    backend.record_event(event, STUB_CPU_DEVICE.current_stream())
    assert backend.query_event(backend.import_event(backend.export_event(event, "cpu"), "cpu"))


def test_abstract_contracts_cannot_be_made_without_their_members() -> None:
    assert Alias is BaseCacheContext
    for contract in (BaseCacheContext, DeviceIPCWrapper):
        with pytest.raises(TypeError, match="abstract"):
            contract()
    names = {
        "cache_size_per_token", "close", "cupy_stream", "get_kernel_group_kv_pointers",
        "get_kernel_group_shape_dtype", "get_temp_kernel_group_buffer", "get_temp_object_group_buffer",
        "max_batch_size", "stream",
    }  # fmt: skip
    assert BaseCacheContext.__abstractmethods__ == names
    whole = type("Whole", (BaseCacheContext,), dict.fromkeys(names))
    context = whole(
        kv_caches=[1, 2], device="foo:0", num_layers=2, kv_layer_groups_manager="m", block_ids_buffer=None,
        lmcache_tokens_per_chunk=256,
    )  # fmt: skip
    assert (context.device, context.kv_tensors, context.num_layers) == ("foo:0", [1, 2], 2)
    assert context.kv_layer_groups_manager == "m"


def test_the_base_pinning_backend_pins_nothing_and_says_so() -> None:
    backend = PinMemoryBackend()
    assert (backend.is_pin_supported, backend.pin_memory(4096, 1), backend.unpin_memory(4096)) == (False,) * 3
