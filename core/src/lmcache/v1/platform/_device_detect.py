"""The device host of this process: one object behind every question about devices.

Importing this module looks at nothing. Discovery and choice run on first use, once, under a lock.
"""

from __future__ import annotations

import threading
from typing import Any

from lmcache.errors import DeviceError
from lmcache.v1.platform._registry import Registry, discover
from lmcache.v1.platform._selection import Selection, import_torch, select, spec_for_type
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = [
    "get_device_spec",
    "registry",
    "reset",
    "resolve_device_ops",
    "selected",
    "synchronize_device",
]


class _Host:
    """Registry and choice of one process. The lock makes racing threads agree on both."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._registry: Registry | None = None
        self._selection: Selection | None = None

    def registry(self) -> Registry:
        with self._lock:
            if self._registry is None:
                self._registry = discover()
            return self._registry

    def selection(self) -> Selection:
        # A failed choice is not kept: the next access says the same again, or finds the fault mended.
        with self._lock:
            if self._selection is None:
                self._selection = select(self.registry())
            return self._selection

    def reset(self) -> None:
        with self._lock:
            self._registry = self._selection = None


_HOST = _Host()


def registry() -> Registry:
    """The backends of this process, found on the first call."""
    return _HOST.registry()


def selected() -> Selection:
    """The backend this process uses, chosen on the first call.

    Raises:
        DeviceError: What LMCACHE_DEVICE_BACKEND or DEVICE_TYPE asks for cannot be delivered, or more than
            one backend of a device type is available and neither variable decides.
    """
    return _HOST.selection()


def reset() -> None:
    """Forget registry and choice; for tests, which change the environment under a running process."""
    _HOST.reset()


def _detect_device() -> tuple[Any, str]:
    """``(torch_dev, torch_device_type)``; see ``lmcache``."""
    selection = selected()
    return selection.torch_dev, selection.device_type


def get_device_spec(device_type: str) -> DeviceSpec | None:
    """The spec that serves ``device_type``, or None if there is none or no single one."""
    try:
        return spec_for_type(registry(), device_type)
    except DeviceError:
        return None


def resolve_device_ops(device_type: str | None = None) -> DeviceOps:
    """The ops for ``device_type``, or of the selected backend.

    Raises:
        DeviceError: torch is absent, or nothing (or no single backend) serves the type.
    """
    if import_torch() is None:
        raise DeviceError("device ops need torch, which cannot be imported here: pip install lmcache[cpu]")
    spec = spec_for_type(registry(), device_type) if device_type else selected().spec
    return spec.get_ops()


def synchronize_device(device: Any = None) -> None:
    """Block until all work on ``device`` (a torch device, ``"type:index"``, an index, or None) is done.

    Raises:
        DeviceError: Nothing (or no single backend) serves the device's type.
    """
    if device is None or isinstance(device, int):
        spec = selected().spec
    else:
        spec = spec_for_type(registry(), getattr(device, "type", None) or str(device).partition(":")[0])
    spec.synchronize_device(device)
