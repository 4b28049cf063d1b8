"""A complete cache context for any device that torch can allocate on; a backend adds its stream.

It maps what a worker exported, finds out how it is laid out, and keeps staging buffers for a few chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lmcache.utils import EngineType
from lmcache.v1.kv_layer_groups import EngineGroupInfo, KVLayerGroupsManager, engine_group_layer_indices
from lmcache.v1.kv_layout import LayoutHints, get_group_data_ptrs, normalize_and_discover_per_layer_formats
from lmcache.v1.platform.base.cache_context import BaseCacheContext

if TYPE_CHECKING:
    import torch

__all__ = ["TorchCacheContext"]

_MAX_BLOCK_IDS = 1_000_000
_BATCH_SIZE = 4
_ALIGN = 16
"""Staging of each kernel group begins at a multiple of this, so that it can be viewed as any dtype."""


class TorchCacheContext(BaseCacheContext):
    """See :class:`BaseCacheContext`. A subclass gives :attr:`stream` and :attr:`cupy_stream`.

    Args:
        kv_caches: one IPC wrapper per layer (or, where layers share a tensor, per tensor).
        lmcache_tokens_per_chunk: tokens of one stored chunk.
        layout_hints: what the engine declares of its layout.
        engine_group_infos: the engine's KV groups; none: one group of all layers.
        engine_type: whose cache it is.
        separate_object_groups: one object group per sliding window instead of one for all.
        full_sw_kv: store windows in full.

    Raises:
        ValueError: no wrappers, wrappers of several devices, or a layout that is not told.
    """

    def __init__(
        self,
        kv_caches: Sequence[Any],
        lmcache_tokens_per_chunk: int = 256,
        layout_hints: LayoutHints | None = None,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        engine_type: EngineType = EngineType.VLLM,
        separate_object_groups: bool = True,
        full_sw_kv: bool = False,
    ) -> None:
        if not kv_caches:
            raise ValueError(f"{type(self).__name__}: expected one or more KV cache wrappers, got none")
        self._wrappers = list(kv_caches)
        with ExitStack() as undo:
            for wrapper in self._wrappers:
                undo.callback(_close, wrapper)
            self._map(
                lmcache_tokens_per_chunk,
                layout_hints,
                engine_group_infos,
                engine_type,
                separate_object_groups,
                full_sw_kv,
            )
            undo.pop_all()
        self._closed = False

    def _map(
        self,
        chunk: int,
        hints: LayoutHints | None,
        infos: Sequence[EngineGroupInfo],
        engine_type: EngineType,
        separate: bool,
        full_sw_kv: bool,
    ) -> None:
        import torch

        tensors = [unwrap(wrapper) for wrapper in self._wrappers]
        device = _one_device(tensors)
        normalized, formats = normalize_and_discover_per_layer_formats(
            tensors, engine_group_layer_indices(infos), engine_type, hints
        )
        manager = KVLayerGroupsManager(
            normalized,
            engine_kv_formats=formats,
            engine_group_infos=infos,
            lmcache_tokens_per_chunk=chunk,
            separate_object_groups=separate,
        )
        if full_sw_kv:
            manager.enable_full_sw_kv()  # before anything is sized
        super().__init__(
            kv_caches=normalized,
            device=device,
            num_layers=len(formats),
            kv_layer_groups_manager=manager,
            block_ids_buffer=torch.empty(_MAX_BLOCK_IDS, dtype=torch.int64, device=device),
            lmcache_tokens_per_chunk=chunk,
        )
        self._pointers = [
            torch.tensor(
                get_group_data_ptrs(normalized, self.get_engine_kv_format(index), group.layer_indices),
                dtype=torch.int64,
            ).to(device)
            for index, group in enumerate(manager.kernel_groups)
        ]
        self._lay_out_staging()

    def _lay_out_staging(self) -> None:
        """Kernel groups lie in the order of object groups, so that each object group is one run."""
        import torch

        self._offsets: dict[int, tuple[int, int]] = {}
        self._runs: list[tuple[int, int]] = []
        at = 0
        for object_group in self.kv_layer_groups_manager_.object_groups:
            start = at
            for index in object_group.kernel_group_indices:
                slots = self._staged_tokens(index)
                shape, dtype = self.get_kernel_group_shape_dtype(slots, index)
                end = at + shape.numel() * dtype.itemsize
                self._offsets[index] = (at, end)
                at = -(-end // _ALIGN) * _ALIGN
            self._runs.append(
                (start, max((self._offsets[i][1] for i in object_group.kernel_group_indices), default=start))
            )
        self.tmp_chunk_bytes_ = at
        self._staging: torch.Tensor = torch.empty(at * _BATCH_SIZE, dtype=torch.uint8, device=self.device_)

    def _staged_tokens(self, kernel_group_idx: int) -> int:
        """Tokens of a chunk that a kernel group stores."""
        group = self._group(kernel_group_idx)
        ratio = group.tokens_per_block // group.slots_per_block
        return int(self.get_slots_per_chunk_in_sw(kernel_group_idx) * ratio)

    # --- contract ------------------------------------------------------------------------------------------

    @property
    def max_batch_size(self) -> int:
        """Objects that the staging buffers hold at once."""
        return _BATCH_SIZE

    def close(self) -> None:
        """Wait for the stream, then unmap. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        try:
            self.stream.synchronize()
        finally:
            self.kv_caches_, self._pointers = [], []
            self._staging = self.block_ids_buffer_ = self._staging[:0].clone()
            for wrapper in self._wrappers:
                _close(wrapper)

    def get_kernel_group_kv_pointers(self, kernel_group_idx: int) -> torch.Tensor:
        """The group's data pointers in the documented order, int64 on the device."""
        return self._pointers[kernel_group_idx]

    def get_kernel_group_shape_dtype(
        self, num_tokens: int, kernel_group_idx: int
    ) -> tuple[torch.Size, torch.dtype]:
        """``[kv, layers, slots, hidden]`` and dtype of one group's part of an object of ``num_tokens``.

        Raises:
            ValueError: the tokens are not whole slots.
        """
        import torch

        group = self._group(kernel_group_idx)
        ratio = group.tokens_per_block // group.slots_per_block
        if num_tokens % ratio:
            raise ValueError(
                f"{num_tokens} tokens: expected a multiple of {ratio}, the tokens per slot of kernel group"
                f" {kernel_group_idx}"
            )
        desc = group.shape_desc
        shape = (desc.kv_size, group.num_layers, num_tokens // ratio, group.hidden_dim_size)
        return torch.Size(shape), group.dtype

    def get_temp_kernel_group_buffer(self, batch_idx: int, kernel_group_idx: int) -> torch.Tensor:
        """Staging of one group in one batch slot, ``[kv, layers, slots, hidden]``.

        Raises:
            ValueError: no such batch slot.
        """
        start, end = self._offsets[kernel_group_idx]
        shape, dtype = self.get_kernel_group_shape_dtype(
            self._staged_tokens(kernel_group_idx), kernel_group_idx
        )
        return self._slot(batch_idx)[start:end].view(dtype).view(shape)

    def get_temp_object_group_buffer(self, batch_idx: int, object_group_idx: int) -> torch.Tensor:
        """Staging of one object group in one batch slot: flat bytes, kernel groups one after the other.

        Raises:
            ValueError: no such batch slot.
        """
        start, end = self._runs[object_group_idx]
        return self._slot(batch_idx)[start:end]

    def get_kernel_group_offset_in_object(self, kernel_group_idx: int) -> int:
        """Bytes from the beginning of the object that a kernel group is part of to the group's own."""
        for object_group, (start, _) in zip(
            self.kv_layer_groups_manager_.object_groups, self._runs, strict=True
        ):
            if kernel_group_idx in object_group.kernel_group_indices:
                return self._offsets[kernel_group_idx][0] - start
        raise ValueError(f"kernel group {kernel_group_idx}: it is in no object group")

    def cache_size_per_token(self) -> int:
        """Bytes of KV per token over all layers."""
        total = 0
        for index, group in enumerate(self._groups):
            ratio = group.tokens_per_block // group.slots_per_block
            shape, dtype = self.get_kernel_group_shape_dtype(ratio, index)
            total += shape.numel() * dtype.itemsize // ratio
        return total

    def _slot(self, batch_idx: int) -> torch.Tensor:
        if not 0 <= batch_idx < _BATCH_SIZE:
            raise ValueError(f"batch slot {batch_idx}: expected 0 to {_BATCH_SIZE - 1}")
        return self._staging[batch_idx * self.tmp_chunk_bytes_ : (batch_idx + 1) * self.tmp_chunk_bytes_]


def unwrap(wrapper: Any) -> Any:
    """The tensor (or tensors of one layer) of a wrapper; a tensor is itself."""
    return wrapper.to_tensor() if hasattr(wrapper, "to_tensor") else wrapper


def tensors_of(layer: Any) -> list[Any]:
    """A layer's tensors: one, or its planes."""
    return (
        [tensor for part in layer for tensor in tensors_of(part)]
        if isinstance(layer, list | tuple)
        else [layer]
    )


def _one_device(layers: Sequence[Any]) -> Any:
    devices = {tensor.device for layer in layers for tensor in tensors_of(layer)}
    if len(devices) != 1:
        raise ValueError(f"KV caches on {sorted(map(str, devices))}: expected all to share one device")
    return devices.pop()


def _close(wrapper: Any) -> None:
    close = getattr(wrapper, "close", None)
    if callable(close):
        close()
