"""The torch baseline: every op it has, on any device that torch can copy to and from.

Symbol names and signatures are those of ``DeviceOps``. A backend may call these directly where its native
op does not serve a case.
"""

from __future__ import annotations

from lmcache.v1.platform.torch_ops.block_transfer import multi_layer_block_kv_transfer
from lmcache.v1.platform.torch_ops.cachegen import (
    calculate_cdf,
    decode_fast_new,
    decode_fast_prefsum,
    encode_fast_new,
)
from lmcache.v1.platform.torch_ops.completions import (
    drain_recorded_completions,
    drain_recorded_events,
    record_completion_on_stream,
    record_event_on_stream,
)
from lmcache.v1.platform.torch_ops.device_info import get_gpu_pci_bus_id
from lmcache.v1.platform.torch_ops.legacy_flash import load_and_reshape_flash, reshape_and_cache_back_flash
from lmcache.v1.platform.torch_ops.memcpy import batched_memcpy, lmcache_memcpy_async
from lmcache.v1.platform.torch_ops.memory import (
    alloc_hugepage_pinned_numa_ptr,
    alloc_hugepage_pinned_ptr,
    alloc_numa_ptr,
    alloc_pinned_numa_ptr,
    alloc_pinned_ptr,
    alloc_shm_pinned_ptr,
    free_hugepage_pinned_numa_ptr,
    free_hugepage_pinned_ptr,
    free_numa_ptr,
    free_pinned_numa_ptr,
    free_pinned_ptr,
    free_shm_pinned_ptr,
)
from lmcache.v1.platform.torch_ops.pointers import tensor_from_ptr
from lmcache.v1.platform.torch_ops.rope import rotary_embedding_k_fused, rotary_embedding_k_fused_strided
from lmcache.v1.platform.torch_ops.slot_transfer import (
    multi_layer_kv_transfer,
    multi_layer_kv_transfer_unilateral,
    single_layer_kv_transfer,
    single_layer_kv_transfer_sgl,
)

__all__ = [
    "alloc_hugepage_pinned_numa_ptr",
    "alloc_hugepage_pinned_ptr",
    "alloc_numa_ptr",
    "alloc_pinned_numa_ptr",
    "alloc_pinned_ptr",
    "alloc_shm_pinned_ptr",
    "batched_memcpy",
    "calculate_cdf",
    "decode_fast_new",
    "decode_fast_prefsum",
    "drain_recorded_completions",
    "drain_recorded_events",
    "encode_fast_new",
    "free_hugepage_pinned_numa_ptr",
    "free_hugepage_pinned_ptr",
    "free_numa_ptr",
    "free_pinned_numa_ptr",
    "free_pinned_ptr",
    "free_shm_pinned_ptr",
    "get_gpu_pci_bus_id",
    "lmcache_memcpy_async",
    "load_and_reshape_flash",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "record_completion_on_stream",
    "record_event_on_stream",
    "reshape_and_cache_back_flash",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
    "tensor_from_ptr",
]
