"""Host memory as USM, which the device reads and writes as it is: the pinned allocators of the contract, and an
allocator of memory objects over one such buffer."""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache.logging import info_once, init_logger
from lmcache.v1.memory.allocators import ALIGNMENT, TensorMemoryAllocator
from lmcache.v1.memory.arena import Arena
from lmcache_xpu import native, runtime

__all__ = ["ALLOCATORS", "XPUMemoryAllocator", "usm_arena"]

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Block:
    op: str
    size: int


_live: dict[int, _Block] = {}
_lock = threading.Lock()


def _alloc(op: str, size: int, device: Any) -> int:
    size = operator.index(size)
    if not 0 < size < 1 << 63:
        raise ValueError(f"{op}: size={size}: expected 1 byte or more, and a number of 63 bits")
    ptr = int(native.load().usm_alloc(runtime.current_queue(device), size, "host"))
    ctypes.memset(ptr, 0, size)
    with _lock:
        _live[ptr] = _Block(op, size)
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
    native.load().usm_free(ptr)


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


def usm_arena(size: int, device: Any = None) -> Arena:
    """USM host memory for allocators of memory objects, such as ``PagedTensorMemoryAllocator``.

    It goes with the last object in it; not at the end of the process, where the runtime may be gone already.

    Args:
        size: Bytes.
        device: The device whose context owns it; None: the current one.

    Raises:
        ValueError: A size that makes no sense.
        DeviceError: There is no such memory.
    """
    address = _alloc("usm_arena", size, device)
    return Arena(size, address, lambda: _free("usm_arena", address, None))


class XPUMemoryAllocator(TensorMemoryAllocator):
    """Memory objects in one buffer of USM host memory: the device copies to and from them without staging.

    See ``TensorMemoryAllocator``. Work of the device on an object must be done before its last holder goes.
    """

    def __init__(self, size: int, align_bytes: int = ALIGNMENT, device: Any = None) -> None:
        """
        Args:
            size: Bytes of the buffer.
            align_bytes: Of every object; a power of two.
            device: The device whose context owns it; None: the current one.

        Raises:
            ValueError: A size or alignment that makes no sense.
            DeviceError: There is no such memory.
        """
        super().__init__(usm_arena(size, device), align_bytes)
