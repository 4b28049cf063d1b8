"""Blocks between pages and chunks in host memory.

A page whose elements stand in the chunk's order moves by plain memcpy, one call per run of blocks. A page in
another order (heads outside slots) moves by memcpy between the pages and a scratch that stays in the cache,
where one strided copy turns many pages at once. So what a call costs beside the bytes is an address per run
and one torch call per 256 KiB.

Measured on two busy cores, 32 KiB pages, ids at random, as shares of one memcpy thread and by CPU time: turning
in the scratch 0.4 to 0.6 per thread, no less than strided copies straight to and from memory; ``index_copy_``
and ``index_put_`` 0.1 to 0.3, a strided ``copy_`` per block 0.2 to 0.3. Elements of 16 bytes are not faster than
those of 8. Threads are plain ones and torch is kept in each of them: its OpenMP threads wait for each other at
the end of every copy, and with another process on the machine that fell to 0.05.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from lmcache.v1.platform.torch_ops._paged import PlaneGroup
from lmcache.v1.platform.torch_ops._paged_operands import int_dtype
from lmcache.v1.platform.torch_ops._spans import Span
from lmcache.v1.utils.memcpy import copy_each

if TYPE_CHECKING:
    import torch

__all__ = ["copy_blocks"]

_SCRATCH = 256 << 10
"""Bytes turned at once, well below a core's cache; half as many cost a fifth more."""
_SERIAL = 32 << 10
"""Elements up to which torch copies in the calling thread."""
_UNIT = 4 << 20
"""Bytes that a thread takes at once."""
_THREADED = 8 << 20
"""Bytes from which a second thread pays."""
_MAX_THREADS = 4

_local = threading.local()


class _Unit(NamedTuple):
    """The blocks of one span in some consecutive planes of a group."""

    group: PlaneGroup
    span: Span
    chunk: torch.Tensor
    first: int
    last: int
    to_chunk: bool

    @property
    def addresses(self) -> list[int]:
        """Where the planes begin."""
        return self.group.addresses[self.first : self.last]


def copy_blocks(
    groups: Sequence[PlaneGroup],
    work: Sequence[tuple[Span, torch.Tensor]],
    to_chunk: bool,
) -> None:
    """Copy the blocks of each span between all planes and the span's chunk; done on return.

    Args:
        groups: Planes on the host, of which every block is one run.
        work: Spans, and their chunks as integers, ``[KV, NL, slots, hidden]``.
        to_chunk: From pages to chunks, or the reverse.
    """
    units: list[_Unit] = []
    total = 0
    for span, chunk in work:
        for group in groups:
            nbytes = len(span.ids) * group.shape.page * chunk.element_size()
            step = max(1, _UNIT // max(1, nbytes))
            total += nbytes * len(group.addresses)
            for first in range(0, len(group.addresses), step):
                last = min(first + step, len(group.addresses))
                units.append(_Unit(group, span, chunk, first, last, to_chunk))
    _share(units, _threads() if total >= _THREADED else 1)


def _threads() -> int:
    """No more than torch may use for its own work, and than there are cores for this thread."""
    import torch

    allowed: int = torch.get_num_threads()
    return min(_MAX_THREADS, allowed, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="lmcache-blocks")


def _share(units: Sequence[_Unit], threads: int) -> None:
    """Run all units, each by the thread that comes first."""
    queue = iter(units)
    helpers: list[Future[None]] = [_pool().submit(_run, queue) for _ in range(min(threads, len(units)) - 1)]
    try:
        _run(queue)
    finally:
        # A helper that has not begun by now has nothing to do (nor will it ever begin, after a fork).
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _run(queue: Iterator[_Unit]) -> None:
    import torch

    with torch.inference_mode():  # per thread; tensors made in it can only be written in it
        for unit in queue:
            (_move if _is_same_order(unit) else _turn)(unit)


def _is_same_order(unit: _Unit) -> bool:
    """Whether a block is the same run of bytes in the page and in the chunk."""
    _, _, slots, hidden = unit.chunk.shape
    tight = unit.chunk[0, 0].is_contiguous() or slots == 0
    return tight and unit.group.shape.hidden == hidden and unit.group.shape.is_token_major


def _move(unit: _Unit) -> None:
    """Pages that are runs of the chunk: plain copies."""
    group, span, chunk = unit.group, unit.span, unit.chunk
    itemsize = chunk.element_size()
    page, stride = group.shape.page * itemsize, group.shape.strides[0] * itemsize
    runs = span.runs if stride == page else span.singles
    layers = range(group.layer + unit.first, group.layer + unit.last)
    plane = chunk.data_ptr() + group.kv * chunk.stride(0) * itemsize
    bases = [plane + layer * chunk.stride(1) * itemsize for layer in layers]
    slots = [position * page for position, _, _ in runs]
    blocks = [block * stride for _, block, _ in runs]
    sizes = [count * page for _, _, count in runs] * len(bases)
    _copy(
        [base + at for base in bases for at in slots],
        [base + at for base in unit.addresses for at in blocks],
        sizes,
        unit.to_chunk,
    )


def _turn(unit: _Unit) -> None:
    """Pages in another order: turned in the scratch, some planes and blocks at once."""
    shape, ids = unit.group.shape, unit.span.ids
    slots, inner, size = _wide(unit)
    page, stride = shape.page * unit.chunk.element_size(), shape.strides[0] * unit.chunk.element_size()
    at_once = max(1, min(_SCRATCH, _SERIAL * size) // page)
    blocks, planes = min(len(ids), at_once), max(1, at_once // len(ids))
    scratch = _scratch(max(_SCRATCH, page))
    start, length, wide = scratch.data_ptr(), page // size, scratch.view(slots.dtype)
    bands = [(first, at) for first in range(0, len(slots), planes) for at in range(0, len(ids), blocks)]
    parts = [part for band in slots.split(planes) for part in band.split(blocks, 1)]
    turned: dict[torch.Size, torch.Tensor] = {}
    addresses = unit.addresses
    for (first, at), part in zip(bands, parts, strict=True):
        taken = [block * stride for block in ids[at : at + blocks]]
        pages = [base + block for base in addresses[first : first + planes] for block in taken]
        places, sizes = range(start, start + len(pages) * page, page), [page] * len(pages)
        form = turned.get(part.shape)
        if form is None:
            form = wide.as_strided(part.shape, (len(taken) * length, length, *inner))
            turned[part.shape] = form
        if unit.to_chunk:
            _copy(places, pages, sizes, True)
            part.copy_(form)
        else:
            form.copy_(part)
            _copy(places, pages, sizes, False)


def _wide(unit: _Unit) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """The unit's part of the chunk as ``[planes, n, BS, NH, W]``, a page's inner strides, and the bytes of an
    element: all in the widest integers in which runs on both sides come out even."""
    group, span, chunk = unit.group, unit.span, unit.chunk
    _, slots_per_block, heads, width = group.shape.sizes
    itemsize = chunk.element_size()
    hidden = heads * width
    even = [
        chunk.data_ptr(),
        chunk.storage_offset() * itemsize,
        chunk.shape[3] * itemsize,
    ]
    even += [group.column * itemsize, width * itemsize]
    even += [stride * itemsize for stride in chunk.stride()[:3]]
    rows = group.shape.strides[3] == 1 and chunk.stride(3) == 1
    size = next(s for s in (8, 4, 2, 1) if s <= itemsize or (rows and not any(at % s for at in even)))
    ratio = max(1, size // itemsize)
    layers = slice(group.layer + unit.first, group.layer + unit.last)
    start = span.first * slots_per_block
    part = chunk.view(int_dtype("copy_blocks", size)) if ratio > 1 else chunk
    part = part[group.kv, layers, start : start + len(span.ids) * slots_per_block]
    part = part.narrow(-1, group.column // ratio, hidden // ratio)
    inner = [stride // ratio for stride in group.shape.strides[1:3]] + [group.shape.strides[3]]
    shape = (unit.last - unit.first, len(span.ids), slots_per_block, heads, width // ratio)
    return part.view(shape), tuple(inner), itemsize * ratio


def _scratch(nbytes: int) -> torch.Tensor:
    """This thread's, kept: memory fresh from the system costs more than what is done in it."""
    import torch

    held: torch.Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < nbytes:
        held = _local.scratch = torch.empty(-(-nbytes // 8), dtype=torch.int64).view(torch.uint8)
    return held


def _copy(slots: Sequence[int], pages: Sequence[int], sizes: Sequence[int], to_chunk: bool) -> None:
    into, out_of = (slots, pages) if to_chunk else (pages, slots)
    copy_each(into, out_of, sizes)
