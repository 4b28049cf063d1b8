"""The device, as LMCache sees it. Nothing heavy is imported before it is asked for."""

from __future__ import annotations

import logging
from typing import Any

from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

logger = logging.getLogger(__name__)


class SimDeviceSpec(DeviceSpec):
    """The simulated accelerator."""

    plugin_api = (1, 0)

    _events: Any = None

    @property
    def device_type(self) -> str:
        return "sim"

    @property
    def torch_module_name(self) -> str:
        return "sim"

    def is_available(self) -> bool:
        try:
            import lmcache_sim  # noqa: F401 -- makes torch.sim
            import torch

            return bool(torch.sim.is_available())
        except Exception as exc:
            logger.warning("the simulated accelerator is not available: %s", exc)
            return False

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_sim_plugin.ops import SimDeviceOps

        return SimDeviceOps

    @property
    def pin_memory_backend(self) -> type[PinMemoryBackend]:
        from lmcache_sim_plugin.pinning import SimPinMemoryBackend

        return SimPinMemoryBackend

    @property
    def ipc_wrapper_cls(self) -> type[Any]:
        from lmcache_sim_plugin.ipc import SimIPCWrapper

        return SimIPCWrapper

    @property
    def event_ipc_backend(self) -> Any:
        if self._events is None:
            from lmcache_sim_plugin.events import SimEventBackend

            self._events = SimEventBackend()
        return self._events

    def create_cache_context(self, *args: Any, **kwargs: Any) -> Any:
        from lmcache_sim_plugin.context import SimCacheContext

        return SimCacheContext(*args, **kwargs)

    def get_stream_handle(self, stream: Any) -> int:
        import torch

        return int(torch.sim.Stream.of(stream).sim_stream)

    def create_stream_event(self, device: Any = None) -> Any:
        import torch

        return torch.sim.Event(device)

    def conformance_stall(self, stream: Any, seconds: float) -> None:
        """How the conformance kit keeps a stream busy."""
        import torch

        torch.sim.Stream.of(stream).sleep(int(seconds * 1e6))
