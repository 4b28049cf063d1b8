"""Ops of the CPU backend."""

from __future__ import annotations

from typing import ClassVar

from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["CpuDeviceOps"]


class CpuDeviceOps(DeviceOps):
    """The torch baseline; host copies are done when the call returns, so it is stream-ordered as it is."""

    device_type: ClassVar[str] = "cpu"
    is_synchronous: ClassVar[bool] = True
