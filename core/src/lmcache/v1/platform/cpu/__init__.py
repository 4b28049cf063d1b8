"""The CPU backend: the one device that ships with the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.device_spec import DeviceSpec, MPTransferMode

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps
    from lmcache.v1.platform.base.event_ipc import EventIPCBackend
    from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper

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

    @property
    def ipc_wrapper_cls(self) -> type[DeviceIPCWrapper]:
        from lmcache.v1.platform.cpu.ipc_wrapper import CpuShmTensorWrapper

        return CpuShmTensorWrapper

    @property
    def event_ipc_backend(self) -> EventIPCBackend:
        from lmcache.v1.platform.cpu.event_ipc import CPU_EVENTS

        return CPU_EVENTS

    def default_mp_transfer_mode(self) -> MPTransferMode:
        # Host pages are the worker's own memory: it copies them without asking anybody, and the engine's
        # storages need not move into shared memory. The other mode is there for those who ask for it.
        return MPTransferMode.ENGINE_DRIVEN

    def is_available(self) -> bool:
        return True

    def get_stream_handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def create_cache_context(self, *args: Any, **kwargs: Any) -> Any:
        from lmcache.v1.platform.cpu.cache_context import CPUCacheContext

        return CPUCacheContext(*args, **kwargs)

    def _get_torch_module(self) -> Any:
        # torch.cpu has no events and no device properties; the stub has the surface that callers use.
        from lmcache.v1.platform.cpu.stub_cpu_device import STUB_CPU_DEVICE

        return STUB_CPU_DEVICE
