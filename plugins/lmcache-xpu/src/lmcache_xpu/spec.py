"""Intel GPUs, as LMCache sees them. Nothing heavy is imported before it is asked for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["XpuDeviceSpec"]

_OLDEST = (2, 13)
"""The torch that brings the SYCL runtime this wheel is linked to. pip cannot hold it: torch is not required by name."""
_INSTALL = "install a build of torch for XPU (https://download.pytorch.org/whl/xpu)"


class XpuDeviceSpec(DeviceSpec):
    """Intel GPUs: a torch that was built for XPU.

    Inter-process memory and events are not offered, and so neither is lmcache-driven mode: see docs/devices/xpu.md.
    """

    plugin_api: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def device_type(self) -> str:
        return "xpu"

    @property
    def torch_module_name(self) -> str:
        return "xpu"

    def is_available(self) -> bool:
        try:
            import torch

            return not _is_too_old(torch.__version__) and bool(torch.xpu.is_available())
        except Exception:  # a torch that is broken is found out, and told of, by unavailable_reason
            return False

    def unavailable_reason(self) -> str:
        try:
            import torch
        except Exception as exc:
            return f"torch cannot be imported: {' '.join(str(exc).split())}; {_INSTALL}"
        version = getattr(torch, "__version__", "?")
        built = getattr(getattr(torch, "version", None), "xpu", None)
        if not hasattr(torch, "xpu") or not built:
            return f"torch {version} is built without XPU; {_INSTALL}"
        if _is_too_old(version):
            oldest = ".".join(map(str, _OLDEST))
            return f"torch {version}: expected {oldest} or later, which brings libsycl.so.9; {_INSTALL}"
        remedy = "install Intel's GPU driver (Level Zero), and give this user the group render"
        try:
            torch.xpu.is_available()
        except Exception as exc:
            return f"torch.xpu cannot be asked: {' '.join(str(exc).split())}; {remedy}"
        return f"torch {version} finds no Intel GPU; {remedy}"

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_xpu.ops import XpuDeviceOps

        return XpuDeviceOps

    def create_gpu_connector(
        self, config: Any, metadata: Any, engine: Any, layout_hints: Any = None
    ) -> Any | None:
        """The core's connectors by this wheel's names; None, which leaves it to the core, for any other engine."""
        from lmcache.v1.gpu_connector.vendor import vendor_connector
        from lmcache_xpu.connectors import CLASSES

        return vendor_connector(self, CLASSES, config, metadata, engine, layout_hints)

    def get_stream_handle(self, stream: Any) -> int:
        from lmcache_xpu.runtime import queue_handle

        return queue_handle(stream)

    def create_stream_event(self, device: Any = None) -> Any:
        module = self._get_torch_module()
        if device is None:
            return module.Event()
        with module.device(device):  # an event belongs to the device on which it is first recorded
            return module.Event()

    def conformance_stall(self, stream: Any, seconds: float) -> None:
        """How the conformance kit keeps a stream busy."""
        from lmcache_xpu import native

        native.load().stall(self.get_stream_handle(stream), seconds)


def _is_too_old(version: str) -> bool:
    """Whether it is known to be; a version that is no number may be any."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < _OLDEST
