"""The device's operations: those of the native module, and torch's for the rest."""

from __future__ import annotations

from typing import ClassVar

from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["XpuDeviceOps"]


class XpuDeviceOps(DeviceOps):
    """See :class:`DeviceOps`. Rotation and the CacheGen coder are torch's own, on torch's queue."""

    device_type: ClassVar[str] = "xpu"

    def ensure_native(self) -> None:
        """Bind the native module.

        Raises:
            DeviceError: It does not load, or was built for another core.
        """
        from lmcache_xpu import native_ops

        self.bind_native(native_ops)
