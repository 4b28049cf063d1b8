"""Trainium and Inferentia, as LMCache sees them. Nothing heavy is imported before it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.platform.base.device_spec import DeviceSpec

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["NeuronDeviceSpec"]

_DEVICES = Path("/dev")
_VENDOR = "torch_neuronx"


class NeuronDeviceSpec(DeviceSpec):
    """Neuron devices through torch. Engine-driven transfers only: see docs/devices/neuron.md."""

    plugin_api: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def device_type(self) -> str:
        return "neuron"

    @property
    def torch_module_name(self) -> str:
        return "neuron"

    def is_available(self) -> bool:
        if self._absent():
            return False  # told from files alone: the SDK takes seconds to import
        try:
            return bool(self._module().is_available())
        except Exception:  # an SDK that is broken is found out, and told of, by unavailable_reason
            return False

    def unavailable_reason(self) -> str:
        absent = self._absent()
        if absent:
            return absent
        try:
            self._module()
        except Exception as exc:
            return (
                f"torch.neuron is not there: {' '.join(str(exc).split())}; install a release of torch-neuronx that has"
                " the device type neuron"
            )
        remedy = "is one free, and does NEURON_RT_VISIBLE_CORES name it?"
        try:
            self._module().is_available()
        except Exception as exc:
            return f"torch.neuron cannot be asked: {' '.join(str(exc).split())}; {remedy}"
        return f"torch.neuron finds no device that it can use; {remedy}"

    def _absent(self) -> str:
        """What is missing, as far as files tell."""
        if not any(_DEVICES.glob("neuron[0-9]*")):
            return f"{_DEVICES}/neuron0 is not there: no Neuron device, no driver, or a container that was not given it"
        if not _is_installed():
            return f"package {_VENDOR} is not installed; install the Neuron SDK's torch-neuronx"
        return ""

    def _module(self) -> Any:
        """torch.neuron, which importing torch alone makes in newer releases only."""
        import torch

        if not hasattr(torch, "neuron"):
            importlib.import_module(_VENDOR)
        return torch.neuron  # type: ignore[attr-defined,unused-ignore]

    # --- what the wheel brings -----------------------------------------------------------------------------

    @property
    def ops_cls(self) -> type[DeviceOps]:
        from lmcache_neuron.ops import NeuronDeviceOps

        return NeuronDeviceOps

    @property
    def page_mover(
        self,
    ) -> Callable[[Sequence[Any], Sequence[int], Sequence[Sequence[int]], bool], None] | None:
        from lmcache_neuron import runtime

        return runtime.mover().move_pages if runtime.native_wanted() else None


def _is_installed() -> bool:
    """Whether the vendor's package can be found; it is not imported for that."""
    try:
        return importlib.util.find_spec(_VENDOR) is not None
    except ValueError:  # it is in the process, put there by other means than an import
        return True
