"""Loads the two libraries beside this file and puts the device into torch, or says why not."""

from __future__ import annotations

import atexit
import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["get_include", "library_path", "load"]

_HERE = Path(__file__).resolve().parent
NAME = "sim"


def get_include() -> str:
    """The folder of ``lmcache_sim.h``."""
    return str(_HERE / "include")


def library_path() -> str:
    """The driver's library, which needs neither torch nor Python. Link with it or open it by this path."""
    return str(_HERE / "liblmcache_sim.so")


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def check_torch(built: str, running: str) -> None:
    """Refuse a torch of another minor version: its C++ classes differ.

    Raises:
        ImportError: Names both versions and what to do.
    """
    if _minor(built) != _minor(running):
        raise ImportError(
            f"lmcache-sim was built for torch {_minor(built)} and torch {running} is installed: rebuild it beside this "
            "torch (pip install --no-build-isolation --force-reinstall lmcache-sim), or install torch "
            f"{_minor(built)}.*"
        )


def check_unclaimed(name: str) -> None:
    """Refuse a process in which another backend has taken torch's one place for devices from outside.

    Raises:
        ImportError: Names the other device.
    """
    if name not in ("privateuseone", NAME):
        raise ImportError(
            f"lmcache-sim cannot be loaded beside the torch device {name!r}: torch has room for one such device in a "
            f"process; start a process that does not import the package of {name!r}"
        )


def load() -> None:
    """Make the torch device ``sim``.

    Raises:
        ImportError: This torch, or what else is in the process, does not allow it; torch is as it was.
    """
    try:
        import torch
    except ImportError as exc:
        raise ImportError(f"lmcache-sim needs torch: {exc}") from exc
    try:
        from lmcache_sim._built import TORCH_BUILT
    except ImportError as exc:
        raise ImportError(
            "lmcache-sim was not built: install its wheel instead of using the sources"
        ) from exc

    check_torch(TORCH_BUILT, torch.__version__)
    check_unclaimed(torch._C._get_privateuse1_backend_name())
    from lmcache_sim import _driver

    backend = ctypes.CDLL(str(_HERE / "liblmcache_sim_torch.so"))
    backend.lmcache_sim_register.restype = ctypes.c_char_p
    if refusal := backend.lmcache_sim_register():
        raise ImportError(f"lmcache-sim cannot be loaded: {refusal.decode()}")
    _name_device(torch)
    atexit.register(_driver.LIB.lmcache_sim_shutdown)


def _name_device(torch: Any) -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    from lmcache_sim import device

    module: ModuleType = device
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=False, for_storage=True
    )
