"""The server's view on one worker's KV cache: mapped tensors, a stream, staging buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["BaseCacheContext"]


class BaseCacheContext(ABC):
    """Contract for a device's cache context; ``DeviceSpec.create_cache_context`` builds it.

    Only lmcache-driven mode needs one. A constructor that fails gives back what it had mapped.
    """

    def __init__(
        self,
        *,
        kv_caches: Sequence[Any],
        device: Any,
        num_layers: int,
        kv_layer_groups_manager: Any,
        block_ids_buffer: Any,
        lmcache_tokens_per_chunk: int,
    ) -> None:
        self._kv_caches = kv_caches
        self._device = device
        self._num_layers = num_layers
        self._kv_layer_groups_manager = kv_layer_groups_manager
        self._block_ids_buffer = block_ids_buffer
        self._lmcache_tokens_per_chunk = lmcache_tokens_per_chunk

    @property
    def device(self) -> Any:
        """Where the KV tensors lie."""
        return self._device

    @property
    def kv_tensors(self) -> Sequence[Any]:
        """The worker's KV tensors in the order of its layers."""
        return self._kv_caches

    @property
    def num_layers(self) -> int:
        """Layers whose KV is cached."""
        return self._num_layers

    @property
    def kv_layer_groups_manager(self) -> Any:
        """Which layers share a layout, and how groups are laid out in an object."""
        return self._kv_layer_groups_manager

    @property
    @abstractmethod
    def stream(self) -> Any:
        """The stream on which this context's transfers are queued."""

    @property
    @abstractmethod
    def cupy_stream(self) -> Any:
        """The same stream, as an object with an integer ``ptr`` and ``launch_host_func``."""

    @property
    @abstractmethod
    def max_batch_size(self) -> int:
        """Objects that the staging buffers hold at once."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the stream, then unmap. May be called more than once."""

    @abstractmethod
    def get_kernel_group_kv_pointers(self, kernel_group_idx: int) -> Any:
        """The group's layer pointers, a 1-D int64 tensor on the device."""

    @abstractmethod
    def get_temp_kernel_group_buffer(self, batch_idx: int, kernel_group_idx: int) -> Any:
        """Staging of one group in one batch slot, ``[kv, layers, slots, hidden]``."""

    @abstractmethod
    def get_temp_object_group_buffer(self, batch_idx: int, object_group_idx: int) -> Any:
        """Staging of one object group in one batch slot: flat bytes, kernel groups one after the other."""

    @abstractmethod
    def get_kernel_group_shape_dtype(self, num_tokens: int, kernel_group_idx: int) -> tuple[Any, Any]:
        """Shape and dtype of one group's part of an object of ``num_tokens``."""

    @abstractmethod
    def cache_size_per_token(self) -> int:
        """Bytes of KV per token over all layers."""
