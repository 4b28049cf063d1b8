"""The allocators by the names that the outside world knows. What differs is the arena and how it is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmcache.v1.memory.allocator import MemoryAllocator
from lmcache.v1.memory.arena import Arena, host_arena, pinned_arena, tensor_arena
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.memory.metadata import layout_of
from lmcache.v1.memory.objects import MemoryObj
from lmcache.v1.memory.page_allocator import PageAllocator
from lmcache.v1.memory.range_allocator import RangeAllocator
from lmcache.v1.memory.spaces import LEAST_ALIGNMENT, ArenaSpace, BufferSpace

__all__ = [
    "AdHocMemoryAllocator",
    "BufferAllocator",
    "HostMemoryAllocator",
    "MixedMemoryAllocator",
    "PagedTensorMemoryAllocator",
    "PinMemoryAllocator",
    "TensorMemoryAllocator",
]

ALIGNMENT = 4096


class TensorMemoryAllocator(MemoryAllocator):
    """Ranges of a flat tensor of bytes, or of an arena; free neighbours grow together again."""

    def __init__(self, tensor: Any, align_bytes: int = ALIGNMENT) -> None:
        arena = _arena_of(tensor)
        super().__init__(_ranges(arena, align_bytes))


class PagedTensorMemoryAllocator(MemoryAllocator):
    """Equal pages of a flat tensor of bytes, or of an arena, each with room for one object of the layout given.

    A last chunk with fewer tokens takes a page as well.
    """

    def __init__(
        self,
        tensor: Any,
        shapes: Any,
        dtypes: Any = None,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        align_bytes: int = LEAST_ALIGNMENT,
    ) -> None:
        super().__init__(_paged(_arena_of(tensor), shapes, dtypes, fmt, align_bytes))


class HostMemoryAllocator(MemoryAllocator):
    """Pages of the host that are not page-locked; of one NUMA node on wish."""

    def __init__(self, size: int, align_bytes: int = ALIGNMENT, numa_node: int | None = None) -> None:
        _check_size("HostMemoryAllocator", size)
        super().__init__(_ranges(host_arena(size, numa_node), align_bytes))


class PinMemoryAllocator(MemoryAllocator):
    """Host memory that is page-locked for the selected device, as ranges or as pages."""

    def __init__(
        self,
        size: int,
        use_paging: bool = False,
        shapes: Any = None,
        dtypes: Any = None,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        align_bytes: int = ALIGNMENT,
        hugepages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        """
        Args:
            size: Bytes.
            use_paging: Cut it into pages for objects of ``shapes``, ``dtypes`` and ``fmt``.
            align_bytes: Of each object.
            hugepages: Ask for huge pages.
            numa_node: Ask for memory of this node.

        Raises:
            ValueError: A size, alignment or layout that makes no sense.
            MemoryError: The host has not so much.
        """
        _check_size("PinMemoryAllocator", size)
        if use_paging and shapes is None:
            raise ValueError("use_paging=True: expected the shapes that a page holds")
        arena = pinned_arena(size, hugepages, numa_node)
        if use_paging:
            super().__init__(_paged(arena, shapes, dtypes, fmt, align_bytes))
        else:
            super().__init__(_ranges(arena, align_bytes))


class BufferAllocator(MemoryAllocator):
    """A buffer of Python's memory per object, up to ``limit`` bytes in all."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(BufferSpace(limit))


class AdHocMemoryAllocator(BufferAllocator):
    """For tests: memory without a limit and without set-up. ``live`` tells what was not given back."""

    def __init__(self) -> None:
        super().__init__()


class MixedMemoryAllocator:
    """A pinned arena for tensors, and buffers for what is serialised (``BINARY_BUFFER``)."""

    def __init__(
        self,
        size: int,
        use_paging: bool = False,
        *,
        shapes: Any = None,
        dtypes: Any = None,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        align_bytes: int = ALIGNMENT,
        hugepages: bool = False,
        numa_node: int | None = None,
        buffer_limit: int | None = None,
    ) -> None:
        """
        Args:
            size: Bytes of the arena; the rest as of ``PinMemoryAllocator``.
            buffer_limit: Bytes of all buffers; None: as many as ``size``.
        """
        self.pinned = PinMemoryAllocator(
            size,
            use_paging,
            shapes,
            dtypes,
            fmt,
            align_bytes=align_bytes,
            hugepages=hugepages,
            numa_node=numa_node,
        )
        self.buffers = BufferAllocator(size if buffer_limit is None else buffer_limit)

    def _for(self, fmt: MemoryFormat) -> MemoryAllocator:
        return self.buffers if fmt is MemoryFormat.BINARY_BUFFER else self.pinned

    def allocate(
        self, shapes: Any, dtypes: Any = None, fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> MemoryObj | None:
        """As of ``MemoryAllocator``."""
        return self._for(fmt).allocate(shapes, dtypes, fmt)

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> list[MemoryObj] | None:
        """As of ``MemoryAllocator``."""
        return self._for(fmt).batched_allocate(shapes, dtypes, batch_size, fmt)

    def free(self, obj: MemoryObj) -> None:
        """As of ``MemoryAllocator``."""
        (self.buffers if obj.parent() is self.buffers else self.pinned).free(obj)

    def batched_free(self, objs: Iterable[MemoryObj]) -> None:
        """Free each."""
        for obj in objs:
            self.free(obj)

    @property
    def capacity(self) -> int | None:
        """Bytes of the arena."""
        return self.pinned.capacity

    @property
    def used(self) -> int:
        """Bytes taken in the arena; those in buffers are ``buffers.used``."""
        return self.pinned.used

    @property
    def live(self) -> int:
        """Objects that hold memory, of both kinds."""
        return self.pinned.live + self.buffers.live

    def memcheck(self) -> bool:
        """Whether the books of both are right."""
        return self.pinned.memcheck() and self.buffers.memcheck()

    def close(self) -> None:
        """Allocate nothing more; memory goes with the last object in it."""
        self.pinned.close()
        self.buffers.close()


def _arena_of(tensor: Any) -> Arena:
    return tensor if isinstance(tensor, Arena) else tensor_arena(tensor)


def _ranges(arena: Arena, align_bytes: int) -> ArenaSpace:
    if align_bytes < LEAST_ALIGNMENT:
        raise ValueError(f"align_bytes={align_bytes}: expected a power of two of {LEAST_ALIGNMENT} or more")
    return ArenaSpace(arena, RangeAllocator(arena.size, align_bytes))


def _paged(arena: Arena, shapes: Any, dtypes: Any, fmt: MemoryFormat, align_bytes: int) -> ArenaSpace:
    if align_bytes < LEAST_ALIGNMENT or align_bytes % LEAST_ALIGNMENT:
        raise ValueError(f"align_bytes={align_bytes}: expected a positive multiple of {LEAST_ALIGNMENT}")
    nbytes = layout_of(shapes, dtypes, fmt).nbytes
    return ArenaSpace(arena, PageAllocator(arena.size, -(-nbytes // align_bytes) * align_bytes))


def _check_size(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name}: size={size}: expected 1 byte or more")
