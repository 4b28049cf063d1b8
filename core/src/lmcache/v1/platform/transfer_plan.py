"""Plans: what the ``execute_*`` ops of a native module are handed, as plain integers.

A plan names its parts by position, so the order of the fields is part of the contract. Addresses are integers;
those said to be on the device are the device's. Sizes and offsets are in bytes unless slots or blocks are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

__all__ = [
    "BatchStep",
    "CBGroupSpec",
    "DirectCopyGroupSpec",
    "DirectCopyObject",
    "KernelGroupSpec",
    "LaunchVar",
    "StagingCopy",
    "TransferPhase",
]


class TransferPhase(IntEnum):
    """Which part of a transfer a timing of ``pop_completed_phase_timings`` is for."""

    KERNEL = 0
    STAGING = 1


@dataclass
class KernelGroupSpec:
    """Layers that one launch serves, and the buffers it may use."""

    paged_buffer_ptrs: int
    """Address on the device of the group's table of pointers to pages, int64 each."""
    lmcache_objects_ptrs: Sequence[int]
    """Address of the staging buffer of each object in a batch."""
    shape_desc: Any
    """``PageBufferShapeDesc`` of the layers."""
    lmcache_chunk_size: int
    """Slots per object."""
    engine_kv_format: int
    """Id of the layout's row."""
    block_ids_base: int
    """Address on the device of the block ids of all launches, int64 each."""
    block_ids_capacity: int
    """How many block ids there are room for at that address."""


@dataclass
class StagingCopy:
    """One copy between host memory and a staging buffer."""

    dest: int
    """Address to write."""
    src: int
    """Address to read."""
    nbytes: int
    """Bytes."""
    host_offset: int
    """Where the host's side begins in the buffer that holds it; see ``lmcache_memcpy_async``."""


@dataclass
class LaunchVar:
    """What differs from one launch of a group to the next."""

    group_idx: int
    """Index into the plan's groups."""
    block_ids_offset: int
    """Where the launch's block ids begin, counted in ids from ``block_ids_base``."""
    total_blocks: int
    """How many they are."""
    num_objects: int
    """Objects that they fill, from the first staging buffer on."""
    skip_prefix_n_blocks: int
    """The first so many ids are neither read nor written."""


@dataclass
class BatchStep:
    """One batch. H2D stages, then launches; D2H launches, then stages."""

    staging: list[StagingCopy] = field(default_factory=list)
    launches: list[LaunchVar] = field(default_factory=list)


@dataclass
class DirectCopyGroupSpec:
    """Layers whose pages are copied to and from objects without staging."""

    paged_layer_ptrs: Sequence[int]
    """Address on the device of each layer's pages, in the row's documented order."""
    shape_desc: Any
    """``PageBufferShapeDesc`` of the layers."""
    fmt: int
    """Id of the layout's row."""
    slots_per_chunk: int
    """Slots of this group in an object."""
    byte_offset_in_object: int
    """Where the group's part of an object begins."""
    block_ids: Sequence[int]
    """Block ids of all objects, one after the other."""


@dataclass
class DirectCopyObject:
    """One object of a direct copy."""

    host_ptr: int
    """Address of the object."""
    host_offset: int
    """Where it begins in the buffer that holds it; see ``lmcache_memcpy_async``."""
    nbytes: int
    """Bytes of it."""
    chunk_idx: int
    """Which stretch of each group's ``block_ids`` is its own."""
    skip_prefix_n_blocks: Sequence[int]
    """Per group: the first so many of its ids are neither read nor written."""


@dataclass
class CBGroupSpec:
    """Layers of a retrieval whose keys are rotated to new positions before they are scattered into pages.

    Twenty-one scalars: where the data is, its geometry, the slots it goes to, and the rotation.
    """

    paged_layer_ptrs: int
    """Address on the device of the group's table of pointers to pages, int64 each."""
    temp_buffer_ptr: int
    """Address of the staging buffer that holds the chunk, ``[kv_size, layers, slots, hidden]``."""
    kv_size: int
    num_layers: int
    num_blocks: int
    block_size: int
    """Slots per block."""
    num_heads: int
    head_size: int
    """Elements per head and slot."""
    element_size: int
    """Bytes per element."""
    block_stride_elems: int
    """Elements between blocks where they are padded; 0 is tight."""
    engine_kv_format: int
    """Id of the layout's row."""
    slots_per_chunk: int
    """Slots of this group in a chunk."""
    slot_mapping_base: int
    """Address on the device of the slots of all tokens, int64 each. May change between executions."""
    slot_mapping_capacity: int
    """How many slots there are room for at that address. May change between executions."""
    cos_sin_cache_ptr: int
    """Address on the device of ``[rope_positions, rotary_size]``; 0 if the group's keys are not rotated."""
    rope_positions: int
    rotary_size: int
    rope_head_size: int
    """Leading elements of a head that are keys."""
    rope_head_stride: int
    """Elements from one head to the next."""
    rope_is_neox: bool
    """See ``rotary_embedding_k_fused``."""
    rope_dtype: int
    """Type of keys and of the cosines and sines: 0 float32, 1 float16, 2 bfloat16."""
