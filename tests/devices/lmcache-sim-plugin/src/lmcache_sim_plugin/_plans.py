"""Plans: many batches in one call, each queued on the current stream. What is refused has moved nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from lmcache_sim import _driver

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache_sim_plugin import _library
from lmcache_sim_plugin._library import Table, Transfer, on_host

BLOCK_FORMATS = tuple(
    row.id for row in kv_formats() if row.is_block_addressable and "NP" not in row.dims.levels
)
DIRECT_FORMATS = tuple(
    row.id
    for row in kv_formats()
    if row.dims.levels == ("NL",) and row.dims.axes[:2] == ("NB", "BS") and row.kv_size == 1
)
"""A block of a layer is one piece, in its pages as in an object."""

_GROUPS, _DIRECT = "execute_object_group_transfer", "execute_direct_copy_transfer"
_KINDS = {0: 1, 1: 2}
_KERNEL, _STAGING = 0, 1
_timings: deque[tuple[Any, ...]] = deque(maxlen=1 << 16)


def _row(op: str, number: Any, served: tuple[int, ...]) -> KVFormat:
    row = kv_format(number)
    if row.id not in served:
        raise LayoutError(f"{op} does not serve {row.label}")
    return row


def _way(op: str, direction: Any) -> int:
    if int(direction) not in _KINDS:
        raise ValueError(f"{op}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    return int(direction)


def execute_object_group_transfer(
    direction: int,
    device: Any,
    host_alignment: int,
    groups: Sequence[Any],
    steps: Sequence[Any],
    phase_timing_enabled: bool = False,
    session_id: str = "",
) -> None:
    way = _way(_GROUPS, direction)
    rows = [_row(_GROUPS, group.engine_kv_format, BLOCK_FORMATS) for group in groups]
    for step in steps:
        for launch in step.launches:
            _check(groups, launch)
    stream = torch.sim.current_stream(device)
    for step in steps:
        phases = [(_STAGING, step.staging), (_KERNEL, step.launches)]
        for phase, parts in phases if way == 0 else reversed(phases):
            began: list[float] = []
            if phase_timing_enabled and parts:
                stream.launch_host_func(lambda began=began: began.append(time.time()))
            for part in parts:
                if phase == _STAGING:
                    _driver.call(
                        "memcpy_async", stream.sim_stream, part.dest, part.src, part.nbytes, _KINDS[way]
                    )
                else:
                    _launch(stream.sim_stream, way, groups[part.group_idx], rows[part.group_idx], part)
            if phase_timing_enabled and parts:
                nbytes = sum(_nbytes(groups, part) for part in parts)
                noted = (phase, way, device, nbytes, session_id, began)
                stream.launch_host_func(lambda noted=noted: _note(*noted))


def _check(groups: Sequence[Any], launch: Any) -> None:
    if not 0 <= launch.group_idx < len(groups):
        raise ValueError(f"{_GROUPS}: group_idx={launch.group_idx}: expected 0 to {len(groups) - 1}")
    group = groups[launch.group_idx]
    if not 0 <= launch.block_ids_offset <= group.block_ids_capacity - launch.total_blocks:
        raise ValueError(
            f"{_GROUPS}: {launch.total_blocks} block ids at {launch.block_ids_offset}: there are "
            f"{group.block_ids_capacity}"
        )
    if not 0 <= launch.num_objects <= len(group.lmcache_objects_ptrs):
        raise ValueError(
            f"{_GROUPS}: num_objects={launch.num_objects}: expected 0 to {len(group.lmcache_objects_ptrs)}"
        )


def _launch(stream: int, way: int, group: Any, row: KVFormat, launch: Any) -> None:
    desc = group.shape_desc
    pointers = math.prod({"NL": desc.nl, "2": 2}[level] for level in row.dims.levels)
    ids = group.block_ids_base + 8 * launch.block_ids_offset
    _library.launch(
        _GROUPS,
        Transfer(
            stream,
            row.id,
            way,
            desc,
            Table(group.paged_buffer_ptrs, None, pointers),
            on_host(list(group.lmcache_objects_ptrs)[: launch.num_objects]),
            Table(ids, None, launch.total_blocks),
            group.lmcache_chunk_size,
            launch.skip_prefix_n_blocks,
        ),
    )


def _nbytes(groups: Sequence[Any], part: Any) -> int:
    if hasattr(part, "nbytes"):
        return int(part.nbytes)
    desc = groups[part.group_idx].shape_desc
    blocks = max(0, part.total_blocks - part.skip_prefix_n_blocks)
    return int(blocks * desc.kv_size * desc.nl * desc.bs * desc.nh * desc.hs * desc.element_size)


def _note(phase: int, way: int, device: Any, nbytes: int, session: str, began: list[float]) -> None:
    end = time.time()
    _timings.append((phase, way, device, (end - began[0]) * 1e3, nbytes, session, began[0], end))


def pop_completed_phase_timings() -> list[tuple[Any, ...]]:
    return [_timings.popleft() for _ in range(len(_timings))]


def batch_memcpy_supported() -> bool:
    return True


def direct_copy_format_supported(fmt: int) -> bool:
    return kv_format(fmt).id in DIRECT_FORMATS


def execute_direct_copy_transfer(
    direction: int, device: Any, host_alignment: int, groups: Sequence[Any], objects: Sequence[Any]
) -> None:
    way = _way(_DIRECT, direction)
    copies: list[tuple[int, int, int]] = []
    for group in groups:
        _row(_DIRECT, group.fmt, DIRECT_FORMATS)
    for chunk in objects:
        for group, skip in zip(groups, chunk.skip_prefix_n_blocks, strict=True):
            copies += _pieces(group, chunk, skip)
    stream = torch.sim.current_stream(device).sim_stream
    for page, host, nbytes in copies:
        to, source = (page, host) if way == 0 else (host, page)
        _driver.call("memcpy_async", stream, to, source, nbytes, _KINDS[way])


def _pieces(group: Any, chunk: Any, skip: int) -> list[tuple[int, int, int]]:
    """Address of the page, address in the object, bytes: of each block of each layer."""
    desc = group.shape_desc
    slot = desc.nh * desc.hs * desc.element_size
    page, layer_bytes = desc.bs * slot, group.slots_per_chunk * slot
    stride = (desc.block_stride_elems or desc.bs * desc.nh * desc.hs) * desc.element_size
    count = group.slots_per_chunk // desc.bs
    ids = group.block_ids[chunk.chunk_idx * count : (chunk.chunk_idx + 1) * count]
    bad = next((block for block in ids[skip:] if not 0 <= block < desc.nb), None)
    if bad is not None:
        raise ValueError(f"{_DIRECT}: block id {bad}: expected 0 to {desc.nb - 1}")
    if group.byte_offset_in_object + desc.nl * layer_bytes > chunk.nbytes:
        raise ValueError(f"{_DIRECT}: a group ends behind its object of {chunk.nbytes} bytes")
    start = chunk.host_ptr + group.byte_offset_in_object
    return [
        (base + block * stride, start + layer * layer_bytes + place * page, page)
        for layer, base in enumerate(group.paged_layer_ptrs)
        for place, block in enumerate(ids)
        if place >= skip
    ]
