"""An engine's paged KV as opaque pages, and the copies between pages and stored chunks.

A page is one layer of one block. A stored chunk is its pages in layer-major order: for each layer, the
chunk's blocks in sequence. Consecutive blocks of a layer are therefore one run on both sides if the engine's
pages touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache.v1.keys import Namespace
from lmcache.v1.memory.hostcopy import Run, copy_runs

if TYPE_CHECKING:
    import torch

Direction = Literal["store", "load"]


class PageRun(NamedTuple):
    """``blocks`` consecutive blocks from ``block`` on, of layer ``layer``, at ``offset`` within the chunk."""

    layer: int
    block: int
    blocks: int
    offset: int


@dataclass(slots=True)
class KVGroupPages:
    """One KV cache group of one worker.

    ``tensors[i]`` is layer ``i``'s cache with blocks along dimension 0; ``addresses`` and ``strides`` (bytes
    from a block to the next) describe the same memory. ``null_block`` is an id whose page holds nothing
    (vLLM: 0).
    """

    namespace: Namespace
    num_blocks: int
    addresses: list[int]
    strides: list[int]
    null_block: int = -1
    device: str = "cpu"
    tensors: list[torch.Tensor] = field(default_factory=list)

    def runs(self, blocks: Sequence[int], skip: int = 0) -> list[PageRun]:
        """The page runs of one chunk whose blocks are ``blocks``; its first ``skip`` blocks are left out.

        Raises:
            ValueError: for a block id outside the cache.
        """
        spans: list[tuple[int, int, int]] = []  # (index in the chunk, block, count)
        tight = all(s == n for s, n in zip(self.strides, self.namespace.page_bytes, strict=True))
        for index in range(skip, len(blocks)):
            block = blocks[index]
            if block == self.null_block:
                continue
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block id {block}: expected 0..{self.num_blocks - 1}")
            if tight and spans:
                first, start, count = spans[-1]
                if block == start + count and index == first + count:
                    spans[-1] = (first, start, count + 1)
                    continue
            spans.append((index, block, 1))
        out: list[PageRun] = []
        base = 0
        for layer, page in enumerate(self.namespace.page_bytes):
            out.extend(PageRun(layer, block, count, base + index * page) for index, block, count in spans)
            base += page * self.namespace.blocks_per_chunk
        return out


def copy_pages(
    group: KVGroupPages, direction: Direction, jobs: Sequence[tuple[int, memoryview, list[PageRun]]]
) -> None:
    """Copy page runs between the engine's pages and chunks in host memory; returns when the bytes are in
    place.

    Args:
        jobs: per chunk the address of its first byte, the same bytes as a writable view, and its page runs.
    """
    if group.device == "cpu":
        _copy_host(group, direction, jobs)
    else:
        _copy_device(group, direction, jobs)


def _copy_host(
    group: KVGroupPages, direction: Direction, jobs: Sequence[tuple[int, memoryview, list[PageRun]]]
) -> None:
    sizes, addresses, strides = group.namespace.page_bytes, group.addresses, group.strides
    runs = [
        (address + offset, addresses[layer] + block * strides[layer], count * sizes[layer])
        for address, _, page_runs in jobs
        for layer, block, count, offset in page_runs
    ]
    if direction == "store":
        copy_runs([Run(host, page, size) for host, page, size in runs])
    else:
        copy_runs([Run(page, host, size) for host, page, size in runs])


def _copy_device(
    group: KVGroupPages, direction: Direction, jobs: Sequence[tuple[int, memoryview, list[PageRun]]]
) -> None:
    """The portable path for accelerators: torch copies on the current stream, then waits for that device."""
    import torch

    from lmcache.v1.platform import synchronize_device

    pages: list[Any] = [_byte_pages(t) for t in group.tensors]
    for _, view, page_runs in jobs:
        host = torch.frombuffer(view, dtype=torch.uint8)
        for layer, block, count, offset in page_runs:
            page = pages[layer][block : block + count]
            chunk = host[offset : offset + page.numel()].view(count, -1)
            if direction == "store":
                chunk.copy_(page)
            else:
                page.copy_(chunk)
    synchronize_device(group.device)


def _byte_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A cache tensor as ``[num_blocks, page_bytes]`` uint8, without a copy; blocks may lie apart."""
    import torch

    flat = torch.as_strided(tensor, (tensor.shape[0], tensor[0].numel()), (tensor.stride(0), 1))
    return flat.view(torch.uint8)
