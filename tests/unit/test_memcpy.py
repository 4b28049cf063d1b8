"""Copies between host addresses: checked as a whole, then done. Torch is not needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops import batched_memcpy

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
CPU = CpuDeviceOps()
Copy = Callable[[int, int, int], None]


class Buffer:
    def __init__(self, content: bytes) -> None:
        self._memory = (ctypes.c_char * len(content)).from_buffer_copy(content)
        self.ptr = ctypes.addressof(self._memory)

    def __bytes__(self) -> bytes:
        return bytes(self._memory)


def by_batch(dest: int, src: int, nbytes: int) -> None:
    batched_memcpy([src], [dest], [nbytes])


def by_direction(dest: int, src: int, nbytes: int) -> None:
    CPU.lmcache_memcpy_async(dest, src, nbytes, H2D, 0, 1 << 26)


BOTH = pytest.mark.parametrize("copy", [by_batch, by_direction])


@given(st.binary(min_size=1, max_size=200), st.data())
def test_exactly_the_bytes_named_are_copied_and_overlap_is_well_defined(content: bytes, data: Any) -> None:
    source = data.draw(st.integers(0, len(content)))
    target = data.draw(st.integers(0, len(content)))
    size = data.draw(st.integers(0, len(content) - max(source, target)))
    expected = bytearray(content)
    expected[target : target + size] = content[source : source + size]
    for copy in (by_batch, by_direction):
        buffer = Buffer(content)
        copy(buffer.ptr + target, buffer.ptr + source, size)
        assert bytes(buffer) == expected


def test_a_batch_copies_in_order() -> None:
    a, b = Buffer(b"abcd"), Buffer(b"....")
    batched_memcpy([a.ptr, b.ptr], [b.ptr, a.ptr + 2], [2, 2])
    assert (bytes(a), bytes(b)) == (b"abab", b"ab..")
    batched_memcpy((), (), ())


@BOTH
@pytest.mark.parametrize(
    ("dest", "src", "nbytes"), [(0, 1, 1), (1, 0, 1), (-1, 1, 1), (1, 1, -1), (1, (1 << 64) - 1, 2)]
)
def test_sizes_and_addresses_that_cannot_be_are_refused(copy: Copy, dest: int, src: int, nbytes: int) -> None:
    a = Buffer(b"abcd")
    with pytest.raises(ValueError, match="memcpy"):
        copy(a.ptr if dest == 1 else dest, a.ptr if src == 1 else src, nbytes)
    assert bytes(a) == b"abcd"


@BOTH
def test_nothing_is_copied_from_nowhere(copy: Copy) -> None:
    copy(0, 0, 0)


def test_a_batch_with_one_fault_copies_nothing() -> None:
    a, b = Buffer(b"abcd"), Buffer(b"....")
    for sizes in ([2, -1], [2], [2, 2, 2]):
        with pytest.raises(ValueError, match="batched_memcpy: "):
            batched_memcpy([a.ptr, a.ptr], [b.ptr, b.ptr], sizes)
    with pytest.raises(TypeError):
        batched_memcpy([a.ptr, "x"], [b.ptr, b.ptr], [2, 2])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="batched_memcpy: copy 1: 2 bytes at address 0: no such memory"):
        batched_memcpy([a.ptr, 0], [b.ptr, b.ptr], [2, 2])
    assert bytes(b) == b"...."


@pytest.mark.parametrize("alignment", [0, -1, -2, 3, 6, (1 << 26) - 1])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    a, b = Buffer(b"abcd"), Buffer(b"....")
    with pytest.raises(ValueError, match=f"host_buffer_alignments={alignment}: expected a power of two"):
        CPU.lmcache_memcpy_async(b.ptr, a.ptr, 4, H2D, 0, alignment)
    assert bytes(b) == b"...."


@given(st.integers(0, 62), st.integers(0, 1 << 62), st.sampled_from([0, 1, H2D, D2H]))
def test_offset_and_alignment_do_not_change_what_is_copied(power: int, offset: int, direction: int) -> None:
    a, b = Buffer(b"abcd"), Buffer(b"....")
    CPU.lmcache_memcpy_async(b.ptr, a.ptr, 3, direction, offset, 1 << power)
    assert bytes(b) == b"abc."


@pytest.mark.parametrize(
    ("direction", "offset", "why"), [(2, 0, "direction=2: expected 0"), (0, -1, "host_buffer_offset=-1")]
)
def test_a_wrong_direction_or_offset_is_refused(direction: int, offset: int, why: str) -> None:
    a = Buffer(b"abcd")
    with pytest.raises(ValueError, match=f"lmcache_memcpy_async: {why}"):
        CPU.lmcache_memcpy_async(a.ptr, a.ptr, 4, direction, offset, 1)


@pytest.mark.parametrize("ops", [CPU, DeviceOps()])
@pytest.mark.parametrize("operands", [(1, None), ("1", 1), (b"", b"")])
def test_operands_that_are_neither_are_refused(ops: DeviceOps, operands: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="expected two tensors or two addresses"):
        ops.lmcache_memcpy_async(*operands, 0, H2D, 0, 1)


def test_addresses_are_refused_where_nothing_says_whose_they_are() -> None:
    a, b = Buffer(b"abcd"), Buffer(b"....")
    with pytest.raises(DeviceError, match="takes tensors, not addresses"):
        DeviceOps().lmcache_memcpy_async(b.ptr, a.ptr, 4, H2D, 0, 1)
    assert bytes(b) == b"...."
