"""Host memory known to the device's driver, and locked in memory as far as this process may."""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch

from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

__all__ = ["SimPinMemoryBackend"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t


def _libc(name: str, *arguments: object) -> bool:
    function = getattr(_LIBC, name)
    function.argtypes = [_ADDRESS, _SIZE, _ADDRESS][: len(arguments)]
    return function(*arguments) == 0


def _is_mapped(ptr: int, size: int) -> bool:
    """Whether all of it is memory of this process."""
    start = ptr // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ptr + size - start + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    room = ctypes.create_string_buffer(pages)
    return _libc("mincore", start, ptr + size - start, ctypes.addressof(room))


class SimPinMemoryBackend(PinMemoryBackend):
    """Pinned means: the driver has it registered, so that torch sees it as pinned, too.

    Page-locking is tried besides. Where the limit of the process (RLIMIT_MEMLOCK) does not allow it the device,
    which is only a simulation, can do without; ``locked`` says which ranges are locked indeed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self.locked: set[int] = set()

    @property
    def is_pin_supported(self) -> bool:
        return True

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        if ptr <= 0 or size <= 0 or not _is_mapped(ptr, size):
            return False
        with self._lock:
            try:
                torch.sim.host_register(ptr, size)
            except RuntimeError:  # part of it is registered already
                return False
            self._sizes[ptr] = size
            if _libc("mlock", ptr, size):
                self.locked.add(ptr)
        return True

    def unpin_memory(self, ptr: int) -> bool:
        with self._lock:
            size = self._sizes.pop(ptr, 0)
            if not size:
                return False
            torch.sim.host_unregister(ptr)
            if ptr in self.locked:
                self.locked.discard(ptr)
                _libc("munlock", ptr, size)
        return True
