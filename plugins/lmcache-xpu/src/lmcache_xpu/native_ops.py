"""What ``bind_native`` takes: the ops that the native module serves, and what each is given and serves."""

from __future__ import annotations

from lmcache_xpu import memory, native
from lmcache_xpu.slots import (
    LAYER_FORMATS,
    SLOT_FORMATS,
    UNILATERAL_FORMATS,
    multi_layer_kv_transfer,
    multi_layer_kv_transfer_unilateral,
    single_layer_kv_transfer,
    single_layer_kv_transfer_sgl,
)
from lmcache_xpu.streams import (
    drain_recorded_completions,
    drain_recorded_events,
    lmcache_memcpy_async,
    record_completion_on_stream,
    record_event_on_stream,
)
from lmcache_xpu.transfers import BLOCK_FORMATS, multi_layer_block_kv_transfer

__all__ = [
    "LMCACHE_NATIVE_ABI",
    "LMCACHE_OP_FORMATS",
    "LMCACHE_OP_OPERANDS",
    "drain_recorded_completions",
    "drain_recorded_events",
    "lmcache_memcpy_async",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "record_completion_on_stream",
    "record_event_on_stream",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]

LMCACHE_NATIVE_ABI = native.load().LMCACHE_NATIVE_ABI
LMCACHE_OP_FORMATS = {
    "multi_layer_block_kv_transfer": BLOCK_FORMATS,
    "multi_layer_kv_transfer": SLOT_FORMATS,
    "multi_layer_kv_transfer_unilateral": UNILATERAL_FORMATS,
    "single_layer_kv_transfer": LAYER_FORMATS,
}
_EITHER, _TENSORS = ("tensors", "pointers"), ("tensors",)
LMCACHE_OP_OPERANDS = {
    "multi_layer_block_kv_transfer": _EITHER,
    "multi_layer_kv_transfer": _EITHER,
    "multi_layer_kv_transfer_unilateral": _EITHER,
    "single_layer_kv_transfer": _TENSORS,
    "single_layer_kv_transfer_sgl": _TENSORS,
    "lmcache_memcpy_async": _EITHER,
    **dict.fromkeys(
        (
            "record_completion_on_stream", "drain_recorded_completions", "record_event_on_stream",
            "drain_recorded_events",
        ),
        (),
    ),
}  # fmt: skip

globals().update(memory.ALLOCATORS)
