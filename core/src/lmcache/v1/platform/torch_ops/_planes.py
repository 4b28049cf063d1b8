"""Where the slots of paged KV lie: a plane per layer and K or V.

A plane is a stretch of memory and a grid that says where in it a slot's elements are. The grid comes from the
layout's row, so there is one way to find a slot, whatever the layout and however the pages are handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import CanonicalView, KVFormat, canonical_view
from lmcache.v1.platform.torch_ops._paged_operands import int_dtype, leaves
from lmcache.v1.platform.torch_ops._slot_grid import SlotGrid

if TYPE_CHECKING:
    import torch

__all__ = ["Plane", "as_integers", "cut", "planes_of", "slot_layout"]


@dataclass(frozen=True)
class Plane:
    """K, V or both of one layer."""

    memory: torch.Tensor
    """1-D, from the plane's first element to its last, seen as integers of the elements' size."""
    dtype: torch.dtype | None
    """Of the elements, where it is known."""
    grid: SlotGrid
    layer: int
    kv: int
    """The plane of the object that belongs to it."""
    column: int
    """The first element in the object's last axis that belongs to it."""
    head_size: int
    """Elements per head and slot."""


def planes_of(op: str, row: KVFormat, paged: Any) -> list[Plane]:
    """The planes of tensors that are nested as ``row`` says.

    Raises:
        TypeError: Something that is not a tensor, or not nested so.
        LayoutError: A tensor's shape is not the row's, or tensors differ in dtype, device or slots.
    """
    planes: list[Plane] = []
    columns: dict[int, int] = {}
    for at, tensor in leaves(op, row, paged):
        layout = slot_layout(row, tuple(tensor.shape), tuple(tensor.stride()))
        planes += cut(row, as_integers(op, tensor), tensor.dtype, layout, at, columns)
    if not planes:
        raise LayoutError(f"{op}: {row.label}: no tensors given, expected {row.dims}")
    for what in (
        {plane.dtype for plane in planes},
        {plane.memory.device for plane in planes},
        {plane.grid.num_slots for plane in planes},
    ):
        if len(what) > 1:
            listed = ", ".join(sorted(str(one) for one in what))
            raise LayoutError(
                f"{op}: {row.label}: tensors differ: {listed}; expected one dtype, device and size"
            )
    return planes


def as_integers(op: str, tensor: Any) -> torch.Tensor:
    """The same memory as integers of the same size: some types cannot be indexed.

    Raises:
        TypeError: Not a tensor.
        LayoutError: Elements of a size that no integer has.
    """
    if not hasattr(tensor, "as_strided"):
        raise TypeError(f"{op}: expected a tensor, got {type(tensor).__name__}")
    return tensor.view(int_dtype(op, tensor.element_size()))


@lru_cache(maxsize=256)
def slot_layout(
    row: KVFormat, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[CanonicalView, SlotGrid]:
    """The canonical view of a tensor, and the grid of each of its planes.

    A row that keeps the slots of all blocks in one axis is one block. Tensors of a cache are alike and come
    again with every call, so the last answers are kept.

    Raises:
        LayoutError: The shape does not fit the row, or slots are empty or share memory.
    """
    view = _slot_view(row, shape, strides)
    if 0 in view.shape:
        raise LayoutError(f"{row.label}: slots {view.shape} [KV, NB, BS, NH, W] hold nothing")
    if view.overlaps:
        raise LayoutError(f"{row.label}: slots share memory (strides {view.strides} of [KV, NB, BS, NH, W])")
    return view, SlotGrid.of(view)


def _slot_view(row: KVFormat, shape: tuple[int, ...], strides: tuple[int, ...]) -> CanonicalView:
    if not row.is_pbs_fused:
        return canonical_view(row, shape, strides)
    row.sizes(shape)
    at = row.token_axis
    return canonical_view(
        _as_one_block(row), (*shape[:at], 1, *shape[at:]), (*strides[:at], 0, *strides[at:])
    )


@cache
def _as_one_block(row: KVFormat) -> KVFormat:
    return replace(row, dims_text=row.dims_text.replace("PBS", "NB, BS"))


def cut(
    row: KVFormat,
    raw: torch.Tensor,
    dtype: torch.dtype | None,
    layout: tuple[CanonicalView, SlotGrid],
    at: Mapping[str, int],
    columns: dict[int, int],
) -> Iterator[Plane]:
    """One plane per layer and K or V that a tensor holds. ``columns`` counts elements used per layer."""
    view, grid = layout
    extent, begin = grid.extent, raw.storage_offset()
    for step in range(view.num_layers):
        layer = at.get("NL", step)
        column = columns.get(layer, 0) if "NP" in row.dims.levels else 0
        columns[layer] = column + grid.width
        for kv in range(view.shape[0]):
            start = begin + step * view.layer_stride + kv * view.strides[0]
            memory = raw.as_strided((extent,), (1,), start)
            yield Plane(memory, dtype, grid, layer, at.get("2", kv), column, view.shape[4])
