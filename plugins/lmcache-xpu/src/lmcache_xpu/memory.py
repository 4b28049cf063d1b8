"""Host memory as USM, which the device reads and writes as it is: the pinned allocators of the contract, and an
allocator of tensors over one such buffer."""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lmcache.errors import DeviceError
from lmcache.logging import info_once, init_logger
from lmcache.v1.memory.range_allocator import RangeAllocator
from lmcache_xpu import native, runtime

__all__ = ["ALLOCATORS", "XPUMemoryAllocator"]

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Block:
    op: str
    size: int
    queue: int


_live: dict[int, _Block] = {}
_lock = threading.Lock()


def _alloc(op: str, size: int, device: Any) -> int:
    size = operator.index(size)
    if size < 1:
        raise ValueError(f"{op}: size={size}: expected 1 byte or more")
    queue = runtime.current_queue(device)
    ptr = int(native.load().usm_alloc(queue, size, "host"))
    ctypes.memset(ptr, 0, size)
    with _lock:
        _live[ptr] = _Block(op, size, queue)
    return ptr


def _free(op: str, ptr: int, size: int | None) -> None:
    """Free what the allocator of the same name made. Work that uses the memory must be done."""
    ptr = operator.index(ptr)
    with _lock:
        found = _live.get(ptr)
        if found is None or found.op.partition("_")[2] != op.partition("_")[2]:
            raise ValueError(f"{op}: pointer {ptr:#x}: expected one of {op.replace('free', 'alloc', 1)}")
        if size and operator.index(size) != found.size:
            raise ValueError(f"{op}: pointer {ptr:#x}: size={size}: {found.size} bytes were asked for")
        del _live[ptr]
    native.load().usm_free(found.queue, ptr)


# The signatures are the contract's, and callers pass by position.
def alloc_pinned_ptr(size: int, device_id: int = 0) -> int:
    return _alloc("alloc_pinned_ptr", size, device_id)


def free_pinned_ptr(ptr: int) -> None:
    _free("free_pinned_ptr", ptr, None)


def _with_wish(op: str, wish: str) -> tuple[Callable[..., int], Callable[..., None]]:
    """An allocator that is asked for more than USM has, and what frees it. That is said once."""
    freeing = op.replace("alloc", "free", 1)

    def alloc(size: int, where: int = 0) -> int:
        info_once(logger, op, "%s: USM does not take a wish for %s: plain pages are given", op, wish)
        return _alloc(op, size, None)

    def free(ptr: int, size: int | None = None) -> None:
        _free(freeing, ptr, size)

    alloc.__name__, free.__name__ = op, freeing
    return alloc, free


_WISHES = {
    "alloc_pinned_numa_ptr": "a NUMA node",
    "alloc_hugepage_pinned_ptr": "huge pages",
    "alloc_hugepage_pinned_numa_ptr": "huge pages or a NUMA node",
}
ALLOCATORS: dict[str, Callable[..., Any]] = {
    "alloc_pinned_ptr": alloc_pinned_ptr,
    "free_pinned_ptr": free_pinned_ptr,
    **{function.__name__: function for op, wish in _WISHES.items() for function in _with_wish(op, wish)},
}
"""Ops of the contract by their names."""


class XPUMemoryAllocator:
    """Tensors in one buffer of USM host memory: the device copies to and from them without staging.

    Thread-safe. Work on a tensor must be done before it is freed; ``close`` frees the buffer, tensors or not.
    """

    def __init__(self, size: int, device: Any = None, alignment: int = 4096) -> None:
        """
        Args:
            size: Bytes of the buffer.
            device: The device whose context owns it; None: the current one.
            alignment: Of every tensor; a power of two.

        Raises:
            ValueError: A size or alignment that makes no sense.
            DeviceError: There is no such memory.
        """
        self._ranges = RangeAllocator(size, alignment)
        self._lock = threading.Lock()
        self._base = _alloc("alloc_pinned_ptr", size, device)
        self._memory = (ctypes.c_uint8 * size).from_address(self._base)

    def allocate(self, shape: Sequence[int], dtype: Any) -> Any:
        """A contiguous tensor whose contents are anything, or None where there is no room.

        Raises:
            ValueError: It would have no bytes.
            DeviceError: The allocator is closed.
        """
        import torch

        nbytes = prod(shape) * dtype.itemsize
        with self._lock:
            if not self._base:
                raise DeviceError("XPUMemoryAllocator: it is closed")
            offset = self._ranges.allocate(nbytes)
        if offset is None:
            return None
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
        return flat.view(dtype).view(tuple(shape))

    def free(self, tensor: Any) -> None:
        """Give a tensor's memory back.

        Raises:
            ValueError: It is none of this allocator's, or freed already.
        """
        with self._lock:
            self._ranges.free(tensor.data_ptr() - self._base)

    def close(self) -> None:
        """Free the buffer. Closing twice is allowed."""
        with self._lock:
            base, self._base = self._base, 0
        if base:
            _free("free_pinned_ptr", base, None)
