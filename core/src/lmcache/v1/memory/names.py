"""The names of the memory layer, for those who use it from outside."""

from __future__ import annotations

from lmcache.v1.memory.allocator import MemoryAllocator, MemoryAllocatorInterface
from lmcache.v1.memory.allocators import (
    AdHocMemoryAllocator,
    BufferAllocator,
    HostMemoryAllocator,
    MixedMemoryAllocator,
    PagedTensorMemoryAllocator,
    PinMemoryAllocator,
    TensorMemoryAllocator,
)
from lmcache.v1.memory.arena import Arena, buffer_arena, host_arena, pinned_arena, tensor_arena
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.memory.lazy import LazyMemoryAllocator
from lmcache.v1.memory.metadata import MemoryObjMetadata
from lmcache.v1.memory.objects import MemoryObj

__all__ = [
    "AdHocMemoryAllocator",
    "Arena",
    "BufferAllocator",
    "HostMemoryAllocator",
    "LazyMemoryAllocator",
    "MemoryAllocator",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "MixedMemoryAllocator",
    "PagedTensorMemoryAllocator",
    "PinMemoryAllocator",
    "TensorMemoryAllocator",
    "buffer_arena",
    "host_arena",
    "pinned_arena",
    "tensor_arena",
]
