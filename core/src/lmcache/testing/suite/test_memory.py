"""Ops on memory as such: copies, host memory, views on addresses."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device")

_PAGE = os.sysconf("SC_PAGE_SIZE")
_H2D, _D2H = 0, 1
# What allocates, what frees it, and further arguments of either.
_ALLOCATORS = {
    "alloc_pinned_ptr": ("free_pinned_ptr", (), ()),
    "alloc_pinned_numa_ptr": ("free_pinned_numa_ptr", (0,), (None,)),
    "alloc_hugepage_pinned_ptr": ("free_hugepage_pinned_ptr", (), (None,)),
    "alloc_hugepage_pinned_numa_ptr": ("free_hugepage_pinned_numa_ptr", (0,), (None,)),
    "alloc_numa_ptr": ("free_numa_ptr", (0,), (None,)),
}


@needs("async-memcpy")
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, (1 << 20) + 7])
def test_async_copies_move_every_byte_and_no_other(
    ops: DeviceOps, device: Any, dev: Any, nbytes: int
) -> None:
    import torch

    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    back = torch.zeros(nbytes + 64, dtype=torch.uint8)
    there = torch.zeros(nbytes + 64, dtype=torch.uint8).to(device)
    ops.lmcache_memcpy_async(there, host, nbytes, _H2D, 0, 4096)
    ops.lmcache_memcpy_async(back, there, nbytes, _D2H, 0, 4096)
    dev.synchronize()
    assert torch.equal(there.cpu()[:nbytes], host), "the bytes did not reach the device"
    assert torch.equal(back[:nbytes], host), "the bytes did not come back"
    assert not there.cpu()[nbytes:].any(), "bytes behind the copy were written on the device"
    assert not back[nbytes:].any(), "bytes behind the copy were written on the host"


@needs("async-memcpy")
def test_async_copies_of_nothing_move_nothing(ops: DeviceOps, device: Any, dev: Any) -> None:
    import torch

    there = torch.full((64,), 7, dtype=torch.uint8).to(device)
    ops.lmcache_memcpy_async(there, torch.zeros(64, dtype=torch.uint8), 0, _H2D, 0, 4096)
    dev.synchronize()
    assert (there.cpu() == 7).all()


def test_batched_copies_on_the_host_move_exactly_their_bytes(ops: DeviceOps) -> None:
    if not hasattr(ops, "batched_memcpy"):
        pytest.skip("not there: batched_memcpy")
    source = ctypes.create_string_buffer(bytes(range(256)), 256)
    target = ctypes.create_string_buffer(256)
    here, there = ctypes.addressof(source), ctypes.addressof(target)
    ops.batched_memcpy([here + 16, here + 100, here], [there + 3, there + 200, there + 100], [16, 31, 0])
    wanted = bytearray(256)
    wanted[3:19], wanted[200:231] = bytes(range(16, 32)), bytes(range(100, 131))
    assert target.raw == bytes(wanted)
    with pytest.raises(Exception):  # noqa: B017,PT011
        ops.batched_memcpy([here], [there], [])


@pytest.mark.parametrize("name", _ALLOCATORS)
def test_host_memory_is_zeroed_usable_from_end_to_end_and_freed_once(ops: DeviceOps, name: str) -> None:
    free, more, of_free = _ALLOCATORS[name]
    if not (hasattr(ops, name) and hasattr(ops, free)):
        pytest.skip(f"not there: {name}")
    size = 3 * _PAGE + 5
    one, other = (getattr(ops, name)(size, *more) for _ in range(2))
    try:
        assert one % _PAGE == 0, "it does not begin at a page"
        assert abs(one - other) >= size, "two blocks overlap"
        assert ctypes.string_at(one, size) == bytes(size), "it is not zeroed"
        ctypes.memset(one, 0x5A, size)
        assert ctypes.string_at(one, size) == b"\x5a" * size
        assert ctypes.string_at(other, size) == bytes(size)
    finally:
        for address in (one, other):
            getattr(ops, free)(address, *of_free)
    with pytest.raises(Exception):  # noqa: B017,PT011
        getattr(ops, free)(one, *of_free)


@pytest.mark.parametrize("size", [0, -1])
def test_host_memory_of_no_size_is_refused(ops: DeviceOps, size: int) -> None:
    if not hasattr(ops, "alloc_pinned_ptr"):
        pytest.skip("not there: alloc_pinned_ptr")
    with pytest.raises(Exception):  # noqa: B017,PT011
        ops.alloc_pinned_ptr(size)


def test_shared_host_memory_is_there_under_its_name_until_it_is_freed(ops: DeviceOps) -> None:
    if not hasattr(ops, "alloc_shm_pinned_ptr"):
        pytest.skip("not there: alloc_shm_pinned_ptr")
    name, size = f"lmcache-verify-{os.getpid()}", 2 * _PAGE
    address = ops.alloc_shm_pinned_ptr(size, name)
    try:
        assert os.path.exists(f"/dev/shm/{name}")
        ctypes.memset(address, 0x33, size)
        with open(f"/dev/shm/{name}", "rb") as file:
            assert file.read(size) == b"\x33" * size
    finally:
        ops.free_shm_pinned_ptr(address, size, name)
    assert not os.path.exists(f"/dev/shm/{name}"), "the segment is left behind"


def test_where_the_device_sits_is_told_or_not_known(ops: DeviceOps) -> None:
    if not hasattr(ops, "get_gpu_pci_bus_id"):
        pytest.skip("not there: get_gpu_pci_bus_id")
    found = ops.get_gpu_pci_bus_id(0)
    assert found is None or (isinstance(found, str) and found.count(":") == 2)
