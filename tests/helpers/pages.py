"""KV pages in plain bytes, filled with what can be told apart: no torch, no engine."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages

GARBAGE = 0xEE
PADDING = 0xAD


def kv(size: int, *of: object) -> bytes:
    """``size`` bytes that anything else in ``of`` would make different."""
    return hashlib.shake_128(repr(of).encode()).digest(size)


def _tensor(size: int) -> Any:
    import torch

    return torch.full((size,), PADDING, dtype=torch.uint8)


def layout(
    model: str = "model", block_size: int = 4, page_bytes: Sequence[int] = (32, 48), **fields: object
) -> Namespace:
    """A namespace of small pages, one per layer. Its chunk size is the server's to say."""
    namespace = Namespace(
        model=model, revision="r1", engine="test", format="test", dtype="test", block_size=block_size,
        chunk_size=block_size, kv_heads=1, head_size=1, page_bytes=tuple(page_bytes),
    )  # fmt: skip
    return msgspec.structs.replace(namespace, **fields)


class PageMemory:
    """The pages of one KV group of one worker: per layer a run of blocks that lie ``pad`` bytes apart.

    Args:
        tensors: in torch tensors, whose storage may move, instead of bytearrays.
    """

    def __init__(
        self,
        namespace: Namespace,
        num_blocks: int,
        pad: int = 0,
        null_block: int = -1,
        tensors: bool = False,
    ) -> None:
        self.namespace = namespace
        self.num_blocks = num_blocks
        self._strides = [size + pad for size in namespace.page_bytes]
        sizes = [stride * num_blocks for stride in self._strides]
        self._tensors = [_tensor(size) for size in sizes] if tensors else []
        self._bytes = [] if tensors else [bytearray([PADDING]) * size for size in sizes]
        self.pages = KVGroupPages(
            namespace,
            num_blocks,
            [ctypes.addressof(ctypes.c_char.from_buffer(layer)) for layer in self._layers],
            self._strides,
            null_block,
            tensors=[
                flat.view(num_blocks, stride)[:, :size]
                for flat, stride, size in zip(
                    self._tensors, self._strides, namespace.page_bytes if tensors else (), strict=False
                )
            ],
        )
        self.spoil(range(num_blocks))

    @property
    def _layers(self) -> Sequence[Any]:
        """Each layer as writable bytes, where it lies now."""
        return [memoryview(tensor.numpy()) for tensor in self._tensors] or self._bytes

    def read(self, layer: int, block: int) -> bytes:
        start = block * self._strides[layer]
        return bytes(self._layers[layer][start : start + self.namespace.page_bytes[layer]])

    def write(self, layer: int, block: int, data: bytes) -> None:
        assert len(data) == self.namespace.page_bytes[layer]
        start = block * self._strides[layer]
        self._layers[layer][start : start + len(data)] = data

    def spoil(self, blocks: Sequence[int]) -> None:
        """Nothing of value is in these blocks any more."""
        for block in blocks:
            for layer, size in enumerate(self.namespace.page_bytes):
                self.write(layer, block, bytes([GARBAGE]) * size)

    def expected(self, layer: int, tokens: Sequence[int], *, model: str = "") -> bytes:
        """What the page of the block that ends with ``tokens``' last one has to hold."""
        ns = self.namespace
        return kv(ns.page_bytes[layer], model or ns.model, ns.group, ns.tp_rank, layer, list(tokens))

    def fill(self, block: int, tokens: Sequence[int]) -> None:
        """Compute a block: the one that ends with ``tokens``' last one."""
        for layer in range(len(self._strides)):
            self.write(layer, block, self.expected(layer, tokens))

    def holds(self, block: int, tokens: Sequence[int]) -> bool:
        """Whether a block's pages are what :meth:`fill` would make them."""
        return all(
            self.read(layer, block) == self.expected(layer, tokens) for layer in range(len(self._strides))
        )

    def is_spoilt(self, block: int) -> bool:
        return all(set(self.read(layer, block)) == {GARBAGE} for layer in range(len(self._strides)))

    def chunk(self, tokens: Sequence[int], chunk_size: int) -> bytes:
        """What is stored for the chunk that ends with ``tokens``' last one: by layer, its blocks' pages."""
        size = self.namespace.block_size
        ends = range(len(tokens) - chunk_size + size, len(tokens) + 1, size)
        return b"".join(
            self.expected(layer, tokens[:end]) for layer in range(len(self._strides)) for end in ends
        )

    def padding_is_untouched(self) -> bool:
        return all(
            set(layer[start + size : start + stride]) <= {PADDING}
            for layer, stride, size in zip(
                self._layers, self._strides, self.namespace.page_bytes, strict=True
            )
            for start in range(0, len(layer), stride)
        )
