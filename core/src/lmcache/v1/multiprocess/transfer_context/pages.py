"""An engine's paged KV as opaque pages, and the copies between pages and stored chunks.

A page is one layer of one block, or K or V of it where these are tensors of their own: what is said of layers here
is then said of each of them. A stored chunk is its pages in layer-major order: for each layer, the chunk's blocks in
sequence. Consecutive blocks of a layer are therefore one run on both sides if the engine's pages touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache.v1.keys import Namespace
from lmcache.v1.memory.hostcopy import copy_runs

if TYPE_CHECKING:
    import torch

Direction = Literal["store", "load"]
_ALL = slice(None)


class Span(NamedTuple):
    """``length`` consecutive blocks of the engine, from ``block`` on, from place ``place`` of a chunk's blocks."""

    place: int
    block: int
    length: int


class ChunkCopy(NamedTuple):
    """One chunk to copy: where its bytes lie in host memory, the same as a writable view, and its spans."""

    address: int
    view: memoryview
    spans: list[Span]


@dataclass(slots=True)
class KVGroupPages:
    """One KV cache group of one worker.

    ``tensors[i]`` is layer ``i``'s cache with blocks along dimension 0; ``addresses`` (of host memory only: no device
    need tell its own) and ``strides`` (bytes from a block to the next) describe the same memory. ``null_block`` is an
    id whose page holds nothing (vLLM: 0).
    """

    namespace: Namespace
    num_blocks: int
    addresses: list[int]
    strides: list[int]
    null_block: int = -1
    device: str = "cpu"
    tensors: list[torch.Tensor] = field(default_factory=list)

    def spans(self, blocks: Sequence[int], skip: int = 0) -> list[Span]:
        """What to copy of a chunk whose blocks are ``blocks``; its first ``skip`` blocks are left out.

        Blocks that follow one another in the engine and in the chunk are one span if their pages touch.

        Raises:
            ValueError: for a block id outside the cache.
        """
        spans: list[Span] = []
        tight = self.strides == list(self.namespace.page_bytes)
        for index in range(skip, len(blocks)):
            block = blocks[index]
            if block == self.null_block:
                continue
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block id {block}: expected 0..{self.num_blocks - 1}")
            if tight and spans:
                first, start, count = spans[-1]
                if block == start + count and index == first + count:
                    spans[-1] = Span(first, start, count + 1)
                    continue
            spans.append(Span(index, block, 1))
        return spans


def copy_pages(
    group: KVGroupPages, direction: Direction, chunks: Sequence[ChunkCopy], layers: slice = _ALL
) -> None:
    """Copy between the engine's pages and chunks in host memory; the bytes are in place on return.

    ``layers`` are those of the group to copy.
    """
    if group.device == "cpu":
        _copy_host(group, direction, chunks, layers)
    else:
        _copy_device(group, direction, chunks, layers)


def _places(group: KVGroupPages, layers: slice) -> list[tuple[int, int]]:
    """For each layer, where it begins in a chunk and the size of its pages, both in bytes."""
    sizes = group.namespace.page_bytes
    per_chunk = group.namespace.blocks_per_chunk
    begins = accumulate((size * per_chunk for size in sizes), initial=0)
    return list(zip(begins, sizes, strict=False))[layers]


def _copy_host(group: KVGroupPages, direction: Direction, chunks: Sequence[ChunkCopy], layers: slice) -> None:
    flat = [(address, *span) for address, _, spans in chunks for span in spans]
    pages: list[int] = []
    host: list[int] = []
    sizes: list[int] = []
    for (base, page), start, stride in zip(
        _places(group, layers), group.addresses[layers], group.strides[layers], strict=True
    ):
        pages += [start + block * stride for _, _, block, _ in flat]
        host += [address + base + index * page for address, index, _, _ in flat]
        sizes += [count * page for _, _, _, count in flat]
    if direction == "store":
        copy_runs(host, pages, sizes)
    else:
        copy_runs(pages, host, sizes)


def _copy_device(
    group: KVGroupPages, direction: Direction, chunks: Sequence[ChunkCopy], wanted: slice
) -> None:
    """By the vendor's own mover, or by torch copies on the current stream and a wait for that stream."""
    import torch

    from lmcache.v1.platform import get_device_spec, synchronize_current_stream

    spec = get_device_spec(group.device.partition(":")[0])
    mover = spec.page_mover if spec is not None else None
    if mover is not None:
        ids = [block + step for _, _, spans in chunks for _, block, count in spans for step in range(count)]
        host_pages = _host_pages(group, chunks, wanted)
        mover(_element_pages(group)[wanted], ids, host_pages, direction == "store")
        return

    layers: list[Any] = [pages[:, 0] for pages in byte_pages(group)][wanted]
    for _, view, spans in chunks:
        host = torch.frombuffer(view, dtype=torch.uint8)
        for pages, (base, size) in zip(layers, _places(group, wanted), strict=True):
            for index, block, count in spans:
                page = pages[block : block + count]
                chunk = host[base + index * size : base + (index + count) * size].view(count, -1)
                if direction == "store":
                    chunk.copy_(page)
                else:
                    page.copy_(chunk)
    synchronize_current_stream(group.device)


def _host_pages(group: KVGroupPages, chunks: Sequence[ChunkCopy], layers: slice) -> list[list[int]]:
    """Per layer, where the page of each block of the spans lies in host memory."""
    places = [
        (chunk.address, place + step)
        for chunk in chunks
        for place, _, count in chunk.spans
        for step in range(count)
    ]
    return [
        [address + base + place * size for address, place in places] for base, size in _places(group, layers)
    ]


def _element_pages(group: KVGroupPages) -> list[torch.Tensor]:
    """Each layer's cache as ``[num_blocks, elements]`` of its own type, without a copy; blocks may lie apart."""
    import torch

    layers = zip(group.tensors, group.namespace.page_bytes, group.strides, strict=True)
    return [
        torch.as_strided(tensor, (group.num_blocks, page // item), (stride // item, 1))
        for tensor, page, stride in layers
        for item in [tensor.element_size()]
    ]


def byte_pages(group: KVGroupPages) -> list[torch.Tensor]:
    """Each layer's cache as ``[num_blocks, 1, page_bytes]`` uint8, without a copy; blocks may lie apart."""
    import torch

    return [pages.unsqueeze(1).view(torch.uint8) for pages in _element_pages(group)]
