"""Gaudi accelerators, as LMCache sees them. Nothing heavy is imported before it is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["HpuDeviceSpec"]

_VENDOR = "habana_frameworks"
_NODES = Path("/sys/class/accel")  # where the kernel lists accelerators, Gaudi's driver among them
_INSTALL = "install the Gaudi software suite and its build of torch"


class HpuDeviceSpec(DeviceSpec):
    """Gaudi through the torch of its software suite. Engine-driven transfers only: see docs/devices/hpu.md."""

    plugin_api: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def device_type(self) -> str:
        return "hpu"

    @property
    def torch_module_name(self) -> str:
        return "hpu"

    def is_available(self) -> bool:
        if not _is_installed():
            return False  # before torch: no other build of it has the device
        try:
            return bool(self._module().is_available())
        except Exception:  # software that is broken is found out, and told of, by unavailable_reason
            return False

    def unavailable_reason(self) -> str:
        if not _is_installed():
            return f"package {_VENDOR} is not installed; {_INSTALL}"
        try:
            self._module()
        except Exception as exc:
            return f"{_VENDOR}.torch cannot be imported: {' '.join(str(exc).split())}; {_INSTALL}"
        if not _NODES.is_dir() or not any(_NODES.iterdir()):
            return f"{_NODES} lists no accelerator: is the driver loaded, and was the container given the device?"
        remedy = "is one free, and does HABANA_VISIBLE_DEVICES name it?"
        try:
            self._module().is_available()
        except Exception as exc:
            return f"torch.hpu cannot be asked: {' '.join(str(exc).split())}; {remedy}"
        return f"torch.hpu finds no Gaudi that it can use; {remedy}"

    def _module(self) -> Any:
        """torch.hpu, which importing torch alone makes in newer suites only."""
        import torch

        if not hasattr(torch, "hpu"):
            importlib.import_module(f"{_VENDOR}.torch.hpu")
        return torch.hpu  # type: ignore[attr-defined,unused-ignore]

    # --- what the wheel brings -----------------------------------------------------------------------------

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_hpu.ops import HpuDeviceOps

        return HpuDeviceOps

    def create_gpu_connector(
        self, config: Any, metadata: Any, engine: Any, layout_hints: Any = None
    ) -> Any | None:
        """vLLM's whole chunks.

        Raises:
            ConfigError: Another engine, or what is not served on this device.
        """
        from lmcache.errors import ConfigError
        from lmcache.v1.gpu_connector.vendor import vendor_connector
        from lmcache_hpu.connectors import CLASSES

        made = vendor_connector(self, CLASSES, config, metadata, engine, layout_hints)
        if made is None:
            raise ConfigError(
                f"engine {getattr(engine, 'value', engine)!r} in its process on {self.device_type}: expected vllm, with"
                " use_layerwise, enable_blending and use_gpu_connector_v3 off; other ways were not tried on this device"
            )
        return made

    @property
    def page_mover(
        self,
    ) -> Callable[[Sequence[Any], Sequence[int], Sequence[Sequence[int]], bool], None] | None:
        from lmcache_hpu import settings

        if not settings.native_wanted():
            return None
        from lmcache_hpu.runtime import mover

        return mover().move_pages

    # --- waiting -------------------------------------------------------------------------------------------

    def synchronize_device(self, device: Any = None) -> None:
        from lmcache_hpu.runtime import end_step

        end_step()  # in lazy mode what was not marked is not queued yet
        super().synchronize_device(device)

    def synchronize_stream(self, stream: Any) -> None:
        from lmcache_hpu.runtime import end_step

        end_step()
        super().synchronize_stream(stream)

    def record_stream_event(self, event: Any, stream: Any) -> None:
        from lmcache_hpu.runtime import end_step

        end_step()
        super().record_stream_event(event, stream)


def _is_installed() -> bool:
    """Whether the vendor's package can be found; it is not imported for that."""
    try:
        return importlib.util.find_spec(_VENDOR) is not None
    except ValueError:  # it is in the process, put there by other means than an import
        return True
