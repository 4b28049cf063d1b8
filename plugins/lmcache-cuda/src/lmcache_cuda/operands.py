"""Operands of transfers as the kernels take them: addresses, counts, and one geometry for all tensors.

A kernel trusts the numbers that it is given. So tensors go to it only where the numbers tell all there is to know
of them; whatever is otherwise (other strides, wrong shapes) is ``None`` here, and goes to the torch baseline, which
serves it or refuses it in words.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from lmcache.v1.kv_layout import KVFormat
from lmcache_cuda import runtime

__all__ = [
    "MAX_VALUES",
    "Pages",
    "Table",
    "are_tensors",
    "flat",
    "is_tensor",
    "pages_of",
    "serves_object",
    "table",
]

MAX_VALUES = 384
"""Addresses that travel with a launch; longer tables are put into device memory."""


class Table(NamedTuple):
    """Integers for a kernel: an address of device memory with their number, or the values themselves."""

    values: Any
    length: int
    alignment: int = 0
    """Of addresses in device memory: all of them or-ed together, 0 if not known."""
    keep: Any = None
    """What must live until the launch is queued."""


class Pages(NamedTuple):
    """Tensors of one geometry that are all tight, but for padding between blocks."""

    tensors: list[Any]
    sizes: dict[str, int]
    block_stride: int
    """In elements; 0 is tight."""

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, and not an address."""
    return hasattr(value, "as_strided")


def are_tensors(paged: Any) -> bool:
    """Whether pages are given as tensors: not as integers, nor as a 1-D tensor of them."""
    if is_tensor(paged):
        return bool(paged.dim() != 1 or paged.is_floating_point())
    if isinstance(paged, (list, tuple)):
        return not paged or not hasattr(paged[0], "__index__") or is_tensor(paged[0])
    return False


def flat(node: Any) -> list[Any]:
    """The leaves of nested lists and tuples, outermost first: the order of a format's pointers."""
    if isinstance(node, (list, tuple)):
        return [leaf for part in node for leaf in flat(part)]
    return [node]


def table(op: str, what: str, values: Any, ordinal: int, limit: int = 1 << 62) -> Table:
    """Integers as an operand: a list, or a tensor on the host or on the device.

    Raises:
        TypeError: They are no integers, or of another rank.
    """
    if is_tensor(values):
        if values.dim() != 1 or values.is_floating_point() or values.is_complex():
            raise TypeError(
                f"{op}: {what} is {tuple(values.shape)} of {values.dtype}: expected integers, 1-D"
            )
        if runtime.is_on_device(values):
            return _on_device(values, getattr(values, "lmcache_alignment", 0))
        values = values.tolist()
    listed = [operator.index(value) for value in values]
    if len(listed) <= limit:
        return Table(listed, len(listed))
    alignment = 0
    for value in listed:
        alignment |= value
    return _on_device(runtime.upload(listed, ordinal), alignment)


def address_table(op: str, addresses: list[int], ordinal: int) -> Table:
    """Addresses of pages: they travel with the launch where they are few enough."""
    if len(addresses) <= MAX_VALUES:
        return Table(addresses, len(addresses))
    return table(op, "pages", addresses, ordinal, MAX_VALUES)


def _on_device(values: Any, alignment: int) -> Table:
    import torch

    mine = values.to(torch.int64).contiguous()
    return Table(mine.data_ptr(), mine.numel(), int(alignment), mine)


def pages_of(row: KVFormat, paged: Any, layers: int | None = None) -> Pages | None:
    """The tensors of a structure that is nested as ``row`` says, or None if a kernel's numbers cannot tell them.

    Args:
        layers: How many layers there are to be; None: as many as there are.
    """
    if row.depth == 0 and isinstance(paged, (list, tuple)) and len(paged) == 1:
        paged = paged[0]
    tensors = _leaves(paged, row.dims.levels)
    if not tensors or not is_tensor(tensors[0]) or not runtime.is_on_device(tensors[0]):
        return None
    first = tensors[0]
    cls, shape, strides, dtype, device = type(first), first.shape, first.stride(), first.dtype, first.device
    if len(shape) != row.rank or any(
        symbol.isdigit() and int(symbol) != size for symbol, size in zip(row.dims.axes, shape, strict=True)
    ):
        return None
    for other in tensors:  # on the way to every launch
        if (
            type(other) is not cls
            or other.shape != shape
            or other.stride() != strides
            or other.dtype != dtype
            or other.device != device
        ):
            return None
    sizes = row.sizes(shape)
    sizes.setdefault("NL", len(tensors) // prod(2 for level in row.dims.levels if level == "2"))
    if layers not in (None, sizes["NL"]):
        return None
    stride = _block_stride(row, shape, strides)
    return None if stride is None else Pages(tensors, sizes, stride)


def _leaves(node: Any, levels: tuple[str, ...]) -> list[Any] | None:
    """The leaves, if lists are nested just so; None if not."""
    found = [node]
    for level in levels:
        below: list[Any] = []
        for part in found:
            if not isinstance(part, (list, tuple)) or (level == "2" and len(part) != 2):
                return None
            below += part
        found = below
    return found


def _block_stride(row: KVFormat, shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements between blocks where they are padded, 0 where all is tight; None for anything else."""
    tight = 1
    padded = 0
    for axis in range(len(shape) - 1, -1, -1):
        size, stride = shape[axis], strides[axis]
        if size != 1 and stride != tight:
            if axis != row.block_axis or not row.takes_block_stride or stride < tight:
                return None
            padded = stride
        tight *= size
    return padded


def serves_object(obj: Any, shape: tuple[int, ...], page: Any) -> bool:
    """Whether a kernel can read and write an object where it is: contiguous, of the pages' elements, and on their
    device or in page-locked host memory."""
    return (
        is_tensor(obj)
        and tuple(obj.shape) in (shape, shape[1:] if shape[0] == 1 else shape)
        and obj.is_contiguous()
        and _same_elements(obj.dtype, page.dtype)
        and (obj.device == page.device or (obj.device.type == "cpu" and runtime.is_pinned(obj)))
    )


def _same_elements(one: Any, other: Any) -> bool:
    return bool(
        one == other or (one.itemsize == other.itemsize == 1 and "torch.uint8" in (str(one), str(other)))
    )
