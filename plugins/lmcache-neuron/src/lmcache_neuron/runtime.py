"""The device as torch has it, the settings, and the mover that all transfers share."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from lmcache.errors import ConfigError, DeviceError, bad_value

if TYPE_CHECKING:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

__all__ = ["TORCH_MODULE", "mover", "native", "native_wanted", "synchronize"]

#: The attribute of torch. The tests of this wheel put another device's here: nothing else of the path differs.
TORCH_MODULE = "neuron"

_NATIVE, _SIZES = "LMCACHE_NEURON_NATIVE", "LMCACHE_NEURON_BLOCK_SIZES"


def native_wanted() -> bool:
    """Whether the native module is to be used: off leaves all to torch, in shapes that follow the request."""
    value = os.environ.get(_NATIVE, "").strip().lower() or "on"
    if value not in ("on", "off"):
        raise ConfigError(bad_value(_NATIVE, value, "on or off"))
    return value == "on"


def native() -> Any:
    """The native module.

    Raises:
        DeviceError: It does not load; with the loader's words.
    """
    try:
        from lmcache_neuron import _native
    except ImportError as exc:
        raise DeviceError(
            f"lmcache_neuron._native cannot be loaded: {' '.join(str(exc).split())}; reinstall lmcache-neuron for this"
            f" Python, or set {_NATIVE}=off: torch's operations are right in its place, and slower"
        ) from exc
    return _native


def synchronize(device: Any = None) -> None:
    """Wait for the device."""
    import torch

    module = getattr(torch, TORCH_MODULE)
    if device is None or device.index in (None, module.current_device()):
        module.synchronize()
    else:
        with module.device(device):
            module.synchronize()


@cache
def mover() -> FixedShapeMover:
    """What all transfers share: its stage is made once."""
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover, parse_sizes

    sizes = parse_sizes(_SIZES, os.environ.get(_SIZES, ""))
    return FixedShapeMover(native(), sizes, lambda: None, synchronize)
