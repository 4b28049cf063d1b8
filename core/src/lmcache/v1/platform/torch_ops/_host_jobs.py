"""How the blocks of one span move between pages and a chunk in host memory.

A few long runs that are the same bytes on both sides move by plain memcpy. All else moves in one pass by torch:
a strided copy for blocks that follow each other, ``index_select`` and ``index_copy_`` for scattered ones. Both
sides are seen in elements as wide as the strides allow, 16 bytes as a rule, whatever the cache holds.

Measured by CPU time of one thread, 16 KiB per plane and block, bfloat16, as shares of a memcpy of the whole:
strided copies 0.65 to 0.75, the heads of a slot apart or not; scattered blocks 0.65 to 0.7, with heads apart 0.5
to 0.55; runs of 64 KiB and more by memcpy 0.85 to 0.9. Elements of 8 bytes instead of 16 cost ``index_copy_`` a
third. Turning pages in a scratch that stays in the cache gives 0.35 to 0.45, ``index_put_`` 0.13. One memcpy per
block is as fast as ``index_select``, but takes the interpreter's lock from other threads before each block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lmcache.v1.platform.torch_ops._paged import PlaneGroup, PlaneShape
from lmcache.v1.platform.torch_ops._paged_operands import int_dtype
from lmcache.v1.platform.torch_ops._spans import Span
from lmcache.v1.utils.memcpy import copy_each

if TYPE_CHECKING:
    import torch

    _Which: TypeAlias = int | torch.Tensor  # the first of consecutive blocks, or an index of scattered ones

__all__ = ["Job", "jobs_of"]

_WIDEST = 16
"""Bytes of the widest element that torch copies, a complex128; it moves the bits as they are."""
_SERIAL = 32 << 10
"""Elements up to which torch copies in the calling thread."""
_LONG_RUN = 64 << 10
"""Bytes of a run from which memcpy is the faster; it may use stores that torch does not."""
_FEW_RUNS = 4
"""Runs that are not worth setting up a strided copy."""
_BLOCKS_PER_RUN = 4
"""Consecutive blocks, on average, from which a copy per run beats one by index."""


class Job(Protocol):
    """The blocks of one span in all planes of a group."""

    nbytes: int
    """In each plane."""

    def copy(self, at: int) -> None:
        """Copy them in one plane."""


def jobs_of(group: PlaneGroup, work: Sequence[tuple[Span, torch.Tensor]], to_chunk: bool) -> Iterator[Job]:
    """A job per span. All that planes have in common is settled here, once: between two copies, which leave
    nothing of the interpreter in the cache, every step of Python is dear."""
    pages: _Pages | None = None
    for span, chunk in work:
        runs = _runs(group.shape, span, chunk)
        if runs:
            yield _Moved(group, span, chunk, runs, to_chunk)
        else:
            pages = pages or _Pages(group, work)
            yield _Strided(pages, span, chunk, to_chunk)


def _runs(shape: PlaneShape, span: Span, chunk: torch.Tensor) -> list[tuple[int, int, int]]:
    """The span's runs of the same bytes in pages and chunk, if they are few or long; else none."""
    tight = chunk.stride(3) == 1 and chunk.stride(2) == chunk.shape[3] == shape.hidden
    if not (tight and shape.is_token_major):
        return []
    runs = span.runs if shape.strides[0] == shape.page else span.singles
    long = len(span.ids) * shape.page * chunk.element_size() >= len(runs) * _LONG_RUN
    return runs if long or len(runs) <= _FEW_RUNS else []


def _begin(group: PlaneGroup, span: Span, chunk: torch.Tensor) -> int:
    """Address of the span's first slot in the first plane's part of the chunk."""
    at = (group.kv, group.layer, span.first * group.shape.sizes[1], group.column)
    offset = sum(index * stride for index, stride in zip(at, chunk.stride(), strict=True))
    begin: int = chunk.data_ptr() + offset * chunk.element_size()
    return begin


class _Moved:
    """Runs by memcpy."""

    def __init__(
        self,
        group: PlaneGroup,
        span: Span,
        chunk: torch.Tensor,
        runs: Sequence[tuple[int, int, int]],
        to_chunk: bool,
    ) -> None:
        itemsize = chunk.element_size()
        page, stride = group.shape.page * itemsize, group.shape.strides[0] * itemsize
        self.nbytes = len(span.ids) * page
        self._addresses, self._to_chunk = group.addresses, to_chunk
        self._begin, self._layer = _begin(group, span, chunk), chunk.stride(1) * itemsize
        self._slots = [(position - span.first) * page for position, _, _ in runs]
        self._blocks = [block * stride for _, block, _ in runs]
        self._sizes = [count * page for _, _, count in runs]

    def copy(self, at: int) -> None:
        there, here = self._addresses[at], self._begin + at * self._layer
        blocks, slots = [there + block for block in self._blocks], [here + slot for slot in self._slots]
        into, out_of = (slots, blocks) if self._to_chunk else (blocks, slots)
        copy_each(into, out_of, self._sizes)


class _Pages:
    """The planes of a group as tensors ``[NB, BS, NH, W]``, cut along the slots if a page is a large one."""

    def __init__(self, group: PlaneGroup, work: Sequence[tuple[Span, torch.Tensor]]) -> None:
        self.group = group
        self.itemsize: int = work[0][1].element_size()
        _, slots, heads, width = group.shape.sizes
        self.wide = self._widest([chunk for _, chunk in work])
        row = heads * width * self.itemsize // self.wide
        shape = (1 + max(max(span.ids) for span, _ in work), slots, heads, width)
        planes = self.views(group.addresses, shape, group.shape.strides)
        self.cuts = list(_pieces(slots, _SERIAL // row))
        """Slots of a page that are copied at once, ``(begin, length)``."""
        self.at_once = _SERIAL // (self.cuts[0][1] * row)
        """Blocks that are copied at once."""
        whole = len(self.cuts) == 1
        self.planes = [planes] if whole else [[p.narrow(1, *cut) for p in planes] for cut in self.cuts]
        """By cut."""

    def _widest(self, chunks: Sequence[torch.Tensor]) -> int:
        """Bytes of the widest element in which addresses, strides and widths of both sides come out even."""
        shape, width = self.group.shape, self.group.shape.sizes[3]
        if width > 1 and (shape.strides[3] != 1 or any(chunk.stride(3) != 1 for chunk in chunks)):
            return self.itemsize
        elements = {width, self.group.column}
        elements.update(
            step for size, step in zip(shape.sizes[:3], shape.strides[:3], strict=True) if size > 1
        )
        elements.update(*(chunk.stride()[:3] for chunk in chunks))
        addresses = (*self.group.addresses, *(chunk.data_ptr() for chunk in chunks))
        return gcd(_WIDEST, *(count * self.itemsize for count in elements), *addresses)

    def views(
        self, addresses: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
    ) -> list[torch.Tensor]:
        """Memory as tensors of wide elements; sizes and strides are in the narrow ones.

        :func:`tensor_from_ptr` without its checks, which cost more than all the rest here.
        """
        import torch

        wide, itemsize = self.wide, self.itemsize
        if wide != itemsize:
            sizes = (*sizes[:-1], sizes[-1] * itemsize // wide)
            strides = (*(step * itemsize // wide for step in strides[:-1]), 1)
        extent = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        dtype = torch.complex128 if wide == _WIDEST else int_dtype("copy_blocks", wide)
        memory, view = _bytes(extent * wide), torch.frombuffer
        return [
            view(memory.from_address(address), dtype=dtype).as_strided(sizes, strides)
            for address in addresses
        ]


@lru_cache(maxsize=64)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    """Kept, as making such a type costs more than all views of a group."""
    return ctypes.c_uint8 * count


class _Strided:
    """Blocks by torch, in pieces that it copies in the calling thread."""

    def __init__(self, pages: _Pages, span: Span, chunk: torch.Tensor, to_chunk: bool) -> None:
        group = pages.group
        _, size, heads, width = group.shape.sizes
        self.nbytes = len(span.ids) * group.shape.page * pages.itemsize
        _, layer, slot, column = chunk.stride()
        (slots,) = pages.views(
            [_begin(group, span, chunk)],
            (len(group.addresses), len(span.ids), size, heads, width),
            (layer, size * slot, slot, width * column, column),
        )
        self._pieces: list[tuple[Sequence[torch.Tensor], _Which, Sequence[torch.Tensor]]] = []
        for planes, cut in zip(pages.planes, pages.cuts, strict=True):
            part = slots.narrow(2, *cut)
            for begin, count, which in _which(span, pages.at_once):
                self._pieces.append((planes, which, part.narrow(1, begin, count).unbind(0)))
        self._copy = _gather if to_chunk else _scatter

    def copy(self, at: int) -> None:
        for planes, which, slots in self._pieces:
            self._copy(planes[at], which, slots[at])


def _which(span: Span, at_once: int) -> Iterator[tuple[int, int, _Which]]:
    """Blocks that are copied at once: where they begin in the span, how many they are, and which."""
    if len(span.runs) == 1 or len(span.runs) * _BLOCKS_PER_RUN <= len(span.ids):
        for position, block, length in span.runs:
            for begin, count in _pieces(length, at_once):
                yield position - span.first + begin, count, block + begin
    else:
        for begin, count in _pieces(len(span.ids), at_once):
            yield begin, count, span.id_tensor.narrow(0, begin, count)


def _pieces(size: int, at_once: int) -> Iterator[tuple[int, int]]:
    """``(begin, length)`` of pieces of an axis, at least 1 at a time."""
    step = max(1, at_once)
    for begin in range(0, size, step):
        yield begin, min(step, size - begin)


def _gather(pages: torch.Tensor, which: _Which, slots: torch.Tensor) -> None:
    import torch

    if isinstance(which, int):
        slots.copy_(pages.narrow(0, which, slots.shape[0]))
    else:
        torch.index_select(pages, 0, which, out=slots)


def _scatter(pages: torch.Tensor, which: _Which, slots: torch.Tensor) -> None:
    if isinstance(which, int):
        pages.narrow(0, which, slots.shape[0]).copy_(slots)
    else:
        pages.index_copy_(0, which, slots)
