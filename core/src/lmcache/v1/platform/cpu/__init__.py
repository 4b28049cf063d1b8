"""The CPU backend: the one device that ships with the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["CpuDeviceSpec"]


class CpuDeviceSpec(DeviceSpec):
    """Host memory. Always available; chosen when no accelerator is, or when asked for by name."""

    @property
    def device_type(self) -> str:
        return "cpu"

    @property
    def torch_module_name(self) -> str:
        return "cpu"

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps

        return CpuDeviceOps

    def is_available(self) -> bool:
        return True

    def get_stream_handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def _get_torch_module(self) -> Any:
        # torch.cpu has no events and no device properties; the stub has the surface that callers use.
        from lmcache.v1.platform.cpu.stub_cpu_device import STUB_CPU_DEVICE

        return STUB_CPU_DEVICE
