"""NVIDIA and AMD GPUs, as LMCache sees them. Nothing heavy is imported before it is asked for.

Both are ``torch.device("cuda")``; which one it is, the build of torch decides, so that never both are available.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps
    from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

__all__ = ["CudaDeviceSpec", "RocmDeviceSpec"]


class CudaDeviceSpec(DeviceSpec):
    """NVIDIA GPUs: a torch that was built for CUDA."""

    plugin_api: ClassVar[tuple[int, int]] = (1, 0)

    _kind: ClassVar[str] = "cuda"
    _vendor: ClassVar[str] = "CUDA"
    _other: ClassVar[str] = "rocm"

    _events: Any = None

    @property
    def device_type(self) -> str:
        return "cuda"

    @property
    def backend_name(self) -> str:
        return self._kind

    @property
    def torch_module_name(self) -> str:
        return "cuda"

    def is_available(self) -> bool:
        try:
            import torch

            return self._is_our_build(torch) and bool(torch.cuda.is_available())
        except Exception:  # a torch that is broken is found out, and told of, by unavailable_reason
            return False

    def unavailable_reason(self) -> str:
        try:
            import torch
        except Exception as exc:
            return f"torch cannot be imported: {exc}; install a build of torch for {self._vendor}"
        version = getattr(torch, "__version__", "?")
        if not hasattr(torch, "version") or not hasattr(torch, "cuda"):
            return f"torch {version} is no whole torch; install a build of torch for {self._vendor}"
        if (torch.version.hip and self._kind == "cuda") or (torch.version.cuda and self._kind == "rocm"):
            return f"torch {version} is built for the other vendor's GPUs: backend {self._other} serves those"
        if not self._is_our_build(torch):
            return f"torch {version} is built without {self._vendor}; install a build of torch for {self._vendor}"
        return f"torch {version} finds no GPU that it can use: {self._driver_says()}"

    def _is_our_build(self, torch: Any) -> bool:
        return bool(
            torch.version.hip if self._kind == "rocm" else torch.version.cuda and not torch.version.hip
        )

    def _driver_says(self) -> str:
        from lmcache_cuda import driver

        try:
            native = driver.load(self._kind)
            return f"driver {native.driver_version()}, {native.device_count()} devices"
        except Exception as exc:
            return " ".join(str(exc).split())

    # --- what the wheel brings -----------------------------------------------------------------------------

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_cuda.ops import CudaDeviceOps

        return CudaDeviceOps

    @property
    def pin_memory_backend(self) -> type[PinMemoryBackend] | None:
        if not self._native():
            return None
        from lmcache_cuda.pinning import CudaPinMemoryBackend

        return CudaPinMemoryBackend

    @property
    def ipc_wrapper_cls(self) -> type[Any] | None:
        if not self._native():
            return None
        from lmcache_cuda.ipc import CudaIPCWrapper

        return CudaIPCWrapper

    @property
    def event_ipc_backend(self) -> Any:
        if self._events is None and self._native():
            from lmcache_cuda.events import make_event_backend

            self._events = make_event_backend()
        return self._events

    def create_cache_context(self, *args: Any, **kwargs: Any) -> Any:
        from lmcache_cuda.context import GPUCacheContext

        return GPUCacheContext(*args, **kwargs)

    def _native(self) -> bool:
        """Whether what needs the native module may be offered: without it there are torch's operations only."""
        from lmcache_cuda import driver

        return driver.wanted()

    # --- streams -------------------------------------------------------------------------------------------

    def get_stream_handle(self, stream: Any) -> int:
        from lmcache_cuda.runtime import stream_handle

        return stream_handle(stream)

    def synchronize_current_stream(self, device: Any = None) -> None:
        # torch.cuda.synchronize would wait for what the engine computes, too.
        self._get_torch_module().current_stream(device).synchronize()

    def create_stream_event(self, device: Any = None) -> Any:
        module = self._get_torch_module()
        if device is None:
            return module.Event()
        with module.device(device):  # an event belongs to the device on which it is first recorded
            return module.Event()


class RocmDeviceSpec(CudaDeviceSpec):
    """AMD GPUs: a torch that was built for ROCm, where they go by the name of CUDA."""

    _kind: ClassVar[str] = "rocm"
    _vendor: ClassVar[str] = "ROCm"
    _other: ClassVar[str] = "cuda"
