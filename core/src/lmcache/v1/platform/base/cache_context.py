"""The server's view on one worker's KV cache: mapped tensors, a stream, staging buffers.

Terms. A *kernel group* is the layers that share a geometry, so that one call of a device op serves them. An
*object group* is the kernel groups that are stored together. Indices count in the order of
``kv_layer_groups_manager.kernel_groups`` and ``.object_groups``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["BaseCacheContext"]


class BaseCacheContext(ABC):
    """Contract for a device's cache context; ``DeviceSpec.create_cache_context`` builds it.

    Only lmcache-driven mode needs one. A constructor that fails gives back what it had mapped.
    ``lmcache.v1.platform.torch_cache_context`` has all of it for devices that torch can allocate on.

    Args:
        kv_caches: the worker's KV tensors, normalised, in the order of its layers.
        device: the torch device that they lie on.
        num_layers: layers whose KV is cached.
        kv_layer_groups_manager: a ``KVLayerGroupsManager`` over ``kv_caches``.
        block_ids_buffer: a 1-D int64 tensor on the device, for :meth:`stage_block_ids`.
        lmcache_tokens_per_chunk: tokens of one stored chunk.
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
        self.kv_caches_ = kv_caches
        self.device_ = device
        self.num_layers_ = num_layers
        self.kv_layer_groups_manager_ = kv_layer_groups_manager
        self.block_ids_buffer_ = block_ids_buffer
        self.lmcache_tokens_per_chunk = lmcache_tokens_per_chunk
        self._imported_events: dict[int, Any] = {}

    # --- what a device has ---------------------------------------------------------------------------------

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
        """The group's data pointers in the documented order, a 1-D int64 tensor on the device."""

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

    # --- geometry ------------------------------------------------------------------------------------------

    @property
    def device(self) -> Any:
        """Where the KV tensors lie."""
        return self.device_

    @property
    def kv_tensors(self) -> Sequence[Any]:
        """The worker's KV tensors in the order of its layers."""
        return self.kv_caches_

    @property
    def num_layers(self) -> int:
        """Layers whose KV is cached."""
        return self.num_layers_

    @property
    def kv_layer_groups_manager(self) -> Any:
        """Which layers share a layout, and how groups are laid out in an object."""
        return self.kv_layer_groups_manager_

    @property
    def num_blocks(self) -> int:
        """Blocks of the first kernel group."""
        return int(self._group(0).shape_desc.nb)

    @property
    def hidden_dim_sizes(self) -> list[int]:
        """Heads times head size, per kernel group."""
        return [int(group.hidden_dim_size) for group in self._groups]

    @property
    def engine_kv_formats(self) -> list[int]:
        """The layout's id, per kernel group."""
        return [self.get_engine_kv_format(index) for index in range(len(self._groups))]

    @property
    def engine_kv_format_per_layer(self) -> list[int | None]:
        """The layout's id, per layer; None for a layer that is in no group."""
        formats: list[int | None] = [None] * self.num_layers_
        for group in self._groups:
            for layer in group.layer_indices:
                formats[layer] = group.engine_kv_format
        return formats

    def get_shape_desc(self, kernel_group_idx: int) -> Any:
        """The ``PageBufferShapeDesc`` of a kernel group."""
        return self._group(kernel_group_idx).shape_desc

    def get_engine_kv_format(self, kernel_group_idx: int) -> int:
        """The layout's id of a kernel group.

        Raises:
            ValueError: it is not known.
        """
        found = self._group(kernel_group_idx).engine_kv_format
        if found is None:
            raise ValueError(f"kernel group {kernel_group_idx}: its KV format is not known")
        return int(found)

    def calculate_num_blocks(self, num_tokens: int, kernel_group_idx: int) -> int:
        """Blocks that ``num_tokens`` take in a kernel group."""
        return int(self.kv_layer_groups_manager_.calculate_num_blocks(kernel_group_idx, num_tokens))

    def get_slots_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """Slots of a chunk that a kernel group stores: fewer than the chunk's where its window is shorter."""
        return int(self.kv_layer_groups_manager_.get_slots_per_chunk_in_sw(kernel_group_idx))

    def get_kv_buffer_shape(self, num_tokens: int, kernel_group_idx: int) -> Any:
        """Shape ``[kv, layers, slots, hidden]`` of a kernel group's part of ``num_tokens``."""
        return self.get_kernel_group_shape_dtype(num_tokens, kernel_group_idx)[0]

    def get_kernel_group_kv_pointer_list(self, kernel_group_idx: int) -> list[int]:
        """The group's data pointers as integers; waits for the device where they lie there."""
        return [int(pointer) for pointer in self.get_kernel_group_kv_pointers(kernel_group_idx).tolist()]

    def concrete_engine_kv_shape(self, kernel_group_idx: int) -> tuple[int, ...]:
        """Shape of one layer's tensor of a kernel group, as the engine laid it out."""
        return tuple(self.kv_caches_[self._group(kernel_group_idx).layer_indices[0]].shape)

    # --- transfers -----------------------------------------------------------------------------------------

    def stage_block_ids(self, block_ids: Sequence[int]) -> Any:
        """Block ids on the device, a view of one buffer; queued on the current stream, so that what was queued
        before still reads its own. The host does not wait.

        Raises:
            ValueError: more ids than the buffer holds.
        """
        import torch

        capacity = self.block_ids_buffer_.numel()
        if len(block_ids) > capacity:
            raise ValueError(f"{len(block_ids)} block ids: expected at most {capacity} in one transfer")
        staged = self.block_ids_buffer_[: len(block_ids)]
        # A tensor of its own: torch keeps it until the copy is done, or has staged it by then.
        staged.copy_(torch.tensor(block_ids, dtype=torch.int64), non_blocking=True)
        return staged

    def hold_imported_event(self, event: Any) -> int:
        """Keep an imported event alive until :meth:`release_imported_event` is given the returned number."""
        key = id(event)
        self._imported_events[key] = event
        return key

    def release_imported_event(self, key: int) -> None:
        """Let go of an imported event. Harmless if that was done."""
        self._imported_events.pop(key, None)

    def report_status(self) -> dict[str, Any]:
        """What an operator may want to see."""
        return {
            "device": str(self.device_),
            "layers": self.num_layers_,
            "kernel_groups": [
                {
                    "layers": list(group.layer_indices),
                    "format": group.engine_kv_format,
                    "shape": list(self.concrete_engine_kv_shape(index)),
                    "dtype": str(group.dtype),
                }
                for index, group in enumerate(self._groups)
            ],
            "bytes_per_token": self.cache_size_per_token(),
        }

    @property
    def _groups(self) -> Sequence[Any]:
        groups: Sequence[Any] = self.kv_layer_groups_manager_.kernel_groups
        return groups

    def _group(self, index: int) -> Any:
        return self._groups[index]
