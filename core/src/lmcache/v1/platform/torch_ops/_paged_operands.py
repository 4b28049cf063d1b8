"""Operands of transfers: how they are nested, what elements they have, and whether they are addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.kv_layout.strided import overlap

if TYPE_CHECKING:
    import torch

__all__ = [
    "are_pointers",
    "check_written",
    "int_dtype",
    "leaves",
    "padded_strides",
    "pointer_list",
    "same_elements",
    "spots_of",
]


def leaves(op: str, row: KVFormat, paged: Any) -> Iterator[tuple[dict[str, int], torch.Tensor]]:
    """The tensors of a structure that is nested as ``row`` says, each with its position per level.

    Raises:
        TypeError: Something else stands where a tensor or a list is expected.
        LayoutError: Not two entries where K and V are.
    """
    if row.depth == 0 and isinstance(paged, (list, tuple)) and len(paged) == 1:
        paged = paged[0]
    return _walk(op, row, paged, row.dims.levels, {})


def _walk(
    op: str, row: KVFormat, node: Any, levels: tuple[str, ...], at: dict[str, int]
) -> Iterator[tuple[dict[str, int], torch.Tensor]]:
    if not levels:
        if not hasattr(node, "as_strided"):
            raise TypeError(f"{op}: {row.label}: expected a tensor of {row.dims}, got {type(node).__name__}")
        yield at, node
        return
    if not isinstance(node, (list, tuple)):
        raise TypeError(f"{op}: {row.label}: expected {row.dims}, got {type(node).__name__} for {levels[0]}")
    if levels[0] == "2" and len(node) != 2:
        raise LayoutError(f"{op}: {row.label}: expected K and V, got {len(node)} entries")
    for index, child in enumerate(node):
        yield from _walk(op, row, child, levels[1:], {**at, levels[0]: index})


def int_dtype(op: str, itemsize: int) -> torch.dtype:
    """The integer of ``itemsize`` bytes: copies then serve types that torch cannot index.

    Raises:
        LayoutError: There is none.
    """
    import torch

    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if itemsize not in same_size:
        raise LayoutError(f"{op}: elements of {itemsize} bytes: expected 1, 2, 4 or 8")
    return same_size[itemsize]


def same_elements(one: torch.dtype, other: torch.dtype | None) -> bool:
    """Equal, or bytes on one side (an engine may keep 8-bit floats as plain bytes), or not known."""
    import torch

    return other is None or one == other or (torch.uint8 in (one, other) and one.itemsize == other.itemsize)


def check_written(op: str, obj: torch.Tensor) -> None:
    """An object that is to be written has a place of its own for each element.

    Raises:
        LayoutError: Elements share memory, as those of an expanded tensor do.
    """
    if overlap(1, *zip(obj.shape, obj.stride(), strict=True)):
        raise LayoutError(
            f"{op}: object of shape {tuple(obj.shape)} with strides {tuple(obj.stride())}: elements share "
            "memory: expected a place for each"
        )


def are_pointers(operands: Any) -> bool:
    """Whether operands are addresses: integers, or a 1-D tensor of them."""
    if hasattr(operands, "as_strided"):
        return bool(operands.dim() == 1 and not operands.is_floating_point())
    if isinstance(operands, Sequence):
        return len(operands) > 0 and all(isinstance(entry, Integral) for entry in operands)
    return isinstance(operands, Integral)


def pointer_list(operands: Any) -> list[int]:
    """Addresses as a list."""
    listed = operands.tolist() if hasattr(operands, "as_strided") else operands
    return [int(address) for address in (listed if isinstance(listed, Sequence) else [listed])]


def spots_of(op: str, row: KVFormat, num_layers: int, num_pointers: int) -> list[dict[str, int]]:
    """The position per level of the tensor behind each pointer: that of :func:`leaves`, in the same order.

    Raises:
        LayoutError: Another number of pointers.
    """
    counts = [num_layers if level == "NL" else 2 for level in row.dims.levels]
    spots = [dict(zip(row.dims.levels, at, strict=True)) for at in product(*map(range, counts))]
    if len(spots) != num_pointers:
        raise LayoutError(
            f"{op}: {row.label}: {num_pointers} pointers: expected {len(spots)} of nl={num_layers} for {row.dims}"
        )
    return spots


def padded_strides(op: str, row: KVFormat, sizes: dict[str, int], block_stride: int) -> tuple[int, ...]:
    """Tight strides of a tensor that is known by its address, but for blocks that lie ``block_stride`` apart,
    if that is not 0. Axes outside blocks grow with them.

    Raises:
        LayoutError: Blocks are longer than that, or are no axis.
    """
    strides = list(row.strides(sizes))
    if block_stride == 0:
        return tuple(strides)
    at = row.block_axis
    if at is None:
        raise LayoutError(
            f"{op}: {row.label}: block_stride_elems={block_stride}: it has no block axis: expected 0"
        )
    if block_stride < strides[at]:
        raise LayoutError(f"{op}: {row.label}: block_stride_elems={block_stride}: a block has {strides[at]}")
    strides[at] = block_stride
    shape = row.shape(sizes)
    for outer in range(at - 1, -1, -1):
        strides[outer] = strides[outer + 1] * shape[outer + 1]
    return tuple(strides)
