"""LMCache: a KV-cache host for LLM engines.

Importing this package costs nothing and needs neither torch nor a device. The names below are resolved on
first access (PEP 562), so a broken device wheel or a misspelt variable can hurt only what uses a device:

``torch_dev``
    The torch device module of the selected backend, a ``StubCPUDevice`` without an accelerator, or None
    without torch.
``torch_device_type``
    ``torch.device.type`` of the selected backend; ``"cpu"`` without an accelerator.
``device_ops``
    The ``DeviceOps`` of the selected backend. Raises DeviceError without torch.
``__version__``
    Version of the installed distribution, ``"0+unknown"`` when run from a source tree.

``get_include()`` and ``get_cmake_dir()`` say where the vendor SDK lies.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

    __version__: str
    torch_dev: Any
    torch_device_type: str
    device_ops: DeviceOps

__all__ = [
    "__version__",
    "device_ops",
    "get_cmake_dir",
    "get_include",
    "torch_dev",
    "torch_device_type",
]


def get_include() -> str:
    """The folder to give to a compiler for ``#include <lmcache/abi.h>`` and the SDK's other headers."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def get_cmake_dir() -> str:
    """The folder of ``lmcacheConfig.cmake``, for CMake's ``lmcache_DIR``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "cmake")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lmcache")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in ("torch_dev", "torch_device_type", "device_ops"):
        # Not stored in the module: the host caches its choice, and one cache is easier to trust than two.
        from lmcache.v1.platform import _device_detect

        if name == "device_ops":
            return _device_detect.resolve_device_ops()
        selection = _device_detect.selected()
        return selection.torch_dev if name == "torch_dev" else selection.device_type
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
