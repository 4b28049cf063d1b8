"""The pool, page-locked for the devices that copy to and from it: by the server, or by a worker that copies."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from lmcache.logging import init_logger, warn_once
from lmcache.v1.storage.shm_pool import PoolView

if TYPE_CHECKING:
    import torch

    from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["PoolPins", "lock_mapping"]

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


def lock_mapping(view: PoolView, device: torch.device) -> threading.Thread | None:
    """Lock a worker's mapping for its device, in a thread of its own, for as long as anybody uses the mapping.

    Until it is locked, and where that is refused, copies go through the driver's own buffers. None: nothing to do
    for this device.
    """
    if device.type == "cpu":
        return None
    thread = threading.Thread(target=_lock, args=(view, device), name="lmcache-pin", daemon=True)
    thread.start()
    return thread


def _lock(view: PoolView, device: torch.device) -> None:
    from lmcache.v1.platform import get_device_spec

    size = view.data_bytes
    try:
        spec = get_device_spec(device.type)
        if spec is None or not spec.is_pin_supported:
            return
        if device.index is not None:  # a thread begins on the first device, and would open that one, too
            spec._get_torch_module().set_device(device)
        locked = spec.pin_memory(view.address, size)
    except Exception as exc:  # a fault of the vendor's costs speed, nothing else
        warn_once(logger, f"lock:{device.type}", "device %s: the pool is not page-locked: %s", device, exc)
        return
    if not locked:
        warn_once(
            logger,
            f"lock:{device.type}",
            "device backend %s: the pool's %d bytes cannot be page-locked in this worker, so copies are slower;"
            " raise the limit (ulimit -l unlimited) or take a smaller pool",
            spec.backend_name,
            size,
        )
        return
    # Copies under way keep the view; once it goes, and before its memory is unmapped, this is called. Not at the
    # end of the process, when the driver may have gone first.
    weakref.finalize(view, _unlock, spec, view.address).atexit = False
    logger.info(
        "device backend %s: this worker's mapping of %d bytes is page-locked", spec.backend_name, size
    )


def _unlock(spec: DeviceSpec, address: int) -> None:
    if not spec.unpin_memory(address):
        logger.warning("device backend %s: a mapping of the pool stays page-locked", spec.backend_name)
