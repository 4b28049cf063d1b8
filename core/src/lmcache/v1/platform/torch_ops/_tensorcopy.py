"""Blocks between pages and chunks by torch's own copies: any device, any strides.

On a device all is queued on the current stream; the ids go there once, and nothing waits per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache.v1.platform.torch_ops._paged import PlaneGroup
from lmcache.v1.platform.torch_ops._paged_operands import int_dtype
from lmcache.v1.platform.torch_ops._spans import Span

if TYPE_CHECKING:
    import torch

__all__ = ["copy_blocks"]


def copy_blocks(
    groups: Sequence[PlaneGroup],
    work: Sequence[tuple[Span, torch.Tensor]],
    to_chunk: bool,
) -> None:
    """Copy the blocks of each span between all planes and the span's chunk.

    Args:
        groups: Planes of tensors.
        work: Spans, and their chunks as integers, ``[KV, NL, slots, hidden]``.
        to_chunk: From pages to chunks, or the reverse.
    """
    import torch

    with torch.inference_mode():  # tensors made in it can only be written in it
        views = [(group, at, _pages(group, at)) for group in groups for at in range(len(group.tensors))]
        device = views[0][2].device
        for span, chunk in work:
            index = None
            if len(span.runs) > 1 and _takes_index(device):
                index = torch.tensor(span.ids, device=device)
            for group, at, pages in views:
                slots = _slots(group, at, span, chunk)
                if index is None:
                    _copy_runs(pages, slots, span, to_chunk)
                else:
                    _copy_indexed(pages, slots, index, to_chunk)


def _takes_index(device: torch.device) -> bool:
    """Whether one indexed copy beats one copy per run: it saves launches, but is slow on the CPU."""
    return str(device.type) != "cpu"


def _pages(group: PlaneGroup, at: int) -> torch.Tensor:
    """A plane as integers, ``[NB, BS, NH, W]``."""
    tensor, offset = group.tensors[at]
    raw = tensor.view(int_dtype("copy_blocks", tensor.element_size()))
    return raw.as_strided(group.shape.sizes, group.shape.strides, raw.storage_offset() + offset)


def _slots(group: PlaneGroup, at: int, span: Span, chunk: torch.Tensor) -> torch.Tensor:
    """The plane's part of the span's chunk, ``[n, BS, NH, W]``."""
    _, size, heads, width = group.shape.sizes
    part = chunk[group.kv, group.layer + at].narrow(0, span.first * size, len(span.ids) * size)
    return part.narrow(1, group.column, heads * width).view(len(span.ids), size, heads, width)


def _copy_runs(pages: torch.Tensor, slots: torch.Tensor, span: Span, to_chunk: bool) -> None:
    """One copy per run of consecutive blocks."""
    for position, block, count in span.runs:
        there, here = pages.narrow(0, block, count), slots.narrow(0, position - span.first, count)
        if to_chunk:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)


def _copy_indexed(pages: torch.Tensor, slots: torch.Tensor, index: torch.Tensor, to_chunk: bool) -> None:
    """Scattered blocks in one go; ``index`` has each at most once where pages are written."""
    if to_chunk:
        slots.copy_(pages.index_select(0, index), non_blocking=True)
    else:
        pages.index_copy_(0, index, slots.to(pages.device, non_blocking=True))
