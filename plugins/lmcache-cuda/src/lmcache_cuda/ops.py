"""The device's operations: those of the native module, and torch's for the rest."""

from __future__ import annotations

from typing import ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache_cuda import driver

__all__ = ["CudaDeviceOps"]

logger = init_logger(__name__)


class CudaDeviceOps(DeviceOps):
    """See :class:`DeviceOps`.

    A native module that does not load is an error with the loader's words: whoever installed the wheel was promised
    it. With LMCACHE_CUDA_NATIVE=off torch's operations stand in. They are safe: those that keep the order of the
    stream on a GPU serve, and those that would not (the completions) are absent, as ``DeviceOps`` has it.
    """

    device_type: ClassVar[str] = "cuda"

    def ensure_native(self) -> None:
        """Bind the native module.

        Raises:
            DeviceError: It does not load, or was built for another core.
        """
        if not driver.wanted():
            logger.warning(
                "LMCACHE_CUDA_NATIVE=off: torch's operations serve; lmcache-driven transfers are not offered"
            )
            return
        from lmcache_cuda import native_ops

        self.bind_native(native_ops)
