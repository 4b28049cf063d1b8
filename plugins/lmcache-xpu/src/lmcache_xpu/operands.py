"""Operands of transfers as the kernel takes them: addresses, and eight numbers that tell all there is to know.

What the numbers cannot tell (other strides, tensors of several shapes) is ``None`` here, and goes to the torch
baseline, which serves it or refuses it in words.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat
from lmcache_xpu import runtime

__all__ = [
    "Pages",
    "are_tensors",
    "is_tensor",
    "pages_of",
    "planes_of",
    "serves_object",
    "shape_numbers",
    "table",
]


class Pages(NamedTuple):
    """Tensors of one geometry, tight but for padding between blocks."""

    tensors: list[Any]
    sizes: dict[str, int]
    """By symbol of the format; where slots of all blocks are one axis, as they are."""
    block_stride: int
    """In elements; 0 is tight."""

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    @property
    def width(self) -> int:
        """Elements per head and slot; of K and V where they lie side by side."""
        return self.sizes.get("CS") or self.sizes["HS"]


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, and not an address."""
    return hasattr(value, "as_strided")


def are_tensors(paged: Any) -> bool:
    """Whether pages are given as tensors: not as integers, nor as a 1-D tensor of them."""
    if is_tensor(paged):
        return bool(paged.dim() != 1 or paged.is_floating_point())
    if isinstance(paged, (list, tuple)):
        return not paged or is_tensor(paged[0]) or not hasattr(paged[0], "__index__")
    return False


def table(op: str, what: str, values: Any) -> tuple[Any, Any]:
    """Integers for the native module, and what must live until they are queued.

    Raises:
        TypeError: They are no integers, or of another rank.
    """
    if not is_tensor(values):
        return [operator.index(value) for value in values], None
    if values.dim() != 1 or values.is_floating_point() or values.is_complex():
        raise TypeError(f"{op}: {what} is {tuple(values.shape)} of {values.dtype}: expected integers, 1-D")
    if not runtime.is_on_device(values):
        return values.tolist(), None
    import torch

    mine = values.to(torch.int64).contiguous()
    return (mine.data_ptr(), mine.numel()), mine


def pages_of(row: KVFormat, paged: Any) -> Pages | None:
    """The tensors of a structure that is nested as ``row`` says, if one geometry tells them all."""
    tensors = _leaves(paged, row.dims.levels)
    found = _alike(row, tensors) if tensors and "NP" not in row.dims.levels else None
    if not tensors or found is None:
        return None
    sizes, stride = found
    sizes.setdefault("NL", len(tensors) // prod(2 for level in row.dims.levels if level == "2"))
    return Pages(tensors, sizes, stride)


def planes_of(row: KVFormat, paged: Any) -> tuple[Pages, list[int]] | None:
    """Layers of planes, each plane of a width of its own: all tensors, layer by layer, and the widths."""
    if not isinstance(paged, (list, tuple)) or not paged:
        return None
    layers = [list(layer) if isinstance(layer, (list, tuple)) else [] for layer in paged]
    if not layers[0] or len({len(layer) for layer in layers}) != 1:
        return None
    widths, shared = [], None
    for plane in zip(*layers, strict=True):
        found = _alike(row, plane)
        if found is None or found[1]:
            return None
        widths.append(found[0].pop("HS"))
        geometry = (found[0], plane[0].dtype, plane[0].device)
        if shared not in (None, geometry):
            return None
        shared = geometry
    sizes = {**shared[0], "HS": sum(widths), "NL": len(layers)} if shared else {}
    return Pages([tensor for layer in layers for tensor in layer], sizes, 0), widths


def _alike(row: KVFormat, tensors: Sequence[Any]) -> tuple[dict[str, int], int] | None:
    """Sizes by symbol and the stride of blocks (0: tight) of tensors on the device that are all alike."""
    first = tensors[0]
    if not all(map(is_tensor, tensors)) or not runtime.is_on_device(first):
        return None
    kind = (first.shape, first.stride(), first.dtype, first.device)
    if any((one.shape, one.stride(), one.dtype, one.device) != kind for one in tensors):
        return None
    if len(first.shape) != row.rank or any(
        symbol.isdigit() and int(symbol) != size
        for symbol, size in zip(row.dims.axes, first.shape, strict=True)
    ):
        return None
    stride = _block_stride(row, first)
    if stride is None:
        return None
    sizes = dict(row.sizes(first.shape))
    if row.dims.axes[-2:] == ("2", "HS"):
        sizes["HS"] *= 2
    return sizes, stride


def _leaves(node: Any, levels: tuple[str, ...]) -> list[Any] | None:
    """The leaves, outermost first, if lists are nested just so; None if not."""
    found = [node]
    for level in levels:
        below: list[Any] = []
        for part in found:
            if not isinstance(part, (list, tuple)) or (level == "2" and len(part) != 2):
                return None
            below += part
        found = below
    return found


def _block_stride(row: KVFormat, tensor: Any) -> int | None:
    """Elements between blocks where they are padded, 0 where all is tight; None for anything else."""
    if tensor.is_contiguous():
        return 0
    if not row.takes_block_stride or row.block_axis != 0 or not tensor[0].is_contiguous():
        return None
    stride = int(tensor.stride(0))
    return stride if stride >= tensor[0].numel() else None


def serves_object(queue: int, obj: Any, shape: tuple[int, ...], page: Any) -> bool:
    """Whether the kernel can read and write an object where it is."""
    return (
        is_tensor(obj)
        and tuple(obj.shape) in (shape, shape[1:] if shape[0] == 1 else shape)
        and obj.is_contiguous()
        and obj.dtype == page.dtype
        and runtime.reaches(queue, obj)
    )


def shape_numbers(
    op: str, row: KVFormat, layers: int, hidden: int, itemsize: int, sizes: Sequence[int]
) -> list[int]:
    """The eight numbers of ``PageBufferShapeDesc`` for a transfer by slots.

    Args:
        hidden: Elements of a slot.
        sizes: Slots of all blocks, slots per block, elements per head, elements between blocks; all but the first
            may be 0, which is not known.
    """
    total, per_block, head, stride = sizes
    if not per_block:
        if row.is_hnd or row.is_cross_layer or not (row.is_pbs_fused or row.block_axis == 0):
            raise LayoutError(f"{op}: {row.label}: expected block_size: its slots do not follow one another")
        per_block = 1
    if not head and row.is_hnd and not row.is_mla:
        raise LayoutError(f"{op}: {row.label}: expected head_size: its heads stand outside slots")
    head = hidden if row.is_mla or not head else head
    if total < 1 or total % per_block or hidden % head:
        raise ValueError(
            f"{op}: page_buffer_size={total}, block_size={per_block}, head_size={head}: they do not fit"
        )
    return [row.kv_size, layers, total // per_block, per_block, hidden // head, head, itemsize, stride]
