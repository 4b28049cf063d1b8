"""A host arena that reserves addresses at once, and takes and page-locks memory in steps as it fills."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from lmcache.logging import info_once, init_logger
from lmcache.v1.memory.allocator import MemoryAllocator
from lmcache.v1.memory.arena import host_arena
from lmcache.v1.memory.range_allocator import RangeAllocator
from lmcache.v1.memory.spaces import LEAST_ALIGNMENT, ArenaSpace

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["LazyMemoryAllocator"]

logger = init_logger(__name__)

STEP = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class LazyMemoryAllocator(MemoryAllocator):
    """Starts with ``init_size`` bytes and grows up to ``final_size``.

    A request that does not fit takes the next steps, if they can make room for it; the caller waits for the pages.
    :meth:`expand` takes a step ahead of need, from a thread of the caller's. A step that the host refuses is no
    error: there is no more room then, until a later request tries again.

    Each step is page-locked by itself. A device's copy across their borders is split there by the op
    ``lmcache_memcpy_async``, which is told ``step_bytes`` and the object's ``metadata.address``.
    """

    def __init__(
        self,
        init_size: int,
        final_size: int,
        align_bytes: int = 4096,
        *,
        step_bytes: int = STEP,
        numa_node: int | None = None,
        spec: DeviceSpec | None = None,
    ) -> None:
        """
        Args:
            init_size: Bytes that are there from the start; rounded up to whole steps.
            final_size: Bytes that it may grow to; rounded down to whole steps.
            align_bytes: Of each object; a power of two.
            step_bytes: What is taken at a time: a multiple of ``align_bytes`` and of the host's pages.
            numa_node: Ask for memory of this node.
            spec: Who page-locks; None: the selected backend.

        Raises:
            ValueError: Sizes that do not go together.
            MemoryError: The host does not give ``init_size``, or not the addresses.
        """
        unit = max(align_bytes, os.sysconf("SC_PAGE_SIZE"))
        if align_bytes < LEAST_ALIGNMENT:
            raise ValueError(
                f"align_bytes={align_bytes}: expected a power of two of {LEAST_ALIGNMENT} or more"
            )
        if step_bytes < 1 or step_bytes % unit:
            raise ValueError(f"step_bytes={step_bytes}: expected a positive multiple of {unit}")
        if not 0 < init_size <= final_size or final_size < step_bytes:
            raise ValueError(
                f"init_size={init_size}, final_size={final_size}: expected 0 < init_size <= final_size, and a "
                f"final_size of one step ({step_bytes} bytes) or more"
            )
        self.step_bytes = step_bytes
        self.final_size = final_size - final_size % step_bytes
        self._spec = _selected_spec() if spec is None else spec
        self._pinned: list[int] = []
        self._growing = threading.Lock()
        self._arena = host_arena(self.final_size, numa_node, partial(_unpin, self._spec, self._pinned))
        self._ranges = RangeAllocator(step_bytes, align_bytes)
        super().__init__(ArenaSpace(self._arena, self._ranges))
        why = _populate(self._arena.address, step_bytes)
        if not why:
            self._pin(0)
            while self._ranges.capacity < min(init_size, self.final_size) and not why:
                why = self._step()
        if why:
            self.close()
            raise MemoryError(
                f"LazyMemoryAllocator: init_size={init_size}: {why}; ask for less or free memory"
            )

    @property
    def committed(self) -> int:
        """Bytes that are there now."""
        return self._ranges.capacity

    def expand(self) -> bool:
        """Take one more step; False at the final size, or if the host refuses."""
        with self._growing:
            return self._expand()

    def close(self) -> None:
        """Allocate nothing more. The memory goes when the last object does. Closing twice is allowed."""
        with self._growing:  # a step that is under way is finished first
            super().close()

    def _grow(self, nbytes: int, count: int, seen: int | None) -> bool:
        with self._growing:
            if seen is not None and self._ranges.capacity > seen:  # by another thread while this one waited
                return True
            return self._helps(nbytes, count) and self._expand()

    def _helps(self, nbytes: int, count: int) -> bool:
        """Whether growing to the end could make the room. If not, nothing is taken for nothing."""
        with self.lock:
            ranges, more = self._ranges, self.final_size - self._ranges.capacity
            need, free = ranges.rounded(nbytes), ranges.capacity - ranges.used
            return need <= max(ranges.largest_free, ranges.tail_free + more) and need * count <= free + more

    def _expand(self) -> bool:
        if self._ranges.capacity >= self.final_size or self._closed:
            return False
        why = self._step()
        if why:
            logger.warning("LazyMemoryAllocator: it stays at %d bytes: %s", self._ranges.capacity, why)
        return not why

    def _step(self) -> str:
        """Take and lock the next step, without the allocator's lock: others allocate and free meanwhile."""
        at = self._ranges.capacity
        why = _populate(self._arena.address + at, self.step_bytes)
        if not why:
            self._pin(at)
            with self.lock:
                self._ranges.grow(self.step_bytes)
        return why

    def _pin(self, at: int) -> None:
        address = self._arena.address + at
        if self._spec.pin_memory(address, self.step_bytes):
            self._pinned.append(address)
            return
        info_once(
            logger,
            f"pageable {self._spec.backend_name}",
            "LazyMemoryAllocator: backend %s did not page-lock memory; it stays pageable and copies are slower",
            self._spec.backend_name,
        )


def _unpin(spec: DeviceSpec, pinned: list[int]) -> None:
    for address in pinned:
        if not spec.unpin_memory(address):
            logger.warning("LazyMemoryAllocator: backend %s did not unpin memory", spec.backend_name)
    pinned.clear()


def _populate(address: int, nbytes: int) -> str:
    """Make the pages be there; why not, if the host refuses. Releases the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if not libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
        return ""
    failed = ctypes.get_errno()
    if failed == errno.EINVAL:  # an older kernel: pages come when they are touched
        return ""
    return f"{nbytes} bytes more cannot be had ({os.strerror(failed)})"


def _selected_spec() -> DeviceSpec:
    from lmcache.v1.platform._device_detect import selected

    return selected().spec
