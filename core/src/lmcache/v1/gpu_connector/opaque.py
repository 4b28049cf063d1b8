"""Whole pages as bytes, for engines on the CPU that pack K and V inside a page as they like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.errors import ConfigError, LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.base import fingerprint, same_count
from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.slots import BROKEN, cached_prefix, mapping_of, whole_blocks
from lmcache.v1.kv_layout import (
    KVFormat,
    describe_tensor,
    kv_format,
    layer_tensors,
    normalize_and_discover_per_layer_formats,
)
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.utils.memcpy import copy_each

if TYPE_CHECKING:
    import torch

    from lmcache.v1.kv_layout import LayoutHints
    from lmcache.v1.memory.objects import MemoryObj

__all__ = ["VLLMOpaquePagesConnector"]


class VLLMOpaquePagesConnector(GPUConnectorInterface):
    """Objects are of format ``BINARY``: the pages of the chunk's blocks, layer after layer, in order of tokens.

    They have the shape that token-granular objects of this model have, ``[2, L, T, D]`` (``[1, L, T, D]`` for MLA),
    which is as many bytes. A range of tokens must be whole blocks, and what is loaded must not begin within one. An
    object fits no other layout, block size or build of the engine: the engine's keys must tell these apart.

    Args:
        hidden_dim_size, num_layers: As of all connectors.
        use_mla: Likewise.
        layout_hints: Likewise; vLLM's CPU backend needs ``kv_layout``.
    """

    engine = EngineType.VLLM

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_mla: bool = False,
        layout_hints: LayoutHints | None = None,
    ) -> None:
        if min(hidden_dim_size, num_layers) < 1:
            raise ConfigError(
                f"{type(self).__name__}: hidden_dim_size={hidden_dim_size}, num_layers={num_layers}: expected 1 or more"
            )
        self.hidden_dim_size, self.num_layers = hidden_dim_size, num_layers
        self.planes = 1 if use_mla else 2
        self.layout_hints = layout_hints
        self._mark: Any = None
        self._pages: list[_Pages] = []
        self._block_size = self._num_blocks = 0

    @classmethod
    def from_metadata(
        cls,
        metadata: Any,
        use_gpu: bool = False,
        device: torch.device | None = None,
        layout_hints: LayoutHints | None = None,
    ) -> VLLMOpaquePagesConnector:
        """A connector for the sizes of an ``LMCacheMetadata``. It needs no buffer and knows one device."""
        num_layers, _, _, heads, head_size = metadata.kv_shape
        return cls(heads * head_size, num_layers, metadata.use_mla, layout_hints)

    @property
    def memory_format(self) -> MemoryFormat:
        return MemoryFormat.BINARY

    def get_shape(self, num_tokens: int) -> torch.Size:
        """``[2, L, T, D]``, for MLA ``[1, L, T, D]``: so many elements, of the engine's dtype."""
        import torch

        return torch.Size([self.planes, self.num_layers, num_tokens, self.hidden_dim_size])

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Find the pages of ``kvcaches``, once per cache.

        Raises:
            LayoutError: They are not told, lie on a device, or a page is not one piece per plane.
        """
        given = kwargs.get("kvcaches")
        if given is None:
            return
        given = list(given.values()) if isinstance(given, Mapping) else given
        mark = fingerprint(given)
        if mark == self._mark:
            return
        nested, formats = normalize_and_discover_per_layer_formats(given, (), self.engine, self.layout_hints)
        rows = [kv_format(fmt) for fmt in formats]
        if rows[0].is_cross_layer or len(rows) != self.num_layers:
            raise LayoutError(
                f"{rows[0].label} with {len(rows)} layers: expected {self.num_layers} of their own"
            )
        pages = [
            plane
            for layer, row in zip(nested, rows, strict=True)
            for tensor in layer_tensors([layer], row)[0]
            for plane in _pages_of(row, tensor)
        ]
        blocks = {(plane.num_blocks, plane.block_size) for plane in pages}
        if len(blocks) > 1:
            raise LayoutError(
                f"layers of {len(blocks)} block sizes or numbers of blocks: expected one, as slots are"
            )
        self._num_blocks, self._block_size = blocks.pop()
        self.kvcaches, self._pages, self._mark = nested, pages, mark

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load the blocks of tokens ``[start, end)``; in place on return.

        Raises:
            LayoutError: The range is not whole blocks, or the object does not fit.
            ValueError: A block beyond the pages.
        """
        self._run([memory_obj], [start], [end], kwargs, to_pages=True)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store the blocks of tokens ``[start, end)``; in place on return. Sets the object's format.

        Raises:
            LayoutError, ValueError: As :meth:`to_gpu`.
        """
        self._run([memory_obj], [start], [end], kwargs, to_pages=False)

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Store several chunks.

        Raises:
            LayoutError, ValueError: As :meth:`to_gpu`; nothing has moved.
        """
        self._run(memory_objs, starts, ends, kwargs, to_pages=False)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load several chunks.

        Raises:
            LayoutError, ValueError: As :meth:`to_gpu`; nothing has moved.
        """
        self._run(memory_objs or (), starts or (), ends or (), kwargs, to_pages=True)

    def _run(
        self,
        objects: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: dict[str, Any],
        to_pages: bool,
    ) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        same_count(objects, starts, ends)
        found = [
            self._checked(obj, kwargs, int(start), int(end), to_pages)
            for obj, start, end in zip(objects, starts, ends, strict=True)
        ]
        for obj, blocks in zip(objects, found, strict=True):
            self._copy(obj, blocks, to_pages)
            if not to_pages and obj.metadata.fmt is not MemoryFormat.BINARY:
                obj.metadata.fmt = MemoryFormat.BINARY

    def _checked(
        self, obj: MemoryObj, kwargs: Mapping[str, Any], start: int, end: int, to_pages: bool
    ) -> list[int]:
        """The blocks of an object, which fits them.

        Raises:
            LayoutError, ValueError: As :meth:`to_gpu`.
        """
        if to_pages and obj.metadata.fmt is not MemoryFormat.BINARY:
            raise LayoutError(
                f"memory object of format {obj.metadata.fmt.name}: expected BINARY, which holds opaque pages"
            )
        offset = int(kwargs.get("offset") or 0) if to_pages else 0
        blocks = self._blocks(
            kwargs, start, end, cached_prefix(kwargs, start, end) if to_pages else 0, offset
        )
        needed = len(blocks) * sum(plane.nbytes for plane in self._pages)
        if blocks and obj.get_size() != needed:
            raise LayoutError(
                f"memory object of {obj.get_size()} bytes for {end - start} tokens: the pages of their blocks have "
                f"{needed}"
            )
        return blocks

    def _blocks(self, kwargs: Mapping[str, Any], start: int, end: int, skip: int, offset: int) -> list[int]:
        """The block of each ``block_size`` tokens; -1 where nothing moves.

        Raises:
            LayoutError: Tokens are not whole blocks.
            ValueError: A block beyond the pages.
        """
        size = self._block_size
        if not size:
            raise LayoutError(f"{type(self).__name__}: kvcaches: expected them with the first call, got none")
        mapping = mapping_of(kwargs)
        for what, token in (("start", start), ("end", end), ("vllm_cached_tokens", start + skip)):
            if token % size:
                raise LayoutError(
                    f"{what}={token}: expected a multiple of the block size {size}, as opaque pages are taken whole; "
                    "choose a chunk_size of whole blocks and save_unfull_chunk: false"
                )
        if not offset <= start <= end <= offset + len(mapping):
            raise LayoutError(
                f"tokens {start} to {end}: expected them within the {len(mapping)} of slot_mapping from token "
                f"{offset} on"
            )
        found = whole_blocks(mapping[start - offset : end - offset].cpu(), size)
        broken = (found == BROKEN).nonzero()
        if len(broken):
            at = start + size * int(broken[0])
            raise LayoutError(
                f"slots of tokens {at} to {at + size}: expected one whole block of {size}, as pages are opaque"
            )
        found[: skip // size] = -1
        if len(found) and int(found.max()) >= self._num_blocks:
            raise ValueError(f"block {int(found.max())}: expected less than {self._num_blocks}")
        blocks: list[int] = found.tolist()
        return blocks

    def _copy(self, obj: MemoryObj, blocks: list[int], to_pages: bool) -> None:
        pages: list[int] = []
        places: list[int] = []
        sizes: list[int] = []
        base = obj.data_ptr
        for plane in self._pages:
            for at, block in enumerate(blocks):
                if block >= 0:
                    pages.append(plane.address + block * plane.stride)
                    places.append(base + at * plane.nbytes)
                    sizes.append(plane.nbytes)
            base += len(blocks) * plane.nbytes
        if to_pages:
            copy_each(pages, places, sizes)
        else:
            copy_each(places, pages, sizes)


class _Pages:
    """Where the pages of one tensor, or of K or V of it, lie."""

    def __init__(self, address: int, nbytes: int, stride: int, num_blocks: int, block_size: int) -> None:
        self.address, self.nbytes, self.stride = address, nbytes, stride
        self.num_blocks, self.block_size = num_blocks, block_size


def _pages_of(row: KVFormat, tensor: torch.Tensor) -> list[_Pages]:
    """The pages of a tensor: one run of bytes each, or one of K and one of V where these are apart.

    Raises:
        LayoutError: The tensor is not the host's, or its pages have gaps.
    """
    if tensor.device.type != "cpu":
        raise LayoutError(f"{row.label} on {tensor.device}: opaque pages are moved in host memory only")
    if not row.is_two_major:
        page = describe_tensor(row, tensor, opaque=True)
        return [
            _Pages(
                tensor.data_ptr(), page.page_bytes, page.page_stride_bytes, page.num_blocks, page.block_size
            )
        ]
    halves = KVFormat(row.id, row.name, f"NL x [{', '.join(row.dims.axes[1:])}]")
    return [found for half in tensor.unbind(0) for found in _pages_of(halves, half)]
