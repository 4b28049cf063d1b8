"""Planes of paged KV that is known by its addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.torch_ops._paged_operands import int_dtype, padded_strides, spots_of
from lmcache.v1.platform.torch_ops._planes import Plane, cut, slot_layout
from lmcache.v1.platform.torch_ops.pointers import tensor_from_ptr

__all__ = ["PointerGeometry", "planes_at"]


@dataclass(frozen=True)
class PointerGeometry:
    """What must be said about pages that are known by their addresses; 0 is unknown, or tight."""

    num_layers: int
    hidden: int
    itemsize: int
    page_buffer_size: int
    block_size: int = 0
    head_size: int = 0
    block_stride_elems: int = 0


def planes_at(
    op: str, row: KVFormat, pointers: Sequence[int], geometry: PointerGeometry, device: Any
) -> list[Plane]:
    """The planes of pages that begin at these addresses.

    Args:
        op: For messages.
        row: The layout.
        pointers: One address per tensor, in the table's order: by layer, for a K list and a V list all of K
            first, for pairs K and V of a layer next to each other, one for a tensor of all layers.
        geometry: Sizes of the pages.
        device: Where the memory lies.

    Raises:
        LayoutError: The geometry lacks what the row needs or contradicts itself, or the number of pointers
            is not the row's.
        ValueError: An address or ``page_buffer_size`` out of range, or memory that the baseline cannot view.
    """
    sizes = _sizes(op, row, geometry)
    shape, strides = row.shape(sizes), padded_strides(op, row, sizes, geometry.block_stride_elems)
    layout = slot_layout(row, shape, strides)
    spots = spots_of(op, row, geometry.num_layers, len(pointers))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    planes: list[Plane] = []
    for at, pointer in zip(spots, pointers, strict=True):
        memory = tensor_from_ptr(int(pointer), (extent,), int_dtype(op, geometry.itemsize), device)
        planes += cut(row, memory, None, layout, at, {})
    return planes


def _sizes(op: str, row: KVFormat, geometry: PointerGeometry) -> dict[str, int]:
    """Size of every axis of the row, as far as the geometry settles it."""
    block_size, head_size, pbs = geometry.block_size, geometry.head_size, geometry.page_buffer_size
    if "NP" in row.dims.levels:
        raise LayoutError(
            f"{op}: {row.label}: with pointers the widths of the planes are unknown; pass tensors"
        )
    missing = []
    if row.is_pbs_fused:
        block_size = 1
    elif not block_size:
        # Where no axis and no padding parts blocks from slots, both are one axis.
        if row.token_axis != (row.block_axis or 0) + 1 or geometry.block_stride_elems:
            missing.append("block_size")
        block_size = 1
    if not head_size:
        if row.is_hnd:  # else a slot's heads lie together
            missing.append("head_size")
        head_size = geometry.hidden
    if missing:
        raise LayoutError(
            f"{op}: {row.label}: with pointers this format needs {' and '.join(missing)}, got 0"
        )
    if block_size < 1 or pbs % block_size:
        raise ValueError(f"{op}: page_buffer_size={pbs}: expected a multiple of block_size={block_size}")
    parts = 2 if row.dims.axes[-2:] == ("2", "HS") else 1
    if head_size < 1 or geometry.hidden % head_size or head_size % parts:
        raise LayoutError(
            f"{op}: {row.label}: head_size={head_size} does not divide hidden={geometry.hidden}"
        )
    heads = geometry.hidden // head_size
    if row.is_mla and heads != 1:
        raise LayoutError(f"{op}: {row.label}: head_size={head_size}: expected hidden={geometry.hidden}")
    width = head_size // parts
    sizes = {"NL": geometry.num_layers, "NB": pbs // block_size, "BS": block_size, "PBS": pbs}
    return {**sizes, "NH": heads, "HS": width, "CS": width}
