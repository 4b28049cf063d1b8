"""Copies of bytes between tensors, and between host addresses. ``DeviceOps`` has the contract."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.op_contract import stream_ordered, takes
from lmcache.v1.platform.ops_types import TransferDirection

if TYPE_CHECKING:
    import torch

__all__ = ["batched_memcpy", "host_memcpy", "lmcache_memcpy_async"]

_OP = "lmcache_memcpy_async"


@stream_ordered
@takes("tensors")
def lmcache_memcpy_async(
    dest: Any,
    src: Any,
    nbytes: int,
    direction: int,
    host_buffer_offset: int,
    host_buffer_alignments: int,
) -> None:
    """Tensors only: nothing tells the baseline whose memory an address is in."""
    nbytes = _checked(nbytes, direction, host_buffer_offset, host_buffer_alignments)
    if _are_pointers(dest, src):
        raise DeviceError(
            f"{_OP}: the baseline takes tensors, not addresses, on this device; pass tensors, or use a "
            "backend whose operand_kinds() has pointers"
        )
    into, out_of = _as_bytes("dest", dest, nbytes), _as_bytes("src", src, nbytes)
    _check_apart(into, out_of)
    if nbytes:
        into.copy_(out_of, non_blocking=True)


@takes("tensors", "pointers")
def host_memcpy(
    dest: Any,
    src: Any,
    nbytes: int,
    direction: int,
    host_buffer_offset: int,
    host_buffer_alignments: int,
) -> None:
    """``lmcache_memcpy_async`` of a device whose memory is the host's: addresses too, done on return."""
    if not _are_pointers(dest, src):
        lmcache_memcpy_async(dest, src, nbytes, direction, host_buffer_offset, host_buffer_alignments)
        return
    nbytes = _checked(nbytes, direction, host_buffer_offset, host_buffer_alignments)
    _move(_checked_copies(_OP, [src], [dest], [nbytes]))


@takes("pointers")
def batched_memcpy(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> None:
    """On one thread; other threads of Python run meanwhile."""
    _move(_checked_copies("batched_memcpy", src, dst, sizes))


def _move(copies: list[tuple[int, int, int]]) -> None:
    for source, target, size in copies:
        ctypes.memmove(target, source, size)


def _checked_copies(
    op: str, src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int, int]]:
    if not len(src) == len(dst) == len(sizes):
        raise ValueError(
            f"{op}: {len(src)} src, {len(dst)} dst, {len(sizes)} sizes: expected as many of each"
        )
    copies = []
    for index, values in enumerate(zip(src, dst, sizes, strict=True)):
        source, target, size = (operator.index(value) for value in values)
        if size < 0:
            raise ValueError(f"{op}: copy {index}: size {size}: expected 0 or more")
        for address in (source, target) if size else ():
            if not 0 < address <= (1 << 64) - size:
                raise ValueError(f"{op}: copy {index}: {size} bytes at address {address}: no such memory")
        copies.append((source, target, size))
    return copies


def _checked(nbytes: int, direction: int, offset: int, alignment: int) -> int:
    nbytes, offset, alignment = (operator.index(value) for value in (nbytes, offset, alignment))
    if int(direction) not in [*TransferDirection]:
        raise ValueError(f"{_OP}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    for name, value in (("nbytes", nbytes), ("host_buffer_offset", offset)):
        if value < 0:
            raise ValueError(f"{_OP}: {name}={value}: expected 0 or more")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{_OP}: host_buffer_alignments={alignment}: expected a power of two")
    return nbytes


def _are_pointers(dest: Any, src: Any) -> bool:
    """True for two integers, False for two tensors (which may pass for integers, too)."""
    tensors = [hasattr(operand, "as_strided") for operand in (dest, src)]
    if all(tensors):
        return False
    if any(tensors) or not all(hasattr(operand, "__index__") for operand in (dest, src)):
        kinds = f"{type(dest).__name__} and {type(src).__name__}"
        raise TypeError(f"{_OP}: dest and src are {kinds}: expected two tensors or two addresses")
    return True


def _as_bytes(name: str, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of a tensor."""
    import torch

    if not tensor.is_contiguous():
        raise ValueError(f"{_OP}: {name} has shape {tuple(tensor.shape)} and gaps: expected it contiguous")
    has = tensor.numel() * tensor.element_size()
    if nbytes > has:
        raise ValueError(f"{_OP}: nbytes={nbytes}: {name} has {has}")
    return tensor.detach().reshape(-1).view(torch.uint8)[:nbytes]


def _check_apart(into: torch.Tensor, out_of: torch.Tensor) -> None:
    """A device copies in no particular order, so what overlaps would come out by chance."""
    first, second = into.data_ptr(), out_of.data_ptr()
    if into.device == out_of.device and abs(first - second) < into.numel():
        raise ValueError(f"{_OP}: dest and src overlap: expected tensors apart")
