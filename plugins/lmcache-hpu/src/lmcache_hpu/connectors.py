"""The connector of engines that run LMCache in their process on Gaudi.

It is the core's for whole chunks, with what this device needs: K and V of a layer as a tuple, slots that are looked at
on the host, and objects in host memory that go through the stage of the ops in fixed shapes, with their step marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemGPUConnectorV2
from lmcache.v1.gpu_connector.lanes import Lane

__all__ = ["CLASSES", "VLLMPagedMemHPUConnector", "VLLMPagedMemHPUConnectorV2"]


class VLLMPagedMemHPUConnectorV2(VLLMPagedMemGPUConnectorV2):
    """vLLM, all layers of a chunk at once; see ``WholeConnector``.

    A layer is a tensor, or a tuple of K and V, each ``[blocks, slots, heads, size]`` or ``[slots, heads, size]``; with
    MLA a tuple of the latent, ``[blocks, slots, size]`` or ``[slots, size]``. Places behind them must be empty.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any) -> None:
        """``use_gpu`` is taken as every connector takes it: the stage is the buffer here, in host memory."""
        super().__init__(hidden_dim_size, num_layers, False, **kwargs)
        self._seen: list[Any] = []
        """The tensors that layouts were found of."""

    def lane(self, name: str) -> Lane:
        """On the engine's own stream: in lazy mode what it has queued is on no stream before a step is marked."""
        lane = super().lane(name)
        lane.stream = None
        return lane

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """As the base class.

        Raises:
            LayoutError: A layer has less or more than K and V (or than its latent), such as scales of 8-bit floats.
        """
        given = kwargs.get("kvcaches")
        if given is None:
            return
        whole = hasattr(given, "as_strided")  # one tensor of all layers
        layers = [given] if whole else list(given.values()) if isinstance(given, Mapping) else list(given)
        tensors = [
            part for layer in layers for part in (layer if isinstance(layer, (list, tuple)) else (layer,))
        ]
        if len(tensors) == len(self._seen) and all(map(is_, tensors, self._seen)):
            return
        self._mark, self._seen = None, []  # addresses do not tell one cache from another on this device
        if not whole:
            kwargs["kvcaches"] = [_layer(at, layer, self.use_mla) for at, layer in enumerate(layers)]
        super().initialize_kvcaches_ptr(**kwargs)
        self._seen = tensors

    def batched_to_gpu(
        self,
        memory_objs: Sequence[Any] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().batched_to_gpu(memory_objs, starts, ends, **_on_host(kwargs))

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        super().batched_from_gpu(memory_objs, starts, ends, **_on_host(kwargs))


VLLMPagedMemHPUConnector = VLLMPagedMemHPUConnectorV2
"""Its older name."""

CLASSES: dict[tuple[EngineType, str], type[Any]] = {(EngineType.VLLM, "whole"): VLLMPagedMemHPUConnectorV2}
"""By engine, and what the configuration asks for."""


def _layer(at: int, layer: Any, mla: bool) -> Any:
    if not isinstance(layer, (list, tuple)):
        return layer
    parts = 1 if mla else 2
    if len(layer) < parts or any((part is None) == (place < parts) for place, part in enumerate(layer)):
        found = sum(part is not None for part in layer)
        raise LayoutError(
            f"kvcaches: layer {at} has {found} tensors in {len(layer)} places: expected"
            f" {'a latent' if mla else 'K and V'}, and empty places behind; keep the cache in a type without scales"
        )
    # Slots of all blocks as one axis are one block of as many slots: a slot has the same number in both.
    fused = 2 if mla else 3
    planes = tuple(part.unsqueeze(0) if part.dim() == fused else part for part in layer[:parts])
    return planes[0] if mla else planes


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Slots on the device would be sliced there: a graph for every start and end."""
    slots = kwargs.get("slot_mapping")
    if hasattr(slots, "device") and slots.device.type != "cpu":
        return {**kwargs, "slot_mapping": slots.cpu()}
    return kwargs
