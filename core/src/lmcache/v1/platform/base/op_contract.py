"""The device operations as a table: names, how they are called, and which keep the order of a stream.

Callers pass arguments by position. A backend's function may take more, as long as what is listed here can be
passed. An op that is not on the torch baseline is optional: callers probe for it with ``hasattr``. Meaning,
shapes and errors are in the docstrings of ``DeviceOps``, those of optional ops in docs/vendors/contract.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

__all__ = [
    "BASE_OPS",
    "CONTRACT_OPS",
    "CONTRACT_TYPES",
    "FORMAT_OPS",
    "NATIVE_ABI",
    "NATIVE_ABI_NAME",
    "NATIVE_FORMATS_NAME",
    "NATIVE_ONLY_OPS",
    "NATIVE_OPERANDS_NAME",
    "OPERAND_KINDS",
    "OPS",
    "PARTNERS",
    "STREAM_ORDERED_OPS",
    "OpShape",
    "OperandKind",
    "is_stream_ordered",
    "serves",
    "signature_fault",
    "stream_ordered",
    "takes",
]

#: How integers, buffers and structures cross into native code. It changes only if a compiled kernel that
#: follows the old convention would read something else than was meant.
NATIVE_ABI = 1

#: The integer by which a native module says which convention it was compiled for.
NATIVE_ABI_NAME = "LMCACHE_NATIVE_ABI"

#: The mapping by which a native module says which formats its ops serve: ``{op: (id, ...)}``.
NATIVE_FORMATS_NAME = "LMCACHE_OP_FORMATS"

#: The mapping by which a native module says what its ops are given: ``{op: ("pointers", "tensors")}``.
NATIVE_OPERANDS_NAME = "LMCACHE_OP_OPERANDS"

#: What an op is given to work on: tensors, or addresses as integers.
OperandKind: TypeAlias = "Literal['tensors', 'pointers']"

OPERAND_KINDS = ("tensors", "pointers")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class OpShape:
    """One op: parameters that callers always pass, those they may leave out, and whether it keeps order."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ordered: bool = False
    """Queued on the stream: it begins after the work before it, and the call need not wait for its end."""


# "NAME: required ... [optional ...]", those that keep the order of a stream first.
_ORDERED = """
multi_layer_block_kv_transfer: paged objects block_ids device direction shape_desc chunk_size engine_kv_format
    [skip_prefix_n_blocks]
multi_layer_kv_transfer: kv ptrs slot_mapping device page_buffer_size direction format
    [block_size head_size skip_prefix_n_tokens block_stride_elems]
multi_layer_kv_transfer_unilateral: kv ptrs slots device page_buffer_size direction format
single_layer_kv_transfer: lmc paged slots direction format [token_major]
single_layer_kv_transfer_sgl: lmc k v slots direction [token_major]
load_and_reshape_flash: kv kcache vcache slots layer
reshape_and_cache_back_flash: kv kcache vcache slots layer
lmcache_memcpy_async: dest src nbytes direction host_buffer_offset host_buffer_alignments
record_completion_on_stream: stream_ptr kind payload
record_event_on_stream: stream_ptr type session texts numbers
rotary_embedding_k_fused: old_pos new_pos key head_size cos_sin_cache is_neox
rotary_embedding_k_fused_strided: old_pos new_pos key head_size head_stride cos_sin_cache is_neox
execute_object_group_transfer: direction device host_alignment groups steps
    [phase_timing_enabled session_id]
execute_direct_copy_transfer: direction device host_alignment groups objects
execute_cb_retrieve_plan_flat: device host_alignment groups staging ropes scatters step_offsets
"""

_UNORDERED = """
drain_recorded_completions:
drain_recorded_events:
batched_memcpy: src dst sizes
tensor_from_ptr: ptr shape dtype device
get_gpu_pci_bus_id: [device_id]
calculate_cdf: symbols num_bins
encode_fast_new: cdf symbols out lengths
decode_fast_new: cdf data lengths out
decode_fast_prefsum: cdf data prefix_sums out
batch_memcpy_supported:
direct_copy_format_supported: fmt
pop_completed_phase_timings:
alloc_pinned_ptr: size [device_id]
free_pinned_ptr: ptr
alloc_pinned_numa_ptr: size [numa_id]
free_pinned_numa_ptr: ptr [size]
alloc_hugepage_pinned_ptr: size [device_id]
free_hugepage_pinned_ptr: ptr [size]
alloc_hugepage_pinned_numa_ptr: size [numa_id]
free_hugepage_pinned_numa_ptr: ptr [size]
alloc_numa_ptr: size [numa_id]
free_numa_ptr: ptr [size]
alloc_shm_pinned_ptr: size name
free_shm_pinned_ptr: ptr size name
"""


def _parse(table: str, ordered: bool) -> dict[str, OpShape]:
    ops = {}
    for line in table.replace("\n    ", " ").strip().splitlines():
        name, _, arguments = line.partition(":")
        required, _, optional = arguments.rstrip("]").partition("[")
        ops[name] = OpShape(tuple(required.split()), tuple(optional.split()), ordered)
    return ops


OPS: dict[str, OpShape] = {**_parse(_ORDERED, ordered=True), **_parse(_UNORDERED, ordered=False)}

#: Names a native module may bind as ops.
CONTRACT_OPS = frozenset(OPS)

#: Ops of which callers rely on stream order. Only a backend, or a baseline marked so, may serve them.
STREAM_ORDERED_OPS = frozenset(name for name, shape in OPS.items() if shape.ordered)

#: Ops for which there is no baseline: a backend has them or not, and callers probe with ``hasattr``.
NATIVE_ONLY_OPS = frozenset(
    [
        "execute_object_group_transfer",
        "execute_direct_copy_transfer",
        "execute_cb_retrieve_plan_flat",
        "batch_memcpy_supported",
        "direct_copy_format_supported",
        "pop_completed_phase_timings",
    ]
)

#: The ops that ``DeviceOps`` has as methods.
BASE_OPS = CONTRACT_OPS - NATIVE_ONLY_OPS

#: Ops to which a caller names a KV format, as an argument or within the groups of a plan.
FORMAT_OPS = frozenset(
    name for name, shape in OPS.items() if {"engine_kv_format", "format", "groups"} & {*shape.required}
)

#: Ops that work through one memory: what one of them writes, only its partner of the same origin reads.
PARTNERS = {
    "record_completion_on_stream": "drain_recorded_completions",
    "drain_recorded_completions": "record_completion_on_stream",
    "record_event_on_stream": "drain_recorded_events",
    "drain_recorded_events": "record_event_on_stream",
}

#: Names a native module may bind as types.
CONTRACT_TYPES = frozenset(
    [
        "TransferDirection",
        "EngineKVFormat",
        "GPUKVFormat",
        "PageBufferShapeDesc",
        "StagingCopy",
        "LaunchVar",
        "BatchStep",
        "KernelGroupSpec",
        "DirectCopyGroupSpec",
        "DirectCopyObject",
        "CBGroupSpec",
        "TransferPhase",
    ]
)


def stream_ordered(function: F) -> F:
    """Mark a baseline op as one that keeps the order of the current stream on every device."""
    function.stream_ordered = True  # type: ignore[attr-defined]
    return function


def serves(rule: Callable[[Any], str]) -> Callable[[F], F]:
    """Mark an op with the KV formats that it serves.

    Args:
        rule: Gets a row of the layout table; says why the op does not serve it, or nothing if it does.
    """

    def mark(function: F) -> F:
        function.serves = rule  # type: ignore[attr-defined]
        return function

    return mark


def takes(*kinds: OperandKind) -> Callable[[F], F]:
    """Mark an op with the kinds of operands that it takes; with nothing if it has no operands in memory."""

    def mark(function: F) -> F:
        function.takes = frozenset(kinds)  # type: ignore[attr-defined]
        return function

    return mark


def is_stream_ordered(function: Any, default: bool) -> bool:
    """What ``function`` says of itself; ``default`` if it says nothing."""
    return bool(getattr(function, "stream_ordered", default))


def signature_fault(name: str, function: Any) -> str:
    """Why ``function`` cannot be called as the op ``name``; empty if it can, or if that cannot be read."""
    shape = OPS[name]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # native functions often have none
        return ""
    for given in (shape.required, (*shape.required, *shape.optional)):
        try:
            signature.bind(*given)
        except TypeError as exc:
            return f"it takes {signature}, and callers pass ({', '.join(given)}) by position: {exc}"
    return ""
