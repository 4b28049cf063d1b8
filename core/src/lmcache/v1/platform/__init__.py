"""Device backends: contracts (``base``), discovery and selection, the torch baseline, the CPU backend.

The names below are resolved on first access, so importing a contract never runs discovery.
``current_device_spec`` is the selected ``DeviceSpec`` itself; the others are functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.platform._device_detect import (
        _detect_device,
        device_records,
        get_device_spec,
        get_event_ipc_backend,
        resolve_device_ops,
        resolve_kv_wrapper_factory,
        synchronize_current_stream,
        synchronize_device,
    )
    from lmcache.v1.platform.base.device_spec import DeviceSpec

    current_device_spec: DeviceSpec

__all__ = [
    "_detect_device",
    "current_device_spec",
    "device_records",
    "get_device_spec",
    "get_event_ipc_backend",
    "resolve_device_ops",
    "resolve_kv_wrapper_factory",
    "synchronize_current_stream",
    "synchronize_device",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcache.v1.platform import _device_detect

    if name == "current_device_spec":
        return _device_detect.selected().spec
    return getattr(_device_detect, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
