"""Ops of the CPU backend."""

from __future__ import annotations

from typing import Any, ClassVar

from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.op_contract import takes

__all__ = ["CpuDeviceOps"]


class CpuDeviceOps(DeviceOps):
    """The torch baseline; host copies are done when the call returns, so it is stream-ordered as it is."""

    device_type: ClassVar[str] = "cpu"
    is_synchronous: ClassVar[bool] = True

    @takes("tensors", "pointers")
    def lmcache_memcpy_async(
        self,
        dest: Any,
        src: Any,
        nbytes: int,
        direction: int,
        host_buffer_offset: int,
        host_buffer_alignments: int,
    ) -> None:
        """The baseline's for addresses too: they can only be the host's."""
        from lmcache.v1.platform.torch_ops.memcpy import host_memcpy

        host_memcpy(dest, src, nbytes, direction, host_buffer_offset, host_buffer_alignments)
