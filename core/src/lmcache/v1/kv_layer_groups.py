"""Which layers are moved together and stored together, and how much of a sliding window is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import EngineKVFormat, PageBufferShapeDesc
from lmcache.v1.kv_layout.groups import (
    AttnWindowDesc,
    EngineGroupInfo,
    KernelGroupInfo,
    ObjectGroupInfo,
    engine_group_layer_indices,
    engine_groups_of_layers,
    kernel_groups_of,
)

__all__ = [
    "AttnWindowDesc",
    "EngineGroupInfo",
    "KVLayerGroupsManager",
    "KernelGroupInfo",
    "ObjectGroupInfo",
    "engine_group_layer_indices",
    "format_kvcache_shape_spec",
    "parse_kvcache_shape_spec",
]


class KVLayerGroupsManager:
    """The groups of one rank's KV cache.

    Without layers everything is empty and every question about a group by its index is refused.
    """

    def __init__(
        self,
        kv_caches: Any = (),
        engine_kv_formats: Sequence[int | EngineKVFormat] = (),
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        lmcache_tokens_per_chunk: int = 256,
        separate_object_groups: bool = False,
    ) -> None:
        """
        Args:
            kv_caches: What ``normalize_and_discover_per_layer_formats`` returns first.
            engine_kv_formats: What it returns second: the row of each layer.
            engine_group_infos: One per kernel group, in any order. A layer in none is not cached. Empty: all
                layers are in engine group 0.
            lmcache_tokens_per_chunk: Tokens per chunk.
            separate_object_groups: Store layers of different windows apart, so that a chunk outside a window
                need not be there. Otherwise one object holds all layers, and its window is all of the prefix.

        Raises:
            LayoutError: Groups, tensors, formats and chunk size do not go together; the message says which.
        """
        if lmcache_tokens_per_chunk < 1:
            raise LayoutError(
                f"lmcache_tokens_per_chunk={lmcache_tokens_per_chunk}: expected a positive number"
            )
        formats = [EngineKVFormat(int(fmt)) for fmt in engine_kv_formats]
        engine_groups = engine_groups_of_layers(engine_group_infos, len(formats))
        self._chunk = lmcache_tokens_per_chunk
        self._full_sw_kv = False
        self._kernel_groups = kernel_groups_of(kv_caches, formats, engine_groups)
        if engine_group_infos:
            self._kernel_groups = _declared(self._kernel_groups, engine_group_infos)
        for group in self._kernel_groups:
            _check(group, self._chunk)
        self._object_groups = _object_groups(self._kernel_groups, self._chunk, separate_object_groups)

    @property
    def kernel_groups(self) -> list[KernelGroupInfo]:
        """In order of their first layers."""
        return self._kernel_groups

    @property
    def kv_layer_groups(self) -> list[KernelGroupInfo]:
        """Older name of :attr:`kernel_groups`."""
        return self._kernel_groups

    @property
    def object_groups(self) -> list[ObjectGroupInfo]:
        """In order of their first kernel groups, those with tags last, by tag."""
        return self._object_groups

    @property
    def num_kernel_groups(self) -> int:
        return len(self._kernel_groups)

    @property
    def num_object_groups(self) -> int:
        return len(self._object_groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that every group has."""
        return min((group.shape_desc.nb for group in self._kernel_groups), default=0)

    def get_shape_desc(self, kernel_group_idx: int) -> PageBufferShapeDesc:
        """What device ops must know of a group."""
        return self._group(kernel_group_idx).shape_desc

    # --- windows -------------------------------------------------------------------------------------------

    def enable_full_sw_kv(self) -> None:
        """Keep all of each chunk whatever the window, so that a chunk can be used at any position.

        Groups stay as they are; a recurrent state stays one state. Call it before sizes are asked for.
        """
        self._full_sw_kv = True

    def get_attn_desc(self) -> AttnWindowDesc:
        """What a lookup must find of each object group."""
        groups = self._object_groups
        return AttnWindowDesc(
            num_chunks_in_sw=[
                -1 if self._full_sw_kv and not group.recurrent else group.sw_size_chunks for group in groups
            ],
            group_kinds=tuple(group.kind for group in groups),
        )

    def get_subchunk_sw_size_tokens(self, kernel_group_idx: int) -> int:
        """Tokens at the end of each chunk that are kept: the window if it is shorter than a chunk, else all."""
        group = self._group(kernel_group_idx)
        cut = 0 < group.sw_size_tokens < self._chunk and (group.recurrent_state or not self._full_sw_kv)
        return group.sw_size_tokens if cut else self._chunk

    def get_slots_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """Slots of each chunk that are kept."""
        tokens = self.get_subchunk_sw_size_tokens(kernel_group_idx)
        return self._group(kernel_group_idx).calculate_slots(tokens)

    def calculate_num_blocks(self, kernel_group_idx: int, num_tokens: int) -> int:
        """Whole blocks in the first ``num_tokens`` tokens, in a window or not."""
        group = self._group(kernel_group_idx)
        if num_tokens < 0:
            raise LayoutError(f"num_tokens={num_tokens}: expected 0 or more")
        return num_tokens // group.tokens_per_block

    def _group(self, index: int) -> KernelGroupInfo:
        if not 0 <= index < len(self._kernel_groups):
            raise LayoutError(f"kernel group {index}: expected 0 to {len(self._kernel_groups) - 1}")
        return self._kernel_groups[index]


def _declared(groups: list[KernelGroupInfo], infos: Sequence[EngineGroupInfo]) -> list[KernelGroupInfo]:
    """Groups with what the engine says of them.

    Raises:
        LayoutError: They are not the same groups.
    """
    by_layers = {tuple(sorted(info.layer_indices)): info for info in infos}
    found = [tuple(group.layer_indices) for group in groups]
    if len(infos) != len(groups) or set(found) != set(by_layers):
        raise LayoutError(
            f"engine group infos cover layers {sorted(by_layers)}, but by shape, dtype, format and engine group "
            f"layers go together as {found}: expected one info for each of these"
        )
    return [
        replace(
            group,
            tokens_per_block=info.tokens_per_block or group.slots_per_block,
            sw_size_tokens=info.sw_size_tokens,
            extra_object_group_tag=info.extra_object_group_tag,
            recurrent_state=info.recurrent_state,
        )
        for group, info in ((group, by_layers[tuple(group.layer_indices)]) for group in groups)
    ]


def _check(group: KernelGroupInfo, chunk: int) -> None:
    """Refuse sizes that do not divide."""
    where, tokens, window = f"layers {group.layer_indices}", group.tokens_per_block, group.sw_size_tokens
    if tokens < 1 or tokens % group.slots_per_block:
        raise LayoutError(
            f"{where}: tokens_per_block={tokens}: expected a positive multiple of {group.slots_per_block} slots"
        )
    if chunk % tokens:
        raise LayoutError(
            f"{where}: lmcache_tokens_per_chunk={chunk}: expected a multiple of tokens_per_block={tokens}"
        )
    if window != -1 and window < 1:
        raise LayoutError(
            f"{where}: sw_size_tokens={window}: expected a positive number, or -1 for no window"
        )
    if window < chunk and window != -1 and window % tokens:
        raise LayoutError(
            f"{where}: sw_size_tokens={window}: expected a multiple of tokens_per_block={tokens}, "
            f"as it is shorter than a chunk of {chunk}"
        )
    if group.extra_object_group_tag < 0:
        raise LayoutError(
            f"{where}: extra_object_group_tag={group.extra_object_group_tag}: expected 0 or more"
        )


def _object_groups(groups: Sequence[KernelGroupInfo], chunk: int, separate: bool) -> list[ObjectGroupInfo]:
    """One of all, or one per tag, kind and window in chunks."""
    if not separate:
        return [ObjectGroupInfo(list(range(len(groups))))] if groups else []
    members: dict[tuple[int, bool, int], list[int]] = {}
    for index, group in enumerate(groups):
        window = -1 if group.sw_size_tokens == -1 else -(-group.sw_size_tokens // chunk)
        members.setdefault((group.extra_object_group_tag, group.recurrent_state, window), []).append(index)
    return [
        ObjectGroupInfo(indices, window, aux=tag > 0, recurrent=recurrent)
        for (tag, recurrent, window), indices in sorted(members.items(), key=lambda item: item[0][0])
    ]


# --- shapes as text ----------------------------------------------------------------------------------------

_SPEC_DTYPES = ("float16", "float32", "bfloat16", "uint8", "int8")
_SPEC = re.compile(r"\(\s*(\d+(?:\s*,\s*\d+){4})\s*\)\s*:\s*(\w+)\s*:\s*(\d+)")


def parse_kvcache_shape_spec(spec: str) -> list[KernelGroupInfo]:
    """Groups from ``(kv,NB,BS,NH,HS):dtype:layers``, one after the other with ``;`` between. Needs torch.

    Raises:
        LayoutError: Not of that form, an unknown dtype, or a size below one.
    """
    import torch

    groups: list[KernelGroupInfo] = []
    first = 0
    for part in spec.split(";"):
        match = _SPEC.fullmatch(part.strip())
        sizes = [int(size) for size in match[1].split(",")] if match else []
        count = int(match[3]) if match else 0
        if match is None or match[2] not in _SPEC_DTYPES or min(*sizes, count) < 1 or sizes[0] > 2:
            raise LayoutError(
                f"KV shape {part.strip()!r}: expected (kv,NB,BS,NH,HS):dtype:layers with positive numbers, kv 1 "
                f"or 2, and a dtype of {', '.join(_SPEC_DTYPES)}; ';' between groups"
            )
        kv, nb, bs, nh, hs = sizes
        dtype = getattr(torch, match[2])
        desc = PageBufferShapeDesc(kv, count, nb, bs, nh, hs, dtype.itemsize)  # refuses sizes beyond an int32
        groups.append(KernelGroupInfo(list(range(first, first + count)), desc, dtype))
        first += count
    return groups


def format_kvcache_shape_spec(groups: Sequence[KernelGroupInfo]) -> str:
    """The text of :func:`parse_kvcache_shape_spec`. Layers are counted, not named.

    Raises:
        LayoutError: A dtype that such a text cannot name.
    """
    parts = []
    for group in groups:
        desc, dtype = group.shape_desc, str(group.dtype).rpartition(".")[2]
        if dtype not in _SPEC_DTYPES:
            raise LayoutError(f"KV shape of dtype {dtype}: expected one of {', '.join(_SPEC_DTYPES)}")
        parts.append(f"({desc.kv_size},{desc.nb},{desc.bs},{desc.nh},{desc.hs}):{dtype}:{group.num_layers}")
    return ";".join(parts)
