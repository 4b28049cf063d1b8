"""What ``DeviceSpec`` and ``DeviceOps`` promise to plugins and to callers. Torch is not needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.devices import backend, install_backends
from lmcache.errors import ConfigError, DeviceError
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import PLUGIN_API, DeviceSpec, MPTransferMode
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection


class FooSpec(DeviceSpec):
    @property
    def device_type(self) -> str:
        return "foo"

    @property
    def torch_module_name(self) -> str:
        return "foo"


# --- DeviceSpec --------------------------------------------------------------------------------------------


class OrderedOps(DeviceOps):
    """Ops of a device that can say when its stream got somewhere."""

    def record_completion_on_stream(self, stream_ptr: int, kind: str, payload: bytes) -> None:
        return None

    def drain_recorded_completions(self) -> list[tuple[str, bytes]]:
        return []


def whole_stack(**members: Any) -> DeviceSpec:
    """A spec with all that lmcache-driven mode needs, and ``members`` over it."""
    needs: dict[str, Any] = {
        "ipc_wrapper_cls": property(lambda self: object),
        "event_ipc_backend": property(lambda self: object()),
        "create_cache_context": lambda self, *args, **kwargs: None,
        "ops_cls": property(lambda self: OrderedOps),
    }
    return type("Spec", (DeviceSpec,), {**needs, **members})()  # type: ignore[no-any-return]


def test_the_bare_spec_is_no_device() -> None:
    spec = DeviceSpec()
    assert (spec.device_type, spec.backend_name, spec.torch_module_name) == ("", "", "")
    assert spec.plugin_api == PLUGIN_API == (1, 1)
    assert not spec.is_available()
    assert not spec.is_lmcache_driven_available()
    assert not spec.is_handle_transfer_available()
    assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    assert spec.missing_for_lmcache_driven() == (
        "ipc_wrapper_cls",
        "event_ipc_backend",
        "create_cache_context",
        "record_completion_on_stream",
    )
    assert (spec.pin_memory(0, 0), spec.unpin_memory(0), spec.is_pin_supported) == (False, False, False)
    with pytest.raises(NotImplementedError, match="no cache context"):
        spec.create_cache_context()
    with pytest.raises(NotImplementedError, match="no stream handle"):
        spec.get_stream_handle(None)


@pytest.mark.parametrize("spelling", ["is_handle_transfer_available", "is_lmcache_driven_available"])
@pytest.mark.parametrize("answer", [True, False])
def test_either_spelling_of_the_handle_transfer_predicate_is_honoured(spelling: str, answer: bool) -> None:
    spec = whole_stack(**{spelling: lambda self: answer})
    assert spec.is_handle_transfer_available() is answer
    assert spec.is_lmcache_driven_available() is answer
    expected = MPTransferMode.LMCACHE_DRIVEN if answer else MPTransferMode.ENGINE_DRIVEN
    assert spec.default_mp_transfer_mode() is expected


def test_a_spec_that_overrides_both_spellings_may_call_the_base_from_each() -> None:
    class Both(DeviceSpec):
        def is_handle_transfer_available(self) -> bool:
            return super().is_handle_transfer_available()

        def is_lmcache_driven_available(self) -> bool:
            return super().is_lmcache_driven_available()

    assert not Both().is_handle_transfer_available()
    assert not Both().is_lmcache_driven_available()


def test_lmcache_driven_mode_is_offered_only_if_nothing_it_needs_is_missing() -> None:
    assert whole_stack().is_lmcache_driven_available()
    assert whole_stack().default_mp_transfer_mode() is MPTransferMode.LMCACHE_DRIVEN

    def broken(self: DeviceSpec) -> object:
        raise ImportError("libfoo.so")

    for member in ("ipc_wrapper_cls", "event_ipc_backend"):
        for value in (property(lambda self: None), property(broken)):
            spec = whole_stack(**{member: value, "is_handle_transfer_available": lambda self: True})
            assert spec.missing_for_lmcache_driven() == (member,)
            assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN


def test_lmcache_driven_mode_needs_a_completion_that_keeps_the_order_of_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    baseline = whole_stack(ops_cls=property(lambda self: DeviceOps))
    assert baseline.missing_for_lmcache_driven() == ("record_completion_on_stream",)
    assert not baseline.is_lmcache_driven_available()
    assert baseline.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    host = whole_stack(ops_cls=property(lambda self: type("Host", (DeviceOps,), {"is_synchronous": True})))
    assert host.missing_for_lmcache_driven() == (), "where all is done on return, the baseline's is in order"

    def fails(self: DeviceSpec) -> DeviceOps:
        raise ImportError("libfoo.so: undefined symbol")

    broken = whole_stack(get_ops=fails)
    assert broken.missing_for_lmcache_driven() == ("record_completion_on_stream",)
    assert "Spec.get_ops() failed: ImportError: libfoo.so: undefined symbol" in caplog.text


def test_a_transfer_mode_is_parsed_or_the_valid_ones_are_listed() -> None:
    assert MPTransferMode.parse(" Engine_Driven ") is MPTransferMode.ENGINE_DRIVEN
    assert MPTransferMode.parse(MPTransferMode.AUTO) is MPTransferMode.AUTO
    with pytest.raises(ConfigError, match="--mode='pull': expected one of auto, engine_driven, lmc"):
        MPTransferMode.parse("pull", source="--mode")


def test_the_base_leaves_in_process_connectors_to_the_core_and_knows_no_reason() -> None:
    assert DeviceSpec().create_gpu_connector(None, None, "vllm", {"kv_layout": "NHD"}) is None
    assert DeviceSpec().unavailable_reason() == ""


def test_why_a_device_is_not_there_is_on_its_record_and_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "torch 2.13 has no CUDA support; install one that has"
    install_backends(monkeypatch, backend("foo", available=False, unavailable_reason=lambda self: why))
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo")
    with pytest.raises(DeviceError, match=why):
        _device_detect.selected()
    record = next(r for r in _device_detect.device_records() if r.name == "foo")
    assert (record.code, record.note) == ("not-on-this-host", f"not available on this host: {why}")
    _device_detect.reset()


def test_ops_are_made_once_and_a_failed_binding_is_tried_again() -> None:
    attempts: list[int] = []

    class Ops(DeviceOps):
        def ensure_native(self) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                raise ImportError("undefined symbol")

    spec = type("Spec", (DeviceSpec,), {"ops_cls": Ops})()
    with pytest.raises(ImportError, match="undefined symbol"):
        spec.get_ops()
    assert spec.get_ops() is spec.get_ops()
    assert len(attempts) == 2


def test_pinning_uses_the_backend_and_never_raises() -> None:
    class Pin:
        is_pin_supported = True

        def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
            return ptr == 4096 and flags == 2

        def unpin_memory(self, ptr: int) -> bool:
            raise OSError("no such mapping")

    spec = type("Spec", (DeviceSpec,), {"pin_memory_backend": Pin})()
    assert spec.is_pin_supported
    assert spec.pin_memory(4096, 10, 2)
    assert not spec.unpin_memory(4096)


def test_stream_helpers_use_the_spec_s_own_torch_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    module = SimpleNamespace(
        current_stream=lambda device: f"stream of {device}",
        synchronize=lambda: calls.append("all"),
        Event=lambda: SimpleNamespace(record=calls.append, query=lambda: 1),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(foo=module, __version__="0"))
    spec = FooSpec()
    assert spec.current_stream("foo:1") == "stream of foo:1"
    spec.synchronize_device("foo:1")  # a module may know only its current device
    module.synchronize = lambda device=None: calls.append(device)
    spec.synchronize_device("foo:1")
    spec.synchronize_current_stream("foo:2")  # a device that says nothing of streams is waited for whole
    event = spec.create_stream_event()
    spec.record_stream_event(event, "s")
    assert spec.is_stream_event_complete(event)
    assert calls == ["all", "foo:1", "foo:2", "s"]
    with pytest.raises(DeviceError, match="has no module ''"):
        DeviceSpec().synchronize_device()


# --- DeviceOps ---------------------------------------------------------------------------------------------


def test_an_op_that_is_not_there_is_refused_by_name() -> None:
    class FooOps(DeviceOps):
        pass

    with pytest.raises(AttributeError, match="FooOps has no device operation 'execute_direct_copy_transfer'"):
        _ = FooOps().execute_direct_copy_transfer
    assert not hasattr(FooOps(), "record_completion_on_stream")
    assert hasattr(FooOps(), "multi_layer_block_kv_transfer")


def test_native_ops_and_types_of_the_contract_are_bound_and_nothing_else() -> None:
    native = ModuleType("native")

    class NativeDesc:
        pass

    members = {
        "multi_layer_block_kv_transfer": lambda *args: "native",
        "calculate_cdf": lambda *args: "cdf",
        "PageBufferShapeDesc": NativeDesc,
        "ensure_native": lambda: "hijacked",
        "helper": lambda: None,
        "batched_memcpy": None,
        "_private": lambda: None,
    }
    for name, value in members.items():
        setattr(native, name, value)
    ops = DeviceOps()
    assert ops.PageBufferShapeDesc is PageBufferShapeDesc
    assert ops.TransferDirection is TransferDirection
    ops.bind_native(native)
    assert ops.multi_layer_block_kv_transfer() == "native"  # type: ignore[call-arg, func-returns-value]
    assert ops.calculate_cdf() == "cdf"
    assert ops.PageBufferShapeDesc is members["PageBufferShapeDesc"]
    assert ops.ensure_native() is None  # type: ignore[func-returns-value]
    assert not hasattr(ops, "helper")
    assert "batched_memcpy" in ops.binding_report().baseline
    assert DeviceOps().PageBufferShapeDesc is PageBufferShapeDesc


def test_directions_are_integers_and_a_shape_descriptor_starts_at_zero() -> None:
    assert (TransferDirection.H2D, TransferDirection.D2H) == (0, 1)
    desc = PageBufferShapeDesc()
    assert set(vars(desc).values()) == {0}
    desc.dtype = "torch.float16"  # type: ignore[attr-defined]  # callers hang this on it
