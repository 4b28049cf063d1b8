"""What an in-process engine asks of a connector: move tokens between its paged KV and memory objects."""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from lmcache.v1.memory.objects import MemoryObj

__all__ = ["GPUConnectorInterface", "LayerSteps"]

#: Drives one layerwise transfer, see docs/connectors.md. What is sent is the layer's objects, one per chunk.
LayerSteps = Generator[None, "Sequence[MemoryObj] | None", None]


class GPUConnectorInterface(metaclass=abc.ABCMeta):
    """Connectors of the core and of device wheels.

    Keyword arguments that all of them know:

    * ``kvcaches``: the engine's tensors, nested as it holds them. Needed once; another cache later is noticed.
    * ``slot_mapping``: integers ``[n]``, the slot of each token of the whole sequence, sliced ``[start:end]``. A
      negative one is padding: neither the page nor the object's row is touched. On the host it is checked.
    * ``vllm_cached_tokens``: tokens at the sequence's beginning whose pages a load must leave alone.
    """

    #: Whether ``batched_from_gpu`` and ``batched_to_gpu`` are generators that go layer by layer.
    is_layerwise: ClassVar[bool] = False

    kvcaches: Any = None

    @abc.abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load tokens ``[start, end)`` of a sequence into the engine's pages."""

    @abc.abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store tokens ``[start, end)`` of a sequence in an object."""

    @abc.abstractmethod
    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> Any:
        """Store several chunks: objects in the order of ``starts`` and ``ends``; by layer if layerwise."""

    @abc.abstractmethod
    def batched_to_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """Load several chunks: ``(memory_objs, starts, ends)``; ``(starts, ends)`` if layerwise."""

    @abc.abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of the object that holds ``num_tokens`` tokens; of one layer of it if layerwise."""

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Take note of ``kvcaches``, if given."""
        if "kvcaches" in kwargs:
            self.kvcaches = kwargs["kvcaches"]
