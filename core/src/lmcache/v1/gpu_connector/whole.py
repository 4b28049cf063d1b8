"""Connectors that move all layers of a chunk at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.base import PagedConnector, same_count
from lmcache.v1.gpu_connector.pages import PagedLayers
from lmcache.v1.gpu_connector.slots import Slots, cached_prefix, mapping_of, slots_of
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._paged_operands import same_elements

if TYPE_CHECKING:
    import torch

    from lmcache.v1.memory.objects import MemoryObj

__all__ = ["Part", "SGLangGPUConnector", "VLLMPagedMemGPUConnectorV2", "WholeConnector"]

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H


class Part(NamedTuple):
    """Layers that one call of an op moves, and the object's tensor for them."""

    pages: PagedLayers
    tensor: torch.Tensor
    engine_group: int = 0
    """Which of the engine's slot mappings is theirs."""


class WholeConnector(PagedConnector):
    """Objects are ``KV_2LTD`` ``[2, L, T, D]``, for MLA ``KV_MLA_FMT`` ``[1, L, T, D]``; T is ``end - start``.

    All is in place when a call returns: an object in host memory is complete then, and may be given back. The host
    waits for the transfer's own stream only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: dict[tuple[TransferDirection, int], torch.Tensor] = {}

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load tokens ``[start, end)``; see :meth:`batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store tokens ``[start, end)``; see :meth:`batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load chunks. ``offset`` says at which token of the sequence ``slot_mapping`` begins, 0 if not given.

        Raises:
            LayoutError: An object, the slots or the pages do not fit; nothing has moved.
            ValueError: A slot beyond the pages, likewise; on a device such a slot is padding.
        """
        self._run(H2D, memory_objs or (), starts or (), ends or (), kwargs)

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Store chunks; arguments and errors as of :meth:`batched_to_gpu`. Sets the objects' format."""
        self._run(D2H, memory_objs, starts, ends, kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """``[2, L, T, D]``, for MLA ``[1, L, T, D]``."""
        import torch

        return torch.Size([self.planes, self.num_layers, num_tokens, self.hidden_dim_size])

    @property
    def memory_format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_2LTD

    def parts(self, memory_obj: MemoryObj) -> list[Part]:
        """What of the object belongs to which layers.

        Raises:
            LayoutError: It holds something else.
        """
        tensor = memory_obj.tensor
        if tensor is None:
            raise LayoutError(
                "memory object of serialised bytes: expected one with a tensor; deserialise it first"
            )
        return [Part(self.pages, tensor)]

    def _run(
        self,
        way: TransferDirection,
        objects: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: dict[str, Any],
    ) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        same_count(objects, starts, ends)
        if not objects:
            return
        lane = self.lane("load" if way is H2D else "store")
        lane.follow()
        try:
            with lane.queued():
                moves = [
                    self._checked(way, obj, int(start), int(end), kwargs)
                    for obj, start, end in zip(objects, starts, ends, strict=True)
                ]
                for obj, parts in zip(objects, moves, strict=True):
                    for index, (part, slots) in parts.items():
                        self._move_part(way, index, part, slots)
                    if way is D2H:
                        self._set_format(obj)
        finally:
            lane.wait()

    def _checked(
        self, way: TransferDirection, obj: MemoryObj, start: int, end: int, kwargs: dict[str, Any]
    ) -> dict[int, tuple[Part, Slots]]:
        """What of an object moves where, by its tensors' numbers; that all of it fits is known by now."""
        if way is H2D:
            self._check_format(obj)
        skip = cached_prefix(kwargs, start, end) if way is H2D else 0
        offset = int(kwargs.get("offset") or 0) if way is H2D else 0
        found: dict[int, tuple[Part, Slots]] = {}
        for index, (part, form) in enumerate(
            zip(self.parts(obj), self._forms(max(0, end - start)), strict=True)
        ):
            slots = slots_of(mapping_of(kwargs, part.engine_group), start, end, skip, offset)
            if slots is not None:
                _check_part(part, form)
                slots.check(part.pages.num_slots)
                found[index] = part, slots
        return found

    def _forms(self, tokens: int) -> Sequence[torch.Size]:
        """Shape of each of an object's tensors."""
        return [self.get_shape(tokens)]

    def _move_part(self, way: TransferDirection, index: int, part: Part, slots: Slots) -> None:
        pages, obj = part.pages, part.tensor
        buffer = self._buffer(way, index, part)
        if buffer is None:
            pages.move(obj, slots, way)
            return
        if way is H2D or slots.may_skip or obj.shape[2] > len(slots.tensor):
            # Rows that do not move are written back as they were.
            buffer.copy_(obj, non_blocking=True)
        pages.move(buffer, slots, way)
        if way is D2H:
            obj.copy_(buffer, non_blocking=True)

    def _buffer(self, way: TransferDirection, index: int, part: Part) -> torch.Tensor | None:
        """The object's form on the pages' device, or None where objects go directly. One per direction is kept:
        work on one lane is in order."""
        import torch

        obj, device = part.tensor, part.pages.device
        if not self.use_gpu or obj.device == device or obj.shape[2] > (self.chunk_size or obj.shape[2]):
            return None
        kept = self._buffers.get((way, index))
        if kept is None or kept.numel() < obj.numel() or kept.dtype != obj.dtype or kept.device != device:
            kept = torch.empty(obj.numel(), dtype=obj.dtype, device=device)
            self._buffers[way, index] = kept
        return kept[: obj.numel()].view(obj.shape)

    def _check_format(self, obj: MemoryObj) -> None:
        if obj.metadata.fmt is not self.memory_format:
            raise LayoutError(
                f"{type(self).__name__}: memory object of format {obj.metadata.fmt.name}: expected "
                f"{self.memory_format.name}"
            )

    def _set_format(self, obj: MemoryObj) -> None:
        if obj.metadata.fmt is not self.memory_format:
            obj.metadata.fmt = self.memory_format


def _check_part(part: Part, form: Sequence[int]) -> None:
    """
    Raises:
        LayoutError: The tensor is too small for the tokens, or one of another model's.
    """
    shape = tuple(part.tensor.shape)
    if len(shape) != 4 or shape[2] < form[2] or [*shape[:2], shape[3]] != [*form[:2], form[3]]:
        raise LayoutError(f"memory object of shape {shape}: expected {tuple(form)}, or more tokens")
    if not same_elements(part.tensor.dtype, part.pages.dtype):
        raise LayoutError(
            f"memory object of {part.tensor.dtype}: expected {part.pages.dtype}, as the pages are"
        )


class VLLMPagedMemGPUConnectorV2(WholeConnector):
    """vLLM, all layers alike; see :class:`WholeConnector`."""


class SGLangGPUConnector(WholeConnector):
    """SGLang, K and V in lists of their own; see :class:`WholeConnector`."""

    engine: ClassVar[EngineType] = EngineType.SGLANG
