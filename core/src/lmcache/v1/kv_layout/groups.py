"""Layers that go together: what an engine says of its groups, and what follows for transfers and objects.

* An *engine group* shares block ids. The engine declares it (``EngineGroupInfo``).
* A *kernel group* can go through one call of a transfer op: an engine group's layers of one shape, dtype and
  format.
* An *object group* is stored as one object per chunk: its kernel groups one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.ids import EngineKVFormat
from lmcache.v1.kv_layout.shape_desc import PageBufferShapeDesc
from lmcache.v1.kv_layout.structure import block_stride_elems, layer_shape, layer_tensors
from lmcache.v1.kv_layout.table import KVFormat, kv_format

__all__ = [
    "AttnWindowDesc",
    "EngineGroupInfo",
    "KernelGroupInfo",
    "ObjectGroupInfo",
    "engine_group_layer_indices",
    "engine_groups_of_layers",
    "kernel_groups_of",
]


class EngineGroupInfo(msgspec.Struct, frozen=True):
    """Layers of one engine group that are alike, as the engine declares them."""

    engine_group_id: int
    """Which of the engine's lists of block ids these layers use."""
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0
    """Tokens that a block stands for; more than its slots where the cache is compressed. 0: as many."""
    sw_size_tokens: int = -1
    """Attention sees this many tokens back; -1: all of them."""
    extra_object_group_tag: int = 0
    """Layers of one tag above 0 are stored apart from the model's own."""
    recurrent_state: bool = False
    """Blocks hold a state that replaces the one before, not tokens."""


def engine_group_layer_indices(groups: Sequence[EngineGroupInfo]) -> list[list[int]]:
    """The layers of each group."""
    return [list(group.layer_indices) for group in groups]


@dataclass
class KernelGroupInfo:
    """Layers that one call of a transfer op serves."""

    layer_indices: list[int]
    shape_desc: PageBufferShapeDesc
    dtype: Any
    engine_kv_format: EngineKVFormat | None = None
    tokens_per_block: int = 0
    """0: as many as slots."""
    engine_group_idx: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False

    def __post_init__(self) -> None:
        self.tokens_per_block = self.tokens_per_block or self.slots_per_block

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    @property
    def hidden_dim_size(self) -> int:
        """Elements per slot, all heads of one plane."""
        return self.shape_desc.nh * self.shape_desc.hs

    @property
    def slots_per_block(self) -> int:
        return self.shape_desc.bs

    def calculate_slots(self, num_tokens: int) -> int:
        """Slots that hold ``num_tokens`` tokens.

        Raises:
            LayoutError: Not a whole number of slots.
        """
        slots, rest = divmod(num_tokens * self.slots_per_block, self.tokens_per_block)
        if rest or num_tokens < 0:
            raise LayoutError(
                f"{num_tokens} tokens: expected a multiple of the {self.tokens_per_block // self.slots_per_block} "
                f"tokens that a slot stands for in layers {self.layer_indices}"
            )
        return slots


@dataclass(frozen=True)
class ObjectGroupInfo:
    """Kernel groups that are stored together."""

    kernel_group_indices: list[int]
    """In the order in which an object holds them; not always neighbours."""
    sw_size_chunks: int = -1
    """Chunks back from the end that a hit needs; -1: all."""
    aux: bool = False
    recurrent: bool = False

    @property
    def kind(self) -> str:
        return "aux" if self.aux else "recurrent" if self.recurrent else "attention"


@dataclass(frozen=True)
class AttnWindowDesc:
    """What a lookup must find, one entry per object group."""

    num_chunks_in_sw: list[int]
    """Chunks back from the end of a prefix; -1: all of it."""
    world_size: int = 1
    """Ranks that store parts of a chunk; a manager knows its own only."""
    group_kinds: tuple[str, ...] = ()
    """``attention``, ``recurrent`` or ``aux``."""


class _Identity(NamedTuple):
    """What layers of one kernel group have in common."""

    engine_group_idx: int
    engine_kv_format: EngineKVFormat
    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    dtype: Any


def engine_groups_of_layers(infos: Sequence[EngineGroupInfo], num_layers: int) -> dict[int, int]:
    """The engine group of each layer that is in one. Without infos all layers are in group 0.

    Raises:
        LayoutError: A layer that is not there or is named twice, or an info without layers.
    """
    if not infos:
        return dict.fromkeys(range(num_layers), 0)
    found: dict[int, int] = {}
    for info in infos:
        if not info.layer_indices:
            raise LayoutError(f"engine group {info.engine_group_id} names no layer: expected at least one")
        for index in info.layer_indices:
            if not 0 <= index < num_layers:
                raise LayoutError(
                    f"engine group {info.engine_group_id} names layer {index}: expected 0 to {num_layers - 1}"
                )
            if index in found:
                raise LayoutError(
                    f"layer {index} is named twice: expected each in at most one engine group info"
                )
            found[index] = info.engine_group_id
    return dict(sorted(found.items()))


def kernel_groups_of(
    kv_caches: Any, formats: Sequence[EngineKVFormat], engine_groups: Mapping[int, int]
) -> list[KernelGroupInfo]:
    """Group layers by what an op must know of them, in order of their first layers.

    Args:
        kv_caches: All layers, normalised.
        formats: The row of each layer.
        engine_groups: Engine group of each layer that takes part, in order of layers; see
            :func:`engine_groups_of_layers`.

    Raises:
        LayoutError: Tensors do not fit their format, blocks of a group's layers differ in number or stride, or
            some layers of one cross-layer tensor would be apart from others.
    """
    members: dict[_Identity, list[int]] = {}
    descs: dict[_Identity, PageBufferShapeDesc] = {}
    for index, tensors in _tensors_of(kv_caches, formats, engine_groups):
        desc = _shape_desc(kv_format(formats[index]), tensors)
        identity = _Identity(
            engine_groups[index], formats[index], desc.kv_size, desc.nh, desc.hs, desc.bs, tensors[0].dtype
        )
        first = descs.setdefault(identity, desc)
        if desc != first:
            raise LayoutError(
                f"layers {members[identity][0]} and {index} are alike but for their blocks: {first.nb} and "
                f"{desc.nb} of them, {first.block_stride_elems} and {desc.block_stride_elems} elements apart: "
                "expected equal numbers, or different engine groups"
            )
        members.setdefault(identity, []).append(index)
    if len(members) > 1 and any(kv_format(fmt).is_cross_layer for fmt in formats):
        raise LayoutError("the layers of a cross-layer tensor were put into several groups: expected one")
    for identity, layers in members.items():
        descs[identity].nl = len(layers)
    return [
        KernelGroupInfo(
            layer_indices=layers,
            shape_desc=descs[identity],
            dtype=identity.dtype,
            engine_kv_format=identity.engine_kv_format,
            engine_group_idx=identity.engine_group_idx,
        )
        for identity, layers in members.items()
    ]


def _tensors_of(
    kv_caches: Any, formats: Sequence[EngineKVFormat], wanted: Iterable[int]
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Each wanted layer and its tensors."""
    rows = [kv_format(fmt) for fmt in formats]
    whole = next((row for row in rows if not row.is_layer_list), None)
    if whole is not None and set(rows) != {whole}:
        raise LayoutError(f"{whole.label}: expected all layers to be of it, as they share a structure")
    layers = list(kv_caches) if whole is None else layer_tensors(kv_caches, whole)
    if len(layers) != len(rows):
        raise LayoutError(f"{len(rows)} engine_kv_formats for {len(layers)} layers: expected one each")
    for index in wanted:
        yield index, layers[index] if whole else layer_tensors([layers[index]], rows[index])[0]


def _shape_desc(row: KVFormat, tensors: Sequence[Any]) -> PageBufferShapeDesc:
    """Of one layer; the number of layers is left open.

    Raises:
        LayoutError: Sizes or strides are not those of the row, or one number cannot say how far apart the
            blocks of all planes are.
    """
    shape = layer_shape(row, tensors)
    strides = [block_stride_elems(row, tensor) for tensor in tensors]
    if len(set(map(_block_stride_bytes, strides, tensors))) > 1:  # planes of several widths
        if any(stride != prod(tensor.shape[1:]) for stride, tensor in zip(strides, tensors, strict=True)):
            raise LayoutError(f"{row.label}: padded planes whose blocks are not equally far apart")
        strides = [0]
    return PageBufferShapeDesc(
        kv_size=row.kv_size,
        nb=shape.num_blocks,
        bs=shape.block_size,
        nh=shape.num_heads,
        hs=shape.head_size,
        element_size=shape.element_size,
        block_stride_elems=strides[0],
    )


def _block_stride_bytes(stride: int, tensor: Any) -> int:
    return stride * int(tensor.element_size())
