"""The native module, loaded once, and the SYCL runtime that it works on: the one that torch brought."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

from lmcache.errors import DeviceError, LayoutError

__all__ = ["RUNTIME", "load"]

RUNTIME = "libsycl.so.9"
"""Of Intel's compiler 2026, which torch 2.13 for XPU requires. That of 2025, libsycl.so.8, is another interface."""

_MODULE = "lmcache_xpu._native"
_LOCK = threading.Lock()
_loaded: list[Any] = []


def load() -> Any:
    """The native module.

    Raises:
        DeviceError: It does not load, in the loader's own words.
    """
    with _LOCK:
        if not _loaded:
            _open_runtime()
            try:
                module = importlib.import_module(_MODULE)
            except ImportError as exc:
                raise DeviceError(
                    f"{_MODULE} cannot be loaded: {exc}; it needs {RUNTIME}, which torch 2.13 or later for XPU "
                    "installs (https://download.pytorch.org/whl/xpu)"
                ) from exc
            module.set_errors(DeviceError, LayoutError)
            _loaded.append(module)
        return _loaded[0]


def _open_runtime() -> None:
    """Have the runtime in the process, so that the module finds it by its name, wherever it is.

    torch for XPU has loaded it already: then that one, and never a second one of another folder. Else it is looked
    for where pip puts it; if it is not there either, the loader's own search decides.
    """
    if _is_loaded():
        return
    path = Path(sys.prefix, "lib", RUNTIME)
    if path.is_file():
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as exc:
            raise DeviceError(f"{path} cannot be loaded: {exc}; reinstall intel-sycl-rt") from exc


def _is_loaded() -> bool:
    try:
        ctypes.CDLL(RUNTIME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True
