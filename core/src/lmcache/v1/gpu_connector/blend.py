"""Layer by layer through buffers that hold a whole sequence, for chunks that are used at other positions.

A load has three stages per layer: into a buffer, keys turned to their new positions, out to the pages. Two buffers
take turns, so layer i comes in while layer i - 1 is worked on and layer i - 2 has gone out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.errors import ConfigError, LayoutError
from lmcache.v1.gpu_connector.interface import LayerSteps
from lmcache.v1.gpu_connector.lanes import InFlight
from lmcache.v1.gpu_connector.layerwise import H2D, LayerPlan, LayerwiseConnector, copy_rows
from lmcache.v1.gpu_connector.slots import Slots, cached_prefix, mapping_of, slots_of
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.platform import resolve_device_ops

if TYPE_CHECKING:
    import torch

    from lmcache.v1.memory.objects import MemoryObj

__all__ = ["VLLMBufferLayerwiseGPUConnector"]


@dataclass
class _Buffer:
    """One layer of all tokens from the first chunk's first to the last chunk's last."""

    tensor: torch.Tensor
    """``[planes, T, D]``."""
    layer: int = -1
    """Which layer it holds; -1: none."""
    loaded: Any = None
    """Event on the lane: the layer is in."""
    written: Any = None
    """Event on the engine's stream: the pages have it, so the next may come in."""
    positions: torch.Tensor | None = None
    """int64 ``[T]`` of the host: for which positions keys are rotated; None: for those they have here."""
    taken: bool = False
    """Whether somebody has worked on it, and so has filled the gaps."""


class VLLMBufferLayerwiseGPUConnector(LayerwiseConnector):
    """Objects are ``KV_2TD`` ``[2, T, D]``, for MLA as of all layerwise connectors.

    A store notes at which positions the keys were rotated (``metadata.cached_positions``); a load turns them to the
    positions of ``starts`` and ``ends``, by ``fused_rotary_emb`` or what :meth:`set_rotary_embedding` was given.
    Between the send of a layer and the second step after it :meth:`get_kv` gives the layer, to be read and changed.
    Tokens between chunks are zero there. They reach the pages only if the layer was taken by ``get_kv``, that is, if
    somebody could fill them: otherwise the pages keep what they have.

    Args:
        use_gpu: Must be True: it works on buffers of the pages' device.
        use_double_buffer: Must be True, for the same reason.
    """

    token_major: ClassVar[bool] = False
    needs_sync: ClassVar[bool] = False

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = False,
        use_double_buffer: bool = True,
        **kwargs: Any,
    ) -> None:
        for name, value in (("use_gpu", use_gpu), ("use_double_buffer", use_double_buffer)):
            if not value:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={value!r}: expected True, as it works on buffers of the device"
                )
        super().__init__(hidden_dim_size, num_layers, use_gpu, **kwargs)
        #: ``(old positions, new positions, keys [T, D]) -> keys``; what an engine's blending sets.
        self.fused_rotary_emb: Callable[[Any, Any, Any], Any] | None = None
        #: Tokens of the last load, counted from its first, that no chunk has; int64 on the host.
        self.current_gap_positions: torch.Tensor | None = None
        self._pass: _Pass | None = None

    def set_rotary_embedding(self, cos_sin_cache: torch.Tensor, head_size: int, is_neox: bool) -> None:
        """Turn keys with the device's op; arguments as of ``rotary_embedding_k_fused``.

        Raises:
            LayoutError: The model is an MLA one: of its latents only a part is rotated, and the op turns all.
        """
        if self.use_mla:
            raise LayoutError(
                f"{type(self).__name__}: set_rotary_embedding with use_mla=True: expected a fused_rotary_emb, "
                "as only a part of a latent is rotated"
            )
        ops = resolve_device_ops(cos_sin_cache.device.type)

        def turn(old: torch.Tensor, new: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            ops.rotary_embedding_k_fused(old, new, key, head_size, cos_sin_cache, is_neox)
            return key

        self.fused_rotary_emb = turn

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Of one layer: ``[2, T, D]``, for MLA ``[1, 1, T, D]``."""
        import torch

        first = (1, 1) if self.use_mla else (2,)
        return torch.Size([*first, num_tokens, self.hidden_dim_size])

    @property
    def memory_format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_2TD

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[T, D]`` of a layer that is being loaded, at their new positions; of MLA the latent, twice.

        They are the buffer itself, valid on the engine's current stream; what is changed goes to the pages.

        Raises:
            LayoutError: The layer is not in a buffer now.
        """
        found = self._pass.find(layer_id) if self._pass is not None else None
        if found is None or self._pass is None:
            held = [buffer.layer for buffer in self._pass.buffers if buffer.layer >= 0] if self._pass else []
            raise LayoutError(f"get_kv({layer_id}): layers in the buffers now: {sorted(held)}; send it first")
        self._pass.settle(layer_id)
        found.taken = True
        return found.tensor[0], found.tensor[-1]

    # --- store ---------------------------------------------------------------------------------------------

    def _store_layer(
        self, layer: int, plan: LayerPlan, objects: Sequence[MemoryObj], buffer: torch.Tensor | None
    ) -> None:
        import torch

        super()._store_layer(layer, plan, objects, buffer)
        for chunk in plan.chunks:
            objects[chunk.index].metadata.cached_positions = torch.arange(chunk.start, chunk.end)

    # --- load ----------------------------------------------------------------------------------------------

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> LayerSteps:
        """Load chunks; N + 2 steps as of all layerwise connectors. Chunks are in order and do not overlap."""
        plan = self._plan("batched_to_gpu", starts, ends, kwargs, H2D)
        self.current_gap_positions = None
        spans = list(zip(map(int, starts), map(int, ends), strict=True))
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            raise LayoutError(f"chunks {spans}: expected them in order, without overlap")
        if not plan.chunks:
            return self._load(plan)
        first, last = spans[0][0], spans[-1][1]
        skip = cached_prefix(kwargs, first, last)
        slots = slots_of(mapping_of(kwargs), first, last, skip, int(kwargs.get("offset") or 0))
        if slots is None:
            return self._load(plan)
        found = _Pass(self, plan, spans, slots)
        self.current_gap_positions = found.gaps
        return self._through_buffers(found)

    def _through_buffers(self, load: _Pass) -> LayerSteps:
        lane = load.lane
        flight = InFlight(lane)
        try:
            lane.follow()
            load.allocate()
            self._pass = load
            for layer in range(self.num_layers):
                objects = yield
                load.write(layer - 2)
                if objects:
                    with lane.queued(), flight.use(list(objects)):
                        load.fill(layer, self.checked(objects, load.plan))
                load.settle(layer - 1)
                flight.reap()
            yield
            load.write(self.num_layers - 2)
            load.write(self.num_layers - 1)
            flight.close()
            self._end(load)
            yield
        finally:
            try:
                flight.close()
            finally:
                self._end(load)

    def _end(self, load: _Pass) -> None:
        if self._pass is load:
            self._pass = None
        if not load.buffers:  # ended before
            return
        try:
            load.lane.follow()  # the buffers go back to the lane's memory when the pages have them
        finally:
            load.buffers.clear()


class _Pass:
    """One load through the buffers."""

    def __init__(
        self,
        connector: VLLMBufferLayerwiseGPUConnector,
        plan: LayerPlan,
        spans: list[tuple[int, int]],
        slots: Slots,
    ) -> None:
        import torch

        self.connector, self.plan, self.spans, self.slots = connector, plan, spans, slots
        self.lane = connector.lane("load")
        self.first = spans[0][0]
        self.holes = [
            (end - self.first, start - self.first) for (_, end), (start, _) in pairwise(spans) if start > end
        ]
        self.gaps = torch.cat([torch.arange(0), *(torch.arange(start, end) for start, end in self.holes)])
        self.buffers: list[_Buffer] = []

    def allocate(self) -> None:
        import torch

        planes, width, pages = self.connector.planes, self.connector.hidden_dim_size, self.connector.pages
        shape = (planes, len(self.slots.tensor), width)
        with self.lane.queued():
            self.buffers = [
                _Buffer(torch.empty(shape, dtype=pages.dtype, device=pages.device)) for _ in range(2)
            ]

    def find(self, layer: int) -> _Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.layer == layer >= 0), None)

    def fill(self, layer: int, objects: Sequence[MemoryObj]) -> None:
        """Take a layer in: chunks where they belong, zeros between them; queued on the lane."""
        buffer = self.buffers[layer % 2]
        self.lane.after(buffer.written)
        for start, end in self.holes:
            buffer.tensor[:, start:end].zero_()
        for obj, (start, end) in zip(objects, self.spans, strict=True):
            rows = self.connector.rows_of(obj, end - start)
            copy_rows(
                buffer.tensor[:, start - self.first : end - self.first],
                rows.unsqueeze(0) if self.connector.planes == 1 else rows,
            )
        buffer.layer, buffer.taken, buffer.loaded = layer, False, self.lane.mark()
        buffer.positions = self._cached_positions(objects)

    def _cached_positions(self, objects: Sequence[MemoryObj]) -> torch.Tensor | None:
        """For which positions the keys are rotated; None if for those they have here."""
        import torch

        here = torch.arange(self.first, self.spans[-1][1])
        found = here.clone()
        for obj, (start, end) in zip(objects, self.spans, strict=True):
            cached = obj.metadata.cached_positions
            if cached is None:
                continue
            if len(cached) != end - start:
                raise LayoutError(
                    f"memory object with {len(cached)} cached positions: expected {end - start}, one per token"
                )
            found[start - self.first : end - self.first] = torch.as_tensor(cached, device="cpu")
        return None if torch.equal(found, here) else found

    def settle(self, layer: int) -> None:
        """Let the engine's stream have a layer, keys at their new positions. Done once per layer."""
        import torch

        buffer = self.find(layer)
        if buffer is None:
            return
        self.lane.after(buffer.loaded, engine=True)
        buffer.loaded = None
        old, buffer.positions = buffer.positions, None
        if old is None:
            return
        turn = self.connector.fused_rotary_emb
        if turn is None:
            raise LayoutError(
                f"layer {layer}: its keys are rotated for other positions: expected fused_rotary_emb or "
                "set_rotary_embedding to turn them"
            )
        key = buffer.tensor[0]
        new = torch.arange(self.first, self.first + len(old))
        turned = turn(old.to(key.device), new.to(key.device), key)
        if turned.data_ptr() != key.data_ptr():
            key.copy_(turned)

    def write(self, layer: int) -> None:
        """Let a layer go out to the pages, on the engine's current stream."""
        buffer = self.find(layer)
        if buffer is None:
            return
        self.settle(layer)
        slots = self.slots
        if len(self.gaps) and not buffer.taken:
            kept = slots.tensor.clone()
            kept[self.gaps.to(kept.device)] = -1
            slots = Slots(kept, True)
        rows = buffer.tensor[0] if self.connector.planes == 1 else buffer.tensor
        self.connector.pages.move_layer(layer, rows, slots, H2D, self.connector.token_major)
        buffer.layer, buffer.written = -1, self.lane.mark(engine=True)
