"""The native module, loaded once and told which driver this process uses."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from lmcache.errors import DeviceError, LayoutError
from lmcache_cuda import settings

__all__ = ["load", "wanted"]

_MODULE = "lmcache_cuda._native"
_LOCK = threading.Lock()
_in_use: dict[str, Any] = {}


def wanted() -> bool:
    """Whether LMCACHE_CUDA_NATIVE leaves the native module on."""
    return settings.choice("LMCACHE_CUDA_NATIVE") == "on"


def load(kind: str) -> Any:
    """The native module, working on the driver of ``kind``. Touches no driver.

    Args:
        kind: "cuda" or "rocm".

    Raises:
        DeviceError: It does not load, in the loader's own words, or works on the other driver already.
    """
    with _LOCK:
        if kind not in _in_use:
            try:
                module = importlib.import_module(_MODULE)
            except ImportError as exc:
                raise DeviceError(
                    f"{_MODULE} cannot be loaded: {exc}; pip install --force-reinstall lmcache-cuda, or set "
                    "LMCACHE_CUDA_NATIVE=off: torch's operations are safe in its place, but slower, and "
                    "lmcache-driven transfers are not offered then"
                ) from exc
            module.set_error_type(DeviceError, LayoutError)
            module.use(kind)
            _in_use[kind] = module
        return _in_use[kind]
