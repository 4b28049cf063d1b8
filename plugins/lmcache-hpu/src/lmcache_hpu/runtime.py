"""The device as torch has it: what ends a step of lazy mode, what waits, and the mover that all transfers share."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from lmcache.errors import DeviceError
from lmcache_hpu import settings

if TYPE_CHECKING:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

__all__ = ["TORCH_MODULE", "end_step", "mover", "native", "synchronize"]

#: The attribute of torch. The tests of this wheel put another device's here: nothing else of the path differs.
TORCH_MODULE = "hpu"

_CORE, _INTERNAL = "habana_frameworks.torch.core", "habana_frameworks.torch.utils.internal"


def native() -> Any:
    """The native module.

    Raises:
        DeviceError: It does not load; with the loader's words.
    """
    try:
        from lmcache_hpu import _native
    except ImportError as exc:
        raise DeviceError(
            f"lmcache_hpu._native cannot be loaded: {' '.join(str(exc).split())}; reinstall lmcache-hpu for this"
            " Python, or set LMCACHE_HPU_NATIVE=off: torch's operations are right in its place, and slower"
        ) from exc
    return _native


@cache
def _marker() -> Callable[[], object]:
    """Ends a step, or does nothing where operations run as they are called."""
    wanted = settings.step_marks()
    if wanted == "off" or (wanted == "auto" and not _is_lazy()):
        return lambda: None
    try:
        mark: Callable[[], object] = importlib.import_module(_CORE).mark_step
    except (ImportError, AttributeError) as exc:
        raise DeviceError(
            f"step marks of lazy mode need {_CORE}.mark_step: {exc}; set LMCACHE_HPU_STEP_MARKS=off if operations run"
            " as they are called"
        ) from exc
    return mark


def _is_lazy() -> bool:
    """As Gaudi's software says itself; one that does not say it is asked by the variable that it reads."""
    try:
        return bool(importlib.import_module(_INTERNAL).is_lazy())
    except (ImportError, AttributeError):
        return os.environ.get("PT_HPU_LAZY_MODE", "").strip() == "1"


def end_step() -> None:
    """Have what was queued so far compiled, or found, and run. It waits for nothing."""
    _marker()()


def synchronize(device: Any = None) -> None:
    """Wait for the device."""
    import torch

    end_step()
    module = getattr(torch, TORCH_MODULE)
    if device is None or device.index in (None, module.current_device()):
        module.synchronize()
    else:
        with module.device(device):
            module.synchronize()


@cache
def mover() -> FixedShapeMover:
    """What all transfers share: its stage is made once."""
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

    return FixedShapeMover(native(), settings.block_sizes(), end_step, synchronize)
