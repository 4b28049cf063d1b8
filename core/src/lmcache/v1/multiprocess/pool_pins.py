"""The server's pool, page-locked for the devices that copy to and from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lmcache.logging import init_logger
from lmcache.v1.storage.shm_pool import PoolView

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["PoolPins"]

logger = init_logger(__name__)


class PoolPins:
    """Locks the pool once per backend, when its first worker comes, and until :meth:`release`.

    Pageable memory serves as well, only slower: a device's driver copies it piece by piece through buffers of
    its own.
    """

    def __init__(self, view: PoolView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._tried: set[str] = set()
        self._pinned: list[DeviceSpec] = []

    def pin(self, spec: DeviceSpec) -> None:
        """Lock it for a device unless that was tried before. Takes as long as the system does: no wait is
        shorter than the first large transfer would be."""
        with self._lock:
            if spec.backend_name in self._tried:
                return
            self._tried.add(spec.backend_name)
            if not spec.is_pin_supported:
                return
            size = self._view.data_bytes
            if spec.pin_memory(self._view.address, size):
                self._pinned.append(spec)
                logger.info("device backend %s: the pool's %d bytes are page-locked", spec.backend_name, size)
            else:
                logger.warning(
                    "device backend %s: the pool's %d bytes cannot be page-locked, so copies are slower; "
                    "raise the limit (ulimit -l unlimited) or take a smaller --l1-size-gb",
                    spec.backend_name,
                    size,
                )

    def release(self) -> None:
        """Unlock it, before it is unmapped and after the last copy."""
        with self._lock:
            for spec in self._pinned:
                if not spec.unpin_memory(self._view.address):
                    logger.warning("device backend %s: the pool stays page-locked", spec.backend_name)
            self._pinned.clear()
