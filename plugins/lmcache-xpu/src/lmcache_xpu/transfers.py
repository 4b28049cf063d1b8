"""Transfers of whole blocks: the op of the contract on the native kernel, queued where torch queues now."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache.v1.platform import torch_ops
from lmcache_xpu import native, runtime
from lmcache_xpu.keeping import keep
from lmcache_xpu.operands import Pages, are_tensors, is_tensor, pages_of, planes_of, serves_object, table

__all__ = ["BLOCK_FORMATS", "checked_row", "checked_way", "multi_layer_block_kv_transfer"]

BLOCK_FORMATS = tuple(row.id for row in kv_formats() if row.is_block_addressable)
_NUMBERS = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems")


def checked_row(op: str, fmt: Any, served: Sequence[int]) -> KVFormat:
    """The row of a format.

    Raises:
        LayoutError: The op does not serve it.
    """
    row = kv_format(fmt)
    if row.id not in served:
        raise LayoutError(f"{op} does not serve {row.label}")
    return row


def checked_way(op: str, direction: Any) -> int:
    """0 or 1.

    Raises:
        ValueError: It is neither.
    """
    if int(direction) not in (0, 1):
        raise ValueError(f"{op}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    return int(direction)


def multi_layer_block_kv_transfer(
    paged: Any,
    objects: Sequence[Any],
    block_ids: Any,
    device: Any,
    direction: int,
    shape_desc: Any,
    chunk_size: int,
    engine_kv_format: int,
    skip_prefix_n_blocks: int = 0,
) -> None:
    op = "multi_layer_block_kv_transfer"
    row = checked_row(op, engine_kv_format, BLOCK_FORMATS)
    way = checked_way(op, direction)
    if chunk_size < 1 or chunk_size % max(1, shape_desc.bs):
        raise ValueError(f"{op}: chunk_size={chunk_size}: expected a positive multiple of bs={shape_desc.bs}")
    queue = runtime.current_queue(device)
    numbers = [operator.index(getattr(shape_desc, name)) for name in _NUMBERS]
    widths: list[int] = []
    if are_tensors(paged):
        fitting = _fitting(row, paged, objects, numbers, chunk_size, queue)
        if fitting is None:
            torch_ops.multi_layer_block_kv_transfer(
                paged, objects, block_ids, device, direction, shape_desc, chunk_size, engine_kv_format,
                skip_prefix_n_blocks,
            )  # fmt: skip
            return
        pages, numbers, widths = fitting
        addresses, chunks = pages.addresses, [chunk.data_ptr() for chunk in objects]
    elif "NP" in row.dims.levels:
        raise LayoutError(f"{op}: {row.label}: addresses do not tell the widths of its planes; pass tensors")
    else:
        addresses, _ = table(op, "paged", paged)
        chunks = [operator.index(address) for address in objects]
    ids, _held = table(op, "block_ids", block_ids)
    for plane in range(max(1, len(widths))):
        native.load().transfer(
            op, queue, row.id, way, numbers, addresses, chunks, ids, chunk_size, skip_prefix_n_blocks, widths=widths,
            plane=plane,
        )  # fmt: skip
    keep(queue, [chunk for chunk in objects if is_tensor(chunk)])


def _fitting(
    row: KVFormat, paged: Any, objects: Sequence[Any], said: list[int], chunk_size: int, queue: int
) -> tuple[Pages, list[int], list[int]] | None:
    """The pages, the eight numbers and widths of planes, if all tell one story and the kernel reaches all of them."""
    pages, widths = pages_of(row, paged), list[int]()
    if "NP" in row.dims.levels:
        pages, widths = planes_of(row, paged) or (None, widths)
    if pages is None:
        return None
    sizes, first = dict(pages.sizes), pages.tensors[0]
    per_block = said[3]
    if row.is_pbs_fused:  # slots of all blocks follow one another: the descriptor cuts them
        if per_block < 1 or sizes["PBS"] % per_block:
            return None
        sizes.update(BS=per_block, NB=sizes["PBS"] // per_block)
    found = [
        row.kv_size, sizes["NL"], sizes["NB"], sizes["BS"], sizes.get("NH", 1), pages.width, first.element_size(),
        pages.block_stride,
    ]  # fmt: skip
    tight = first[0].numel() if row.block_axis == 0 else 0
    for name, mine, theirs in zip(_NUMBERS, found, said, strict=True):
        unsaid = theirs == 0 and name in ("nb", "block_stride_elems")
        as_tight = name == "block_stride_elems" and not mine and theirs == tight
        if mine != theirs and not (unsaid or as_tight):
            return None
    shape = (row.kv_size, found[1], chunk_size, found[4] * found[5])
    if not all(serves_object(queue, chunk, shape, first) for chunk in objects):
        return None
    return pages, found, widths
