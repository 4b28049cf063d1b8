"""Copies, views and what the device says of itself: the ops of the contract on the native module."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from lmcache.v1.platform import torch_ops
from lmcache_cuda import keeping, runtime
from lmcache_cuda.operands import is_tensor
from lmcache_cuda.pinning import PIECES

__all__ = ["get_gpu_pci_bus_id", "lmcache_memcpy_async", "tensor_from_ptr"]

_OP = "lmcache_memcpy_async"


def lmcache_memcpy_async(
    dest: Any, src: Any, nbytes: int, direction: int, host_buffer_offset: int, host_buffer_alignments: int
) -> None:
    way, nbytes = int(direction), operator.index(nbytes)
    _check(way, nbytes, host_buffer_offset, host_buffer_alignments)
    host, there = (src, dest) if way == 0 else (dest, src)
    ordinal = _ordinal(host, there, nbytes)
    if not nbytes:
        return
    to, source = _address(dest), _address(src)
    _, stream = runtime.current_stream(ordinal)
    native = runtime.native()
    at = 0
    # The driver refuses a copy that spans two registrations; those that were made in pieces are known here.
    for stop in [*PIECES.cuts(_address(host), nbytes), nbytes]:
        native.memcpy_split_async(
            to + at, source + at, stop - at, host_buffer_offset + at, host_buffer_alignments, way, stream, ordinal
        )  # fmt: skip
        at = stop
    if is_tensor(host):
        keeping.until_done(ordinal, [host])


def _check(way: int, nbytes: int, offset: int, alignment: int) -> None:
    if way not in (0, 1):
        raise ValueError(f"{_OP}: direction={way!r}: expected 0 (H2D) or 1 (D2H)")
    if nbytes < 0 or offset < 0:
        raise ValueError(f"{_OP}: nbytes={nbytes}, host_buffer_offset={offset}: expected 0 or more")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{_OP}: host_buffer_alignments={alignment}: expected a power of two")


def _ordinal(host: Any, there: Any, nbytes: int) -> int:
    """The device of the copy: that of the tensor, or the current one where addresses are given."""
    tensors = [is_tensor(operand) for operand in (host, there)]
    if not any(tensors):
        return runtime.current_ordinal()
    if not all(tensors):
        raise TypeError(f"{_OP}: dest and src: expected two tensors or two addresses, got one of each")
    for name, tensor, fits in (
        ("host", host, host.device.type == "cpu"),
        ("device", there, runtime.is_on_device(there)),
    ):
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{_OP}: the {name} side is on {tensor.device}: expected it there, and contiguous"
            )
        if nbytes > tensor.numel() * tensor.element_size():
            raise ValueError(
                f"{_OP}: nbytes={nbytes}: the {name} side has {tensor.numel() * tensor.element_size()}"
            )
    return runtime.ordinal_of(there.device)


def _address(operand: Any) -> int:
    return operand.data_ptr() if is_tensor(operand) else operator.index(operand)


def tensor_from_ptr(ptr: int, shape: Sequence[int], dtype: Any, device: Any) -> Any:
    import torch

    where = torch.device(device)
    if where.type == "cpu" and runtime.DEVICE_TYPE != "cpu":
        return torch_ops.tensor_from_ptr(ptr, shape, dtype, device)
    nbytes = prod(shape) * dtype.itemsize
    if where.type != runtime.DEVICE_TYPE or any(size < 0 for size in shape):
        raise ValueError(f"tensor_from_ptr: {tuple(shape)} on {where}: expected sizes of 0 or more on a GPU")
    if nbytes and not 0 < ptr <= (1 << 64) - nbytes:
        raise ValueError(f"tensor_from_ptr: {nbytes} bytes at address {ptr}: expected an address of memory")
    return runtime.bytes_at(ptr, nbytes, runtime.ordinal_of(where)).view(dtype).view(tuple(shape))


def get_gpu_pci_bus_id(device_id: int = 0) -> str | None:
    index = operator.index(device_id)
    if not 0 <= index < runtime.device_count():
        raise ValueError(
            f"get_gpu_pci_bus_id: device_id={index}: expected below {runtime.device_count()}, 0 or more"
        )
    found = runtime.native().device_info(index)["pci_bus_id"]
    return str(found).upper() if found else None
