"""Connectors that go layer by layer, as generators that the engine drives beside its own step.

N layers: a store is N + 1 steps, a load N + 2, with any engine and any number of chunks, none included. See
docs/connectors.md for what each step promises. A generator may be closed after any of them, or dropped.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.base import PagedConnector
from lmcache.v1.gpu_connector.interface import LayerSteps
from lmcache.v1.gpu_connector.lanes import InFlight, Lane
from lmcache.v1.gpu_connector.slots import Slots, cached_prefix, joined, mapping_of, slots_of
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._paged_operands import same_elements

if TYPE_CHECKING:
    import torch

    from lmcache.v1.memory.objects import MemoryObj

__all__ = [
    "Chunk",
    "LayerPlan",
    "LayerwiseConnector",
    "SGLangLayerwiseGPUConnector",
    "VLLMPagedMemLayerwiseGPUConnector",
]

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, end)`` of a sequence, and where they go."""

    index: int
    """Which of the call's chunks."""
    start: int
    end: int
    slots: Slots


@dataclass
class LayerPlan:
    """What all layers of one transfer have in common."""

    count: int
    """Chunks of the call; those of which no token takes part are not among ``chunks``."""
    sync: bool
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of all chunks that take part."""
        return sum(len(chunk.slots.tensor) for chunk in self.chunks)

    @cached_property
    def slots(self) -> Slots:
        """Of all chunks, one after the other. First asked for on the lane, where they are put together."""
        return joined([chunk.slots for chunk in self.chunks])


class LayerwiseConnector(PagedConnector):
    """Objects hold one layer of a chunk: ``KV_T2D`` ``[T, 2, D]``, for MLA ``KV_MLA_FMT`` of ``[1, 1, T, D]`` or
    ``[T, D]``. An object in flight is held by a reference until its copy is done."""

    is_layerwise: ClassVar[bool] = True
    token_major: ClassVar[bool] = True
    needs_sync: ClassVar[bool] = True
    """Whether a load must be told by ``sync`` if the engine's stream waits for each layer."""

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} goes layer by layer: use batched_to_gpu")

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} goes layer by layer: use batched_from_gpu")

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Of one layer: ``[T, 2, D]``, for MLA ``[1, 1, T, D]``."""
        import torch

        if self.use_mla:
            return torch.Size([1, 1, num_tokens, self.hidden_dim_size])
        return torch.Size([num_tokens, 2, self.hidden_dim_size])

    @property
    def memory_format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_T2D

    # --- store ---------------------------------------------------------------------------------------------

    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[MemoryObj]],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        """Store chunks; N + 1 steps.

        Args:
            memory_objs: Per layer, one object per chunk.
            starts, ends: Of the chunks.
            kwargs: ``sync``: whether step k + 1 ends only when layer k - 1 is in its objects. The last step ends
                when all are, in any case.

        Raises:
            LayoutError, ValueError: What was given does not fit. Nothing is queued then.
        """
        plan = self._plan("batched_from_gpu", starts, ends, kwargs, D2H)
        if plan.count and [len(layer) for layer in memory_objs] != [plan.count] * self.num_layers:
            raise LayoutError(
                f"{type(self).__name__}: objects for {len(memory_objs)} layers: expected {self.num_layers} lists of "
                f"{plan.count} objects"
            )
        return self._store(plan, memory_objs)

    def _store(
        self, plan: LayerPlan, memory_objs: Sequence[Sequence[MemoryObj]]
    ) -> Generator[None, None, None]:
        if not plan.chunks:
            for _ in range(self.num_layers + 1):
                yield
            return
        lane = self.lane("store")
        flight = InFlight(lane)
        try:
            buffer = self._buffer(lane, plan)
            for layer in range(self.num_layers):
                lane.follow()  # the step has just computed this layer
                with lane.queued(), flight.use(_taken(plan, memory_objs[layer])):
                    self._store_layer(layer, plan, memory_objs[layer], buffer)
                if plan.sync:
                    flight.wait_until(1)
                yield
            flight.close()
            buffer = None
            yield
        finally:
            flight.close()

    def _store_layer(
        self, layer: int, plan: LayerPlan, objects: Sequence[MemoryObj], buffer: torch.Tensor | None
    ) -> None:
        for chunk in plan.chunks:
            if objects[chunk.index].metadata.fmt is not self.memory_format:
                objects[chunk.index].metadata.fmt = self.memory_format
        rows = [self.rows_of(objects[chunk.index], chunk.end - chunk.start) for chunk in plan.chunks]
        if buffer is None:
            for chunk, obj in zip(plan.chunks, rows, strict=True):
                self.pages.move_layer(layer, obj, chunk.slots, D2H, self.token_major)
            return
        parts = self._cut(buffer, [len(chunk.slots.tensor) for chunk in plan.chunks])
        for chunk, obj, part in zip(plan.chunks, rows, parts, strict=True):
            if chunk.slots.may_skip:  # rows that do not move are written back as they were
                copy_rows(part, obj)
        self.pages.move_layer(layer, buffer, plan.slots, D2H, self.token_major)
        for obj, part in zip(rows, parts, strict=True):
            copy_rows(obj, part)

    # --- load ----------------------------------------------------------------------------------------------

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> LayerSteps:
        """Load chunks; N + 2 steps: ``next``, a ``send`` of each layer's objects in order, ``next``.

        Args:
            starts, ends: Of the chunks.
            kwargs: ``sync``: whether the engine's stream waits, with the send of layer k + 1, for layer k.

        Raises:
            LayoutError, ValueError: What was given does not fit. Nothing is queued then.
        """
        return self._load(self._plan("batched_to_gpu", starts, ends, kwargs, H2D))

    def _load(self, plan: LayerPlan) -> LayerSteps:
        if not plan.chunks:
            for _ in range(self.num_layers + 2):
                yield
            return
        lane = self.lane("load")
        flight = InFlight(lane)
        try:
            lane.follow()
            buffer, before = self._buffer(lane, plan), None
            for layer in range(self.num_layers):
                objects = yield
                if plan.sync:
                    lane.after(before, engine=True)
                if objects:
                    with lane.queued(), flight.use(_taken(plan, objects)):
                        self._load_layer(layer, plan, objects, buffer)
                before = lane.mark()
                flight.reap()
            yield
            flight.close()
            buffer = None
            yield
        finally:
            flight.close()

    def _load_layer(
        self, layer: int, plan: LayerPlan, objects: Sequence[MemoryObj], buffer: torch.Tensor | None
    ) -> None:
        self.checked(objects, plan)
        rows = [self.rows_of(objects[chunk.index], chunk.end - chunk.start) for chunk in plan.chunks]
        if buffer is None:
            for chunk, obj in zip(plan.chunks, rows, strict=True):
                self.pages.move_layer(layer, obj, chunk.slots, H2D, self.token_major)
            return
        parts = self._cut(buffer, [len(chunk.slots.tensor) for chunk in plan.chunks])
        for obj, part in zip(rows, parts, strict=True):
            copy_rows(part, obj)
        self.pages.move_layer(layer, buffer, plan.slots, H2D, self.token_major)

    # --- what both need ------------------------------------------------------------------------------------

    def _plan(
        self,
        what: str,
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: dict[str, Any],
        way: TransferDirection,
    ) -> LayerPlan:
        if len(starts) != len(ends):
            raise LayoutError(f"{what}: {len(starts)} starts and {len(ends)} ends: expected as many")
        sync = kwargs.get("sync", not self.needs_sync or None)
        if not isinstance(sync, bool):
            raise ValueError(f"{type(self).__name__}.{what}: sync={sync!r}: expected True or False")
        self.initialize_kvcaches_ptr(**kwargs)
        plan = LayerPlan(len(starts), sync)
        if not len(starts):
            return plan
        mapping, offset = mapping_of(kwargs), int(kwargs.get("offset") or 0) if way is H2D else 0
        for index, (start, end) in enumerate(zip(map(int, starts), map(int, ends), strict=True)):
            skip = cached_prefix(kwargs, start, end) if way is H2D else 0
            slots = slots_of(mapping, start, end, skip, offset)
            if slots is not None:
                slots.check(self.pages.num_slots)
                plan.chunks.append(Chunk(index, start, end, slots))
        if self.pages.row.is_single_kv:
            raise LayoutError(
                f"{self.pages.row.label}: a tensor is K alone or V alone: expected layers of both; use_layerwise=false"
            )
        return plan

    def rows_of(self, obj: MemoryObj, tokens: int) -> torch.Tensor:
        """The object's tensor as the op takes it, ``[T, D]`` where there is one plane.

        Raises:
            LayoutError: It holds another number of tokens, or no tensor.
        """
        tensor = obj.tensor
        wanted = tokens * self.planes * self.hidden_dim_size
        if tensor is None or tensor.numel() != wanted:
            found = "serialised bytes" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise LayoutError(
                f"{type(self).__name__}: memory object of {found}: expected {tuple(self.get_shape(tokens))}"
            )
        if not same_elements(tensor.dtype, self.pages.dtype):
            raise LayoutError(
                f"{type(self).__name__}: memory object of {tensor.dtype}: expected {self.pages.dtype}, as the pages are"
            )
        if tensor.dtype != self.pages.dtype:
            tensor = tensor.view(self.pages.dtype)  # 8-bit floats that one side keeps as plain bytes
        rows: torch.Tensor = (
            tensor.view(tokens, -1) if self.planes == 1 else tensor.view(self.get_shape(tokens))
        )
        return rows

    def checked(self, objects: Sequence[MemoryObj], plan: LayerPlan) -> Sequence[MemoryObj]:
        """Objects of a layer that are to be read.

        Raises:
            LayoutError: One is of another format, or there are more or fewer than chunks.
        """
        if len(objects) != plan.count:
            raise LayoutError(
                f"{len(objects)} memory objects of a layer: expected {plan.count}, one per chunk"
            )
        wrong = {obj.metadata.fmt.name for obj in objects} - {self.memory_format.name}
        if wrong:
            raise LayoutError(
                f"{type(self).__name__}: memory object of format {min(wrong)}: expected {self.memory_format.name}"
            )
        return objects

    def _buffer(self, lane: Lane, plan: LayerPlan) -> torch.Tensor | None:
        """One layer of all chunks on the pages' device; None where objects go directly."""
        import torch

        pages = self.pages
        if not self.use_gpu or pages.device.type == "cpu":
            return None
        with lane.queued():
            return torch.empty(self.buffer_shape(plan.tokens), dtype=pages.dtype, device=pages.device)

    def buffer_shape(self, tokens: int) -> tuple[int, ...]:
        """Of a layer's tokens as the op takes them."""
        if self.planes == 1:
            return (tokens, self.hidden_dim_size)
        return (tokens, 2, self.hidden_dim_size) if self.token_major else (2, tokens, self.hidden_dim_size)

    def _cut(self, buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        axis = 0 if self.planes == 1 or self.token_major else 1
        return list(buffer.split(list(sizes), dim=axis))


class VLLMPagedMemLayerwiseGPUConnector(LayerwiseConnector):
    """vLLM, layer by layer; see :class:`LayerwiseConnector`."""


class SGLangLayerwiseGPUConnector(LayerwiseConnector):
    """SGLang, layer by layer; see :class:`LayerwiseConnector`."""

    engine: ClassVar[EngineType] = EngineType.SGLANG


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between host and device, each part contiguous: one link copy each, without a buffer of torch's own."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for to, of in zip(target.unbind(0), source.unbind(0), strict=True):
        to.copy_(of, non_blocking=True)


def _taken(plan: LayerPlan, objects: Sequence[MemoryObj]) -> list[MemoryObj]:
    """The objects that take part; whether there are enough is checked where they are read."""
    return [objects[chunk.index] for chunk in plan.chunks if chunk.index < len(objects)]
