"""Layouts as integers: the canonical view, and the pages of a tensor.

A kernel or a copier needs no layout names, only offsets. Both functions take shape and strides of one tensor
(in elements) and answer in integers, so they serve torch tensors, native kernels and plain memory alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.table import KVFormat

__all__ = ["CanonicalView", "PageGeometry", "canonical_view", "describe", "describe_tensor", "overlap"]


@dataclass(frozen=True)
class CanonicalView:
    """One layer of a tensor as ``[KV, NB, BS, NH, W]``; layer ``l`` starts ``l * layer_stride`` elements in.

    KV is 1 for a tensor that holds one plane. W is HS, or the packed width.
    """

    shape: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    num_layers: int = 1
    layer_stride: int = 0

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as those of an expanded tensor do."""
        axes = zip(self.shape, self.strides, strict=True)
        return overlap(1, *axes, (self.num_layers, self.layer_stride))


def canonical_view(row: KVFormat, shape: Sequence[int], strides: Sequence[int]) -> CanonicalView:
    """Name the axes of a tensor of ``row``; nothing moves.

    Args:
        row: The layout.
        shape: Sizes in the row's axis order.
        strides: Element strides, any that the tensor has: padding and permutation are fine.

    Raises:
        LayoutError: The shape does not fit, the row has no blocks, or packed K and V are not adjacent.
    """
    axes = _named_axes(row, shape, strides)
    if row.dims.axes[-2:] == ("2", "HS") and strides[-2] != shape[-1] * strides[-1]:
        raise LayoutError(f"{row.label}: K and V of a slot are not adjacent (strides {tuple(strides)})")
    a, b, c, d, e, layers = axes
    return CanonicalView(
        shape=(a[0], b[0], c[0], d[0], e[0]),
        strides=(a[1], b[1], c[1], d[1], e[1]),
        num_layers=layers[0],
        layer_stride=layers[1],
    )


class _Axes(NamedTuple):
    """The axes of a tensor by role, each (size, element stride); (1, 0) where a row lacks one."""

    kv: tuple[int, int]
    blocks: tuple[int, int]
    slots: tuple[int, int]
    heads: tuple[int, int]
    width: tuple[int, int]
    layers: tuple[int, int]


def _named_axes(row: KVFormat, shape: Sequence[int], strides: Sequence[int]) -> _Axes:
    row.sizes(shape)
    if not row.is_block_addressable:
        raise LayoutError(f"{row.label} has no block axis")

    def axis(at: int | None) -> tuple[int, int]:
        return (1, 0) if at is None else (int(shape[at]), int(strides[at]))

    packed_pair = row.dims.axes[-2:] == ("2", "HS")
    return _Axes(
        kv=axis(row.kv_axis),
        blocks=axis(row.block_axis),
        slots=axis(row.token_axis),
        heads=axis(row.dims.axis("NH")),
        width=(int(shape[-1]) * (2 if packed_pair else 1), int(strides[-1])),
        layers=axis(row.dims.axis("NL")),
    )


@dataclass(frozen=True)
class PageGeometry:
    """Where the pages of one tensor lie, in bytes from its first element.

    Page ``(layer l, block b)`` is the run of ``page_bytes`` at
    ``l * layer_stride_bytes + b * page_stride_bytes``.
    """

    row: KVFormat
    num_blocks: int
    page_bytes: int
    page_stride_bytes: int
    block_size: int
    num_heads: int
    head_size: int
    num_layers: int = 1
    layer_stride_bytes: int = 0
    opaque: bool = False
    split: int = 1
    """Kernel blocks per block: above 1, slots of a page do not follow the row's axes."""

    @property
    def token_addressable(self) -> bool:
        """Whether a page may be cut below a block or converted."""
        return self.row.token_addressable and not self.opaque and self.split == 1

    @property
    def is_dense(self) -> bool:
        """Consecutive blocks of a layer are one run."""
        return self.page_stride_bytes == self.page_bytes

    def offset(self, block: int, layer: int = 0) -> int:
        """Byte offset of a page from the tensor's first element."""
        return layer * self.layer_stride_bytes + block * self.page_stride_bytes

    def grouped(self, ratio: int) -> PageGeometry:
        """The same memory with ``ratio`` blocks taken as one, where an engine splits its blocks for a kernel.

        Raises:
            LayoutError: ``ratio`` does not divide the blocks, or grouped blocks would not be one run.
        """
        if ratio < 1 or self.num_blocks % ratio:
            raise LayoutError(f"{self.row.label}: {self.num_blocks} blocks do not group by {ratio}")
        if ratio > 1 and not self.is_dense:
            raise LayoutError(
                f"{self.row.label}: blocks lie {self.page_stride_bytes} bytes apart but hold "
                f"{self.page_bytes}, so {ratio} of them are not one run"
            )
        return replace(
            self,
            num_blocks=self.num_blocks // ratio,
            page_bytes=self.page_bytes * ratio,
            page_stride_bytes=self.page_stride_bytes * ratio,
            block_size=self.block_size * ratio,
            split=self.split * ratio,
        )


def describe(
    row: KVFormat,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    *,
    opaque: bool = False,
) -> PageGeometry:
    """Find the pages of a tensor.

    Args:
        row: The layout.
        shape: Sizes in the row's axis order.
        strides: Element strides. The order of axes within a page does not matter, and blocks (and layers)
            may be padded or interleaved; a page itself must have no gap.
        itemsize: Bytes per element.
        opaque: What is inside a page is the engine's own business, whatever the row says.

    Raises:
        LayoutError: The shape does not fit, the row has no blocks, a page is not one contiguous run, or
            pages overlap.
    """
    if itemsize < 1 or len(shape) != len(strides) or any(stride < 0 for stride in strides):
        raise LayoutError(f"{row.label}: bad geometry: {tuple(shape)}, {tuple(strides)}, itemsize {itemsize}")
    axes = _named_axes(row, shape, strides)
    num_blocks, num_layers = axes.blocks[0], axes.layers[0]
    elements = prod(size for size, _ in (axes.kv, axes.slots, axes.heads, axes.width))
    inner = (at for at, symbol in enumerate(row.dims.axes) if symbol not in ("NB", "NL"))
    if elements == 0 or not _is_one_run((shape[at], strides[at]) for at in inner):
        raise LayoutError(
            f"{row.label}: a block's page is not one contiguous run "
            f"(shape {tuple(shape)}, strides {tuple(strides)})"
        )
    page = elements * itemsize
    blocks = (num_blocks, axes.blocks[1] * itemsize)
    layers = (num_layers, axes.layers[1] * itemsize)
    if overlap(page, blocks, layers):
        raise LayoutError(f"{row.label}: pages of {page} bytes overlap (strides {tuple(strides)})")
    return PageGeometry(
        row=row,
        num_blocks=num_blocks,
        page_bytes=page,
        # The stride of an axis of size one says nothing; tight is the simplest truth.
        page_stride_bytes=blocks[1] if num_blocks > 1 else page,
        block_size=axes.slots[0],
        num_heads=axes.heads[0],
        head_size=axes.width[0],
        num_layers=num_layers,
        layer_stride_bytes=layers[1] if num_layers > 1 else 0,
        opaque=opaque,
    )


def describe_tensor(row: KVFormat, tensor: Any, *, opaque: bool = False) -> PageGeometry:
    """:func:`describe` for anything with torch's ``shape``, ``stride()`` and ``element_size()``."""
    return describe(row, tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), opaque=opaque)


def _is_one_run(axes: Iterable[tuple[int, int]]) -> bool:
    """Whether axes of (size, stride) cover a run of elements without gap or overlap, in any order."""
    covered = 1
    for stride, size in sorted((stride, size) for size, stride in axes if size != 1):
        if stride != covered:
            return False
        covered *= size
    return True


def overlap(page: int, *axes: tuple[int, int]) -> bool:
    """Whether pages laid out along axes of (size, stride) share memory; ``page`` and strides in one unit."""
    extent = page
    for stride, size in sorted((stride, size) for size, stride in axes if size > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False
