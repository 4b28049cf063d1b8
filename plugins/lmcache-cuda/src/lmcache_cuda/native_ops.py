"""What ``bind_native`` takes: the ops that the native module serves, and what each is given and serves."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from lmcache.v1.kv_layout import kv_format
from lmcache_cuda import runtime
from lmcache_cuda.codec import (
    calculate_cdf,
    decode_fast_new,
    decode_fast_prefsum,
    encode_fast_new,
    rotary_embedding_k_fused,
    rotary_embedding_k_fused_strided,
)
from lmcache_cuda.copies import get_gpu_pci_bus_id, lmcache_memcpy_async, tensor_from_ptr
from lmcache_cuda.transfers import (
    multi_layer_block_kv_transfer,
    multi_layer_kv_transfer,
    multi_layer_kv_transfer_unilateral,
    single_layer_kv_transfer,
    single_layer_kv_transfer_sgl,
    unilateral_formats,
)

__all__ = [
    "LMCACHE_NATIVE_ABI",
    "LMCACHE_OP_FORMATS",
    "LMCACHE_OP_OPERANDS",
    "batch_memcpy_supported",
    "calculate_cdf",
    "decode_fast_new",
    "decode_fast_prefsum",
    "direct_copy_format_supported",
    "drain_recorded_completions",
    "drain_recorded_events",
    "encode_fast_new",
    "execute_direct_copy_transfer",
    "execute_object_group_transfer",
    "get_gpu_pci_bus_id",
    "lmcache_memcpy_async",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "pop_completed_phase_timings",
    "record_completion_on_stream",
    "record_event_on_stream",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
    "tensor_from_ptr",
]

_NATIVE = runtime.native()

LMCACHE_NATIVE_ABI = _NATIVE.LMCACHE_NATIVE_ABI
LMCACHE_OP_FORMATS = {
    "multi_layer_block_kv_transfer": _NATIVE.BLOCK_FORMATS,
    "multi_layer_kv_transfer": _NATIVE.SLOT_FORMATS,
    "multi_layer_kv_transfer_unilateral": unilateral_formats(),
    "single_layer_kv_transfer": tuple(i for i in _NATIVE.SLOT_FORMATS if not kv_format(i).is_cross_layer),
    "execute_object_group_transfer": tuple(
        i for i in _NATIVE.BLOCK_FORMATS if "NP" not in kv_format(i).dims.levels
    ),
    "execute_direct_copy_transfer": _NATIVE.DIRECT_FORMATS,
}
_EITHER, _TENSORS, _POINTERS = ("tensors", "pointers"), ("tensors",), ("pointers",)
LMCACHE_OP_OPERANDS = {
    "multi_layer_block_kv_transfer": _EITHER,
    "multi_layer_kv_transfer": _EITHER,
    "multi_layer_kv_transfer_unilateral": _EITHER,
    "single_layer_kv_transfer": _TENSORS,
    "single_layer_kv_transfer_sgl": _TENSORS,
    "lmcache_memcpy_async": _EITHER,
    "tensor_from_ptr": _POINTERS,
    "execute_object_group_transfer": _POINTERS,
    "execute_direct_copy_transfer": _POINTERS,
    **dict.fromkeys(
        (
            "calculate_cdf", "encode_fast_new", "decode_fast_new", "decode_fast_prefsum", "rotary_embedding_k_fused",
            "rotary_embedding_k_fused_strided",
        ),
        _TENSORS,
    ),
    **dict.fromkeys(
        (
            "record_completion_on_stream", "drain_recorded_completions", "record_event_on_stream",
            "drain_recorded_events", "get_gpu_pci_bus_id", "batch_memcpy_supported", "direct_copy_format_supported",
            "pop_completed_phase_timings",
        ),
        (),
    ),
}  # fmt: skip


# --- plans -------------------------------------------------------------------------------------------------


def execute_object_group_transfer(
    direction: int,
    device: Any,
    host_alignment: int,
    groups: Sequence[Any],
    steps: Sequence[Any],
    phase_timing_enabled: bool = False,
    session_id: str = "",
) -> None:
    ordinal, stream = runtime.current_stream(device)
    _NATIVE.execute_object_group_transfer(
        int(direction), ordinal, stream, host_alignment, groups, steps, phase_timing_enabled, session_id
    )


def execute_direct_copy_transfer(
    direction: int, device: Any, host_alignment: int, groups: Sequence[Any], objects: Sequence[Any]
) -> None:
    ordinal, stream = runtime.current_stream(device)
    _NATIVE.execute_direct_copy_transfer(int(direction), ordinal, stream, host_alignment, groups, objects)


def pop_completed_phase_timings() -> list[Any]:
    return list(_NATIVE.pop_completed_phase_timings())


def batch_memcpy_supported() -> bool:
    return bool(_NATIVE.batch_memcpy_native())


def direct_copy_format_supported(fmt: int) -> bool:
    return bool(_NATIVE.direct_copy_format_supported(int(fmt)))


# --- completions -------------------------------------------------------------------------------------------
# The handle of the default stream is 0 on every device, so the current device goes with it.


def record_completion_on_stream(stream_ptr: int, kind: str, payload: bytes) -> None:
    _NATIVE.record_completion_on_stream(operator.index(stream_ptr), kind, payload, runtime.current_ordinal())


def drain_recorded_completions() -> list[tuple[str, bytes]]:
    return list(_NATIVE.drain_recorded_completions())


def record_event_on_stream(
    stream_ptr: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]
) -> None:
    _NATIVE.record_event_on_stream(
        operator.index(stream_ptr), type, session, texts, numbers, runtime.current_ordinal()
    )


def drain_recorded_events() -> list[tuple[str, str, float, dict[str, str], dict[str, int]]]:
    return list(_NATIVE.drain_recorded_events())
