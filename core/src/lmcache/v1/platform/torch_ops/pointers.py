"""Tensors over memory that is known by its address."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.op_contract import takes

if TYPE_CHECKING:
    import torch

__all__ = ["tensor_from_ptr"]


@takes("pointers")
def tensor_from_ptr(ptr: int, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """View host memory as a tight tensor. It owns nothing: the memory must outlive it.

    Args:
        ptr: Address of the first element.
        shape: Sizes, in elements.
        dtype: Element type.
        device: Must be the CPU; other devices bring an op of their own.

    Raises:
        ValueError: Another device, no address, a negative size, or more than there are addresses.
    """
    import torch

    where = torch.device(device)
    if where.type != "cpu":
        raise ValueError(f"tensor_from_ptr: device {where}: the baseline can view host memory only")
    if any(size < 0 for size in shape):
        raise ValueError(f"tensor_from_ptr: shape {tuple(shape)}: expected sizes of 0 or more")
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if not 0 < ptr <= (1 << 64) - nbytes or nbytes > sys.maxsize:
        raise ValueError(
            f"tensor_from_ptr: {nbytes} bytes at address {ptr}: expected a positive address of memory"
        )
    memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
