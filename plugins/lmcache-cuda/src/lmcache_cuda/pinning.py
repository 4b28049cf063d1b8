"""Page-locking of host memory: in one piece where the driver can, else in steps, all of them or none."""

from __future__ import annotations

import mmap
import resource
import threading
from bisect import bisect_right, insort
from collections.abc import Iterator

from lmcache.logging import init_logger, warn_once
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend
from lmcache_cuda import runtime

__all__ = ["PIECES", "CudaPinMemoryBackend", "Pieces"]

logger = init_logger(__name__)

_PORTABLE = 1
"""Of every context of the process: torch's and, on other devices, the others'."""
_STEPS = (1 << 30, 64 << 20)
"""Bytes per registration, one size tried after the other once the whole was refused."""
_FINAL = (712,)
"""Errors that smaller steps do not mend: part of it is registered already."""


class Pieces:
    """Where memory that was registered in pieces is cut: no copy may span two of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cuts: list[int] = []

    def add(self, cuts: list[int]) -> None:
        with self._lock:
            for cut in cuts:
                insort(self._cuts, cut)

    def remove(self, cuts: list[int]) -> None:
        with self._lock:
            for cut in cuts:
                self._cuts.remove(cut)

    def cuts(self, ptr: int, nbytes: int) -> list[int]:
        """Offsets at which a copy of ``nbytes`` at ``ptr`` must be cut; none, most of the time."""
        if not self._cuts:
            return []
        with self._lock:
            first = bisect_right(self._cuts, ptr)
            last = bisect_right(self._cuts, ptr + nbytes - 1)
            return [cut - ptr for cut in self._cuts[first:last]]


PIECES = Pieces()


class CudaPinMemoryBackend(PinMemoryBackend):
    """See :class:`PinMemoryBackend`. Errors of the driver end here: the driver keeps none for the next call."""

    def __init__(self, pieces: Pieces = PIECES) -> None:
        self._lock = threading.Lock()
        self._pieces = pieces
        self._pinned: dict[int, list[int]] = {}

    @property
    def is_pin_supported(self) -> bool:
        try:
            native = runtime.native()
            return native.device_count() > 0 and bool(native.device_info(0)["host_register"])
        except Exception as exc:  # no driver, or a module that does not load: nothing can be pinned then
            warn_once(logger, "pinning", "memory cannot be page-locked: %s", exc)
            return False

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        if ptr <= 0 or size <= 0:
            return False
        with self._lock:
            if ptr in self._pinned:
                return False
            fault: Exception | None = None
            for step in (size, *(step for step in _STEPS if step < size)):
                parts = list(_parts(ptr, size, step))
                try:
                    _register(parts, flags | _PORTABLE)
                except RuntimeError as exc:
                    fault = fault or exc
                    if getattr(exc, "code", 0) in _FINAL:
                        break
                    continue
                self._pinned[ptr] = [start for start, _ in parts]
                self._pieces.add(self._pinned[ptr][1:])
                return True
        logger.warning("%d bytes at %#x cannot be page-locked: %s%s", size, ptr, fault, _limit(size))
        return False

    def unpin_memory(self, ptr: int) -> bool:
        with self._lock:
            starts = self._pinned.pop(ptr, [])
            self._pieces.remove(starts[1:])
            return bool(starts) and not _unregister(starts)


def _parts(ptr: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """Pieces of at most ``step`` bytes, cut at page borders: two registrations must not share a page."""
    end = ptr + size
    while ptr < end:
        stop = end if end - ptr <= step else (ptr + step) // mmap.PAGESIZE * mmap.PAGESIZE
        yield ptr, stop - ptr
        ptr = stop


def _register(parts: list[tuple[int, int]], flags: int) -> None:
    """All of them or none.

    Raises:
        RuntimeError: The driver's, of the first that it refused.
    """
    done: list[int] = []
    for start, size in parts:
        try:
            runtime.native().host_register(start, size, flags)
        except RuntimeError:
            _unregister(done)
            raise
        done.append(start)


def _unregister(starts: list[int]) -> int:
    """How many the driver refused to give up; each is logged."""
    refused = 0
    for start in starts:
        try:
            runtime.native().host_unregister(start)
        except RuntimeError as exc:
            refused += 1
            logger.warning("memory at %#x stays page-locked: %s", start, exc)
    return refused


def _limit(size: int) -> str:
    """What the operator can do, if it is the limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        return ""
    return (
        f"; this process may lock {soft} bytes (RLIMIT_MEMLOCK): raise it with ulimit -l unlimited, "
        "LimitMEMLOCK=infinity in the systemd unit, or --ulimit memlock=-1 of docker"
    )
