"""Axes back into memory order, without a copy.

Engines hand over views: indexed one way, laid out another. A row names axes in the order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.errors import LayoutError

__all__ = ["in_memory_order", "is_tight_inside"]


def in_memory_order(tensor: Any) -> Any:
    """The same memory as ``tensor`` with axes by falling stride.

    Axes of size one go inside axes of the same stride: ``[NB, 1, BS, CS]`` whose second and third strides are
    both CS becomes ``[NB, BS, 1, CS]``. The outermost axis may be padded, all within it must be tight.

    Args:
        tensor: Anything with ``shape``, ``stride()`` and ``permute``.

    Returns:
        ``tensor`` itself if its axes are in order already, otherwise a view.

    Raises:
        LayoutError: It is empty, elements overlap, or there are gaps below the outermost axis.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not shape or 0 in shape:
        raise LayoutError(f"KV tensor of shape {shape}: expected at least one element per axis")
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] == 1))
    if not is_tight_inside([shape[a] for a in order], [strides[a] for a in order]):
        raise LayoutError(
            f"KV tensor of shape {shape}, strides {strides}: expected one run of memory per index of the "
            "outermost axis; a copy would cut the engine off, so none is made"
        )
    return tensor if order == list(range(len(shape))) else tensor.permute(*order)


def is_tight_inside(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether all axes but the first are tight, and the first at least steps over them."""
    run = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != run:
            return False
        run *= size
    return shape[0] == 1 or strides[0] >= run
