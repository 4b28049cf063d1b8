"""Tensors over buffers, for layers that do not know torch. A tensor keeps alive what it views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["is_host", "tensor_in", "tensor_over"]


def tensor_over(buffer: Any, start: int, shape: Sequence[int], dtype: Any) -> Any:
    """A tight tensor over the writable bytes of ``buffer`` from ``start`` on; never a copy.

    Args:
        buffer: Whatever has Python's buffer protocol. It lives as long as the tensor and each view of it.
        start: Offset in bytes.
        shape: Sizes, of 1 or more.
        dtype: A type of torch, or its name.
    """
    import torch

    kind = _dtype(dtype)
    flat = torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=_nbytes(shape, kind))
    return flat.view(kind).view(tuple(shape))


def tensor_in(flat: Any, start: int, shape: Sequence[int], dtype: Any) -> Any:
    """As ``tensor_over``, in a flat tensor of bytes on any device."""
    kind = _dtype(dtype)
    return flat[start : start + _nbytes(shape, kind)].view(kind).view(tuple(shape))


def is_host(tensor: Any) -> bool:
    """Whether the CPU can reach the tensor's bytes by their address."""
    return bool(tensor.device.type == "cpu")


def _dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
    count = int(dtype.itemsize)
    for size in shape:
        count *= size
    return count
