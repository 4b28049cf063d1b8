"""Where the planes of a paged KV structure lie: K or V of one layer, whatever the structure is.

A plane is seen as ``[NB, BS, NH, W]``. Structures come as tensors, nested as the row says, or as addresses in
the row's pointer order; what is made of either is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import CanonicalView, KVFormat, canonical_view
from lmcache.v1.platform.ops_types import PageBufferShapeDesc
from lmcache.v1.platform.torch_ops._paged_operands import (
    leaves,
    padded_strides,
    pointer_list,
    spots_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Paged",
    "PlaneGroup",
    "PlaneShape",
    "paged_pointers",
    "paged_tensors",
]


@dataclass(frozen=True)
class PlaneShape:
    """Geometry of one plane as ``[NB, BS, NH, W]``; strides in elements."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @property
    def page(self) -> int:
        """Elements of one block."""
        return self.sizes[1] * self.sizes[2] * self.sizes[3]

    @property
    def hidden(self) -> int:
        """Elements of one slot."""
        return self.sizes[2] * self.sizes[3]

    @cached_property
    def is_token_major(self) -> bool:
        """A block is one run, in the order of a chunk: slots, heads, elements."""
        tight = (self.hidden, self.sizes[3], 1)
        axes = zip(self.sizes[1:], self.strides[1:], tight, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in axes)


class _View(NamedTuple):
    """A tensor seen canonically, and the shape that its planes share."""

    planes: CanonicalView
    shape: PlaneShape


@dataclass
class PlaneGroup:
    """Planes of consecutive layers that are alike but for where they begin."""

    shape: PlaneShape
    kv: int
    """Their plane in a chunk."""
    column: int
    """Their first element in a chunk's last axis."""
    layer: int
    """Of the first plane."""
    addresses: list[int] = field(default_factory=list)
    tensors: list[tuple[Any, int]] = field(default_factory=list)
    """The tensor that each plane lies in, and elements from its first; none if only addresses are known."""


@dataclass
class Paged:
    """All planes of a structure."""

    row: KVFormat
    itemsize: int
    dtype: torch.dtype | None
    """None if only addresses are known."""
    device: torch.device
    num_blocks: int | None
    """None if nobody said."""
    groups: list[PlaneGroup] = field(default_factory=list)
    _open: dict[tuple[int, int, int], PlaneGroup] = field(default_factory=dict)

    def add(self, view: _View, at: dict[str, int], column: int, address: int, tensor: Any = None) -> None:
        """The planes of one tensor: one per layer that it holds, twice if it holds K and V."""
        planes, shape = view
        for kv in range(planes.shape[0]):
            for step in range(planes.num_layers):
                offset = step * planes.layer_stride + kv * planes.strides[0]
                layer, plane = at.get("NL", step), at.get("2", kv)
                key = (plane, column, id(shape))  # alike tensors share one shape object
                group = self._open.get(key)
                if group is None or layer != group.layer + len(group.addresses):
                    group = self._open[key] = PlaneGroup(shape, plane, column, layer)
                    self.groups.append(group)
                group.addresses.append(address + offset * self.itemsize)
                if tensor is not None:
                    group.tensors.append((tensor, offset))

    def layers(self) -> dict[int, int]:
        """Layers by plane of a chunk."""
        counts = dict.fromkeys(range(self.row.kv_size), 0)
        for group in self.groups:
            counts[group.kv] += len(group.addresses) if group.column == 0 else 0
        return counts

    def widths(self) -> dict[int, int]:
        """Elements of a slot, all planes of a width together, by layer."""
        ends: dict[int, int] = {}
        for group in self.groups:
            end = group.column + group.shape.hidden
            for layer in range(group.layer, group.layer + len(group.addresses)):
                ends[layer] = max(end, ends.get(layer, 0))
        return ends


# ------------------------------------------------------------------------------------------------ from tensors


def paged_tensors(op: str, paged: Any, row: KVFormat) -> Paged:
    """The planes of tensors that are nested as ``row`` says.

    Raises:
        TypeError: Something else stands where a tensor or a list is expected.
        LayoutError: Tensors do not fit the row, or differ in dtype, device or number of blocks.
    """
    found: Paged | None = None
    views: dict[Any, _View] = {}
    columns: dict[int, int] = {}
    for at, tensor in leaves(op, row, paged):
        if found is None:
            found = Paged(row, tensor.element_size(), tensor.dtype, tensor.device, None)
        if tensor.dtype != found.dtype or tensor.device != found.device:
            raise LayoutError(f"{op}: {row.label}: tensors differ in dtype or device")
        key = (tensor.shape, tensor.stride())
        view = views.get(key)
        if view is None:
            view = views[key] = _view(row, *key)
            if found.num_blocks is None:
                found.num_blocks = view.shape.sizes[0]
            elif view.shape.sizes[0] != found.num_blocks:
                raise LayoutError(f"{op}: {row.label}: tensors differ in blocks")
        column = 0
        if "NP" in at:
            column = columns.get(at["NL"], 0)
            columns[at["NL"]] = column + view.shape.hidden
        found.add(view, at, column, tensor.data_ptr(), tensor)
    if found is None:
        raise LayoutError(f"{op}: {row.label}: no tensors given")
    if len(set(found.layers().values())) > 1:
        raise LayoutError(f"{op}: {row.label}: K has {found.layers()[0]} layers, V {found.layers().get(1)}")
    return found


def _view(row: KVFormat, shape: Sequence[int], strides: Sequence[int]) -> _View:
    view = canonical_view(row, tuple(shape), tuple(strides))
    if view.overlaps:
        raise LayoutError(f"{row.label}: blocks share memory (strides {view.strides} of [KV, NB, BS, NH, W])")
    plane = PlaneShape(view.shape[1:], view.strides[1:])
    if not row.token_addressable and not plane.is_token_major:
        raise LayoutError(f"{row.label}: a page must be one run in the row's order; strides {tuple(strides)}")
    return _View(view, plane)


# ----------------------------------------------------------------------------------------------- from pointers


def paged_pointers(op: str, paged: Any, row: KVFormat, desc: PageBufferShapeDesc) -> Paged:
    """The planes behind addresses of host memory; the geometry is what ``desc`` says.

    Order: one per layer; lists of K and of V: all layers' K, then all layers' V; K and V per layer: in turn;
    all layers in one tensor: one. Blocks lie ``desc.block_stride_elems`` apart, or tight if that is 0.

    Raises:
        LayoutError: The row's planes differ in width, or number of addresses and ``desc`` do not fit.
        ValueError: An address is not positive.
    """
    import torch

    if "NP" in row.dims.levels:
        raise LayoutError(f"{op} does not serve {row.label} by pointers: they do not tell the planes' widths")
    addresses = pointer_list(paged)
    view = _view(row, *_pointer_geometry(op, row, desc))
    spots = spots_of(op, row, desc.nl, len(addresses))
    if min(addresses) <= 0:
        raise ValueError(f"{op}: pointer {min(addresses)}: expected a positive address")
    found = Paged(row, desc.element_size, None, torch.device("cpu"), desc.nb or None)
    for at, address in zip(spots, addresses, strict=True):
        found.add(view, at, 0, address)
    return found


def _pointer_geometry(
    op: str, row: KVFormat, desc: PageBufferShapeDesc
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the tensor that a pointer stands for."""
    said = {"kv_size": row.kv_size, "nh": 1} if row.is_mla else {"kv_size": row.kv_size}
    for name, value in said.items():
        if getattr(desc, name) != value:
            raise LayoutError(f"{op}: {row.label}: shape_desc.{name}={getattr(desc, name)}: expected {value}")
    for name in ("nl", "bs", "nh", "hs"):
        if getattr(desc, name) < 1:
            raise LayoutError(
                f"{op}: {row.label}: shape_desc.{name}={getattr(desc, name)}: expected 1 or more"
            )
    if desc.element_size not in (1, 2, 4, 8) or desc.nb < 0:
        raise LayoutError(
            f"{op}: {row.label}: shape_desc.element_size={desc.element_size}, nb={desc.nb}: expected 1, 2, 4 "
            "or 8 bytes, and 0 or more blocks"
        )
    pair = row.dims.axes[-2:] == ("2", "HS")
    if pair and desc.hs % 2:
        raise LayoutError(f"{op}: {row.label}: shape_desc.hs={desc.hs}: expected K and V of equal width")
    if row.is_two_major and desc.nb == 0:
        raise LayoutError(
            f"{op}: {row.label}: shape_desc.nb=0: where V begins follows from the blocks; say them"
        )
    content = desc.hs // 2 if pair else desc.hs
    sizes = {"NB": max(desc.nb, 1), "NL": desc.nl, "BS": desc.bs, "NH": desc.nh, "HS": content, "CS": content}
    return row.shape(sizes), padded_strides(op, row, sizes, desc.block_stride_elems)
