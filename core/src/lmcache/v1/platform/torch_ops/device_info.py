"""What torch tells of a device. ``DeviceOps`` has the contract."""

from __future__ import annotations

import operator
from typing import Any

from lmcache.v1.platform.base.op_contract import takes

__all__ = ["get_gpu_pci_bus_id"]


@takes()
def get_gpu_pci_bus_id(device_id: int = 0) -> str | None:
    """By the selected backend's torch module; None without torch, or if its properties have no bus."""
    from lmcache.v1.platform._device_detect import selected

    index, module = operator.index(device_id), selected().torch_dev
    if index < 0:
        raise ValueError(f"get_gpu_pci_bus_id: device_id={index}: expected 0 or more")
    if module is None or not hasattr(module, "get_device_properties"):
        return None
    if hasattr(module, "device_count") and index >= module.device_count():
        raise ValueError(f"get_gpu_pci_bus_id: device_id={index}: there are {module.device_count()} devices")
    properties = module.get_device_properties(index)
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return None
    domain, bus, device = (operator.index(number) for number in place)
    return f"{domain:04X}:{bus:02X}:{device:02X}.0"
