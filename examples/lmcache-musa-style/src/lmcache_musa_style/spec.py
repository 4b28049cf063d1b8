"""What LMCache is told of MusaStyle devices.

LMCache imports this module in every process to find out whether the device is there. So it imports contracts only;
ops, native code and whatever else is heavy stay behind the properties.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps


class MusaStyleDeviceSpec(DeviceSpec):
    """Tensors of ``torch.device("musa")``."""

    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    """The plugin API that this is written for. LMCache refuses what it does not speak, and names both."""

    @property
    def device_type(self) -> str:
        """``torch.device.type`` of the tensors."""
        return "musa"

    @property
    def backend_name(self) -> str:
        """Unique among all backends; also the name of the entry point in pyproject.toml."""
        return "musa_style"

    @property
    def torch_module_name(self) -> str:
        """``torch.musa`` is the device module."""
        return "musa"

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_musa_style.ops import MusaStyleDeviceOps

        return MusaStyleDeviceOps

    def is_available(self) -> bool:
        """Whether the device can be used here. Asked in every process: keep it quick, and never raise."""
        try:
            return bool(self._device_module().is_available())
        except Exception:
            return False

    def unavailable_reason(self) -> str:
        """Why it cannot, in one line with what to do. Asked only then, and shown by ``lmcache device list``."""
        try:
            self._device_module()
        except Exception as exc:
            return f"torch.{self.torch_module_name} is not there: {' '.join(str(exc).split())}"
        return f"torch.{self.torch_module_name} finds no device that it can use; is the driver loaded?"

    def _device_module(self) -> Any:
        """``torch.musa``, which newer releases of torch make themselves where torch_musa is installed."""
        import torch

        if not hasattr(torch, self.torch_module_name):
            importlib.import_module("torch_musa")
        return getattr(torch, self.torch_module_name)

    # What follows is optional. Each member has a base answer that means "not supported"; override what the platform
    # has, and the core offers what that makes possible. docs/vendors/contract.md of LMCache is the reference.
    #
    #   event_ipc_backend, ipc_wrapper_cls, create_cache_context   together: transfers driven by the server
    #   pin_memory_backend                                          faster staging through host memory
    #   get_stream_handle                                           native code that is given streams
