"""What a backend declares, as a table of names, and what each level of the kit asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["CAPABILITIES", "LEVELS", "Capabilities", "is_in_level", "probe_capabilities"]


@dataclass(frozen=True)
class _Capability:
    what: str
    declared: Callable[[DeviceSpec], Any]
    level: str = "basic"
    """The first level at which it is tested."""


def _has_op(name: str) -> Callable[[DeviceSpec], bool]:
    return lambda spec: hasattr(spec.get_ops(), name)


def _overrides(name: str) -> Callable[[DeviceSpec], bool]:
    return lambda spec: getattr(type(spec), name, None) is not getattr(DeviceSpec, name)


CAPABILITIES: Mapping[str, _Capability] = {
    "device": _Capability("is_available() is true", lambda spec: spec.is_available()),
    "native-ops": _Capability("a native module is bound", lambda spec: spec.get_ops().binding_report().bound),
    "block-transfer": _Capability(
        "multi_layer_block_kv_transfer is there", _has_op("multi_layer_block_kv_transfer")
    ),
    "slot-transfer": _Capability("multi_layer_kv_transfer is there", _has_op("multi_layer_kv_transfer")),
    "async-memcpy": _Capability("lmcache_memcpy_async is there", _has_op("lmcache_memcpy_async")),
    "completion": _Capability(
        "record_completion_on_stream keeps the stream's order", _has_op("record_completion_on_stream")
    ),
    "group-plans": _Capability(
        "execute_object_group_transfer is there", _has_op("execute_object_group_transfer")
    ),
    "direct-copies": _Capability(
        "execute_direct_copy_transfer is there", _has_op("execute_direct_copy_transfer")
    ),
    "asynchronous": _Capability(
        "work may be under way when a call returns", lambda spec: not spec.get_ops().is_synchronous
    ),
    "stream-handle": _Capability("get_stream_handle is overridden", _overrides("get_stream_handle")),
    "pinning": _Capability(
        "pin_memory_backend says that it is supported", lambda spec: spec.is_pin_supported
    ),
    "event-ipc": _Capability(
        "event_ipc_backend is given", lambda spec: spec.event_ipc_backend, "lmcache-driven"
    ),
    "tensor-ipc": _Capability(
        "ipc_wrapper_cls is given", lambda spec: spec.ipc_wrapper_cls, "lmcache-driven"
    ),
    "cache-context": _Capability(
        "create_cache_context is overridden", _overrides("create_cache_context"), "lmcache-driven"
    ),
    "lmcache-driven": _Capability(
        "is_lmcache_driven_available() is true",
        lambda spec: spec.is_lmcache_driven_available(),
        "lmcache-driven",
    ),
}

LEVELS: Mapping[str, tuple[str, ...]] = {
    "packaging": (),
    "basic": ("device", "block-transfer"),
    "native": ("device", "block-transfer", "native-ops"),
    "lmcache-driven": (
        "device", "block-transfer", "completion", "event-ipc", "tensor-ipc", "cache-context", "lmcache-driven",
    ),
}  # fmt: skip
"""What each level asks for. A higher level also tests what the lower ones do. The lowest needs no device: it looks at
names, declarations, the wheel and discovery, as a machine that only builds can."""


def is_in_level(capability: str, level: str) -> bool:
    """Whether a run at ``level`` looks at ``capability`` at all."""
    order = list(LEVELS)
    return order.index(CAPABILITIES[capability].level) <= order.index(level)


@dataclass(frozen=True)
class Capabilities:
    """What one backend declares. ``faults`` are capabilities whose declaration raised, and how."""

    declared: frozenset[str]
    faults: Mapping[str, str] = field(default_factory=dict)

    def missing_for(self, level: str) -> tuple[str, ...]:
        """What the level asks for and the backend does not declare."""
        return tuple(name for name in LEVELS[level] if name not in self.declared)


def probe_capabilities(spec: DeviceSpec) -> Capabilities:
    """Ask the spec for everything that it may declare. Nothing that a backend raises ends the asking."""
    declared, faults = set(), {}
    for name, capability in CAPABILITIES.items():
        try:
            if capability.declared(spec):
                declared.add(name)
        except Exception as exc:
            faults[name] = f"{type(exc).__name__}: {exc}"
    return Capabilities(frozenset(declared), faults)
