"""Host memory by address: six ways to allocate, and what frees each. ``DeviceOps`` has the contract.

Memory is pinned by the selected backend where that can, and is pageable where it cannot. Needs no torch.
"""

from __future__ import annotations

import atexit
import mmap
import operator
import os
import threading
from dataclasses import dataclass

from lmcache.logging import info_once, init_logger, warn_once
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.op_contract import takes
from lmcache.v1.platform.torch_ops.host_pages import address_of, map_pages
from lmcache.v1.platform.torch_ops.shm_segment import Segment, segment_name

__all__ = [
    "alloc_hugepage_pinned_numa_ptr",
    "alloc_hugepage_pinned_ptr",
    "alloc_numa_ptr",
    "alloc_pinned_numa_ptr",
    "alloc_pinned_ptr",
    "alloc_shm_pinned_ptr",
    "free_hugepage_pinned_numa_ptr",
    "free_hugepage_pinned_ptr",
    "free_numa_ptr",
    "free_pinned_numa_ptr",
    "free_pinned_ptr",
    "free_shm_pinned_ptr",
]

logger = init_logger(__name__)


@takes("pointers")
def alloc_pinned_ptr(size: int, device_id: int = 0) -> int:
    return _alloc("pinned", size)


@takes("pointers")
def free_pinned_ptr(ptr: int) -> None:
    _free("pinned", ptr)


@takes("pointers")
def alloc_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    return _alloc("pinned_numa", size, node=numa_id)


@takes("pointers")
def free_pinned_numa_ptr(ptr: int, size: int | None = None) -> None:
    _free("pinned_numa", ptr, size)


@takes("pointers")
def alloc_hugepage_pinned_ptr(size: int, device_id: int = 0) -> int:
    return _alloc("hugepage_pinned", size)


@takes("pointers")
def free_hugepage_pinned_ptr(ptr: int, size: int | None = None) -> None:
    _free("hugepage_pinned", ptr, size)


@takes("pointers")
def alloc_hugepage_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    return _alloc("hugepage_pinned_numa", size, node=numa_id)


@takes("pointers")
def free_hugepage_pinned_numa_ptr(ptr: int, size: int | None = None) -> None:
    _free("hugepage_pinned_numa", ptr, size)


@takes("pointers")
def alloc_numa_ptr(size: int, numa_id: int = 0) -> int:
    return _alloc("numa", size, node=numa_id)


@takes("pointers")
def free_numa_ptr(ptr: int, size: int | None = None) -> None:
    _free("numa", ptr, size)


@takes("pointers")
def alloc_shm_pinned_ptr(size: int, name: str) -> int:
    return _alloc("shm_pinned", size, name=segment_name("alloc_shm_pinned_ptr", name))


@takes("pointers")
def free_shm_pinned_ptr(ptr: int, size: int, name: str) -> None:
    _free("shm_pinned", ptr, size, segment_name("free_shm_pinned_ptr", name) if name else "")


@dataclass(frozen=True)
class _Allocation:
    kind: str
    size: int
    """As asked for."""
    memory: mmap.mmap
    pinned_by: DeviceSpec | None = None
    segment: Segment | None = None

    def release(self, op: str, ptr: int) -> None:
        if self.pinned_by is not None and not self.pinned_by.unpin_memory(ptr):
            backend = self.pinned_by.backend_name
            warn_once(
                logger, "unpin", "%s: %s did not unpin %#x; it is unmapped all the same", op, backend, ptr
            )
        if self.segment is not None:
            self.segment.remove_name()
        self.memory.close()


#: What is allocated and not freed, by address.
_live: dict[int, _Allocation] = {}
_lock = threading.Lock()


def _alloc(kind: str, size: int, node: int = -1, name: str = "") -> int:
    op = f"alloc_{kind}_ptr"
    size, node = operator.index(size), operator.index(node)
    if size < 1:
        raise ValueError(f"{op}: size={size}: expected 1 byte or more")
    spec = _selected_spec() if "pinned" in kind else None  # first: it may fail, and then nothing is to undo
    segment = Segment(op, name, size) if name else None
    memory = segment.memory if segment else map_pages(op, size, "hugepage" in kind, node)
    ptr = address_of(memory)
    pinned_by = spec if spec is not None and _pin(op, spec, ptr, size) else None
    with _lock:
        _live[ptr] = _Allocation(kind, size, memory, pinned_by, segment)
    return ptr


def _free(kind: str, ptr: int, size: int | None = None, name: str = "") -> None:
    op, ptr = f"free_{kind}_ptr", operator.index(ptr)
    with _lock:
        found = _live.get(ptr)
        if found is None:
            raise ValueError(f"{op}: pointer {ptr:#x}: it is not allocated, or freed already")
        if found.kind != kind:
            raise ValueError(
                f"{op}: pointer {ptr:#x}: it is alloc_{found.kind}_ptr's; free_{found.kind}_ptr frees it"
            )
        if size and operator.index(size) != found.size:
            raise ValueError(f"{op}: pointer {ptr:#x}: size={size}: {found.size} bytes were asked for")
        if name and found.segment is not None and name != found.segment.path.name:
            raise ValueError(f"{op}: pointer {ptr:#x}: name={name!r}: it is {found.segment.path}")
        del _live[ptr]  # before it is unmapped: another thread may get the same address right after
    found.release(op, ptr)


def _selected_spec() -> DeviceSpec:
    from lmcache.v1.platform._device_detect import selected

    return selected().spec


def _pin(op: str, spec: DeviceSpec, ptr: int, size: int) -> bool:
    if spec.pin_memory(ptr, size):
        return True
    backend = spec.backend_name
    if spec.is_pin_supported:
        warn_once(logger, "refused", "%s: %s did not pin %d bytes; they stay pageable", op, backend, size)
    else:
        info_once(logger, "pageable", "%s: memory stays pageable: backend %s pins none", op, backend)
    return False


@atexit.register
def _remove_names() -> None:
    """A segment that nobody freed has nobody who could map it by its name any more."""
    for allocation in list(_live.values()):
        if allocation.segment is not None:
            allocation.segment.remove_name()


# A process that is forked while another thread holds the lock would never get it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
