"""Transfers between pages and objects: the ops of the contract on the native kernels.

All are queued on the stream on which torch queues now. What is refused has moved nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format
from lmcache.v1.platform import torch_ops
from lmcache_cuda import keeping, runtime
from lmcache_cuda.operands import (
    MAX_VALUES,
    Pages,
    Table,
    address_table,
    are_tensors,
    pages_of,
    serves_object,
    table,
)
from lmcache_cuda.slots import SlotCall, layer_call, pages_call, pair_call, pointer_call

__all__ = [
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]


def _row(op: str, fmt: Any, served: Sequence[int]) -> KVFormat:
    row = kv_format(fmt)
    if row.id not in served:
        raise LayoutError(f"{op} does not serve {row.label}")
    return row


def _way(op: str, direction: Any) -> int:
    way = int(direction)
    if way not in (0, 1):
        raise ValueError(f"{op}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    return way


# --- whole blocks ------------------------------------------------------------------------------------------


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
    row = _row(op, engine_kv_format, runtime.native().BLOCK_FORMATS)
    way = _way(op, direction)
    if chunk_size < 1 or chunk_size % max(1, shape_desc.bs):
        raise ValueError(f"{op}: chunk_size={chunk_size}: expected a positive multiple of bs={shape_desc.bs}")
    if not are_tensors(paged):
        if "NP" in row.dims.levels:
            raise LayoutError(
                f"{op}: {row.label}: addresses do not tell the widths of its planes; pass tensors"
            )
        ordinal = runtime.ordinal_of(device)
        pages = table(op, "paged", paged, ordinal, MAX_VALUES)
        _launch_blocks(
            op, row, way, ordinal, pages, [operator.index(address) for address in objects], block_ids,
            _numbers(shape_desc), chunk_size, skip_prefix_n_blocks,
        )  # fmt: skip
        return
    fitting = _fitting(row, paged, objects, shape_desc, chunk_size)
    if fitting is None:
        torch_ops.multi_layer_block_kv_transfer(
            paged, objects, block_ids, device, direction, shape_desc, chunk_size, engine_kv_format,
            skip_prefix_n_blocks,
        )  # fmt: skip
        return
    found, numbers = fitting
    ordinal = runtime.ordinal_of(found.tensors[0].device)
    _launch_blocks(
        op, row, way, ordinal, address_table(op, found.addresses, ordinal), [chunk.data_ptr() for chunk in objects],
        block_ids, numbers, chunk_size, skip_prefix_n_blocks,
    )  # fmt: skip
    on_host = [chunk for chunk in objects if not runtime.is_on_device(chunk)]
    if on_host:
        keeping.until_done(ordinal, on_host)


def _numbers(desc: Any) -> list[int]:
    names = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems")
    return [operator.index(getattr(desc, name)) for name in names]


def _fitting(
    row: KVFormat, paged: Any, objects: Sequence[Any], desc: Any, chunk_size: int
) -> tuple[Pages, list[int]] | None:
    """The pages and the eight numbers, if they and the tensors tell one story and a kernel can work on all of them."""
    if "NP" in row.dims.levels:
        return None
    pages = pages_of(row, paged, desc.nl)
    if pages is None:
        return None
    sizes, first = pages.sizes, pages.tensors[0]
    if row.is_pbs_fused:  # slots of all blocks follow one another: the descriptor cuts them
        if desc.bs < 1 or sizes["PBS"] % desc.bs:
            return None
        sizes = {**sizes, "BS": desc.bs, "NB": sizes["PBS"] // desc.bs}
    width = sizes.get("CS") or sizes["HS"] * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
    found = [
        row.kv_size,
        sizes["NL"],
        sizes["NB"],
        sizes["BS"],
        sizes.get("NH", 1),
        width,
        first.element_size(),
    ]
    said = _numbers(desc)
    same = [a == b or (name == "nb" and not b) for name, a, b in zip(_NAMES, found, said[:7], strict=True)]
    shape = (row.kv_size, sizes["NL"], chunk_size, found[4] * width)
    if not all(same) or said[7] not in (0, pages.block_stride or said[7]):
        return None
    if said[7] and not pages.block_stride and sizes["NB"] > 1 and said[7] != first[0].numel():
        return None
    if not all(serves_object(chunk, shape, first) for chunk in objects):
        return None
    return pages, [*found, pages.block_stride]


_NAMES = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size")


def _launch_blocks(
    op: str, row: KVFormat, way: int, ordinal: int, pages: Table, objects: list[int], block_ids: Any,
    numbers: list[int], chunk_size: int, skip: int,
) -> None:  # fmt: skip
    ids = table(op, "block_ids", block_ids, ordinal)
    _, stream = runtime.current_stream(ordinal)
    runtime.native().block_transfer(
        row.id, numbers, way, ordinal, stream, pages.values, objects, ids.values, chunk_size, skip,
        page_count=_count(pages), id_count=_count(ids), page_alignment=pages.alignment,
    )  # fmt: skip


def _count(values: Table) -> int:
    return values.length if isinstance(values.values, int) else -1


# --- single slots ------------------------------------------------------------------------------------------


def multi_layer_kv_transfer(
    kv: Any,
    ptrs: Any,
    slot_mapping: Any,
    device: Any,
    page_buffer_size: int,
    direction: int,
    format: int,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None:
    op = "multi_layer_kv_transfer"
    row = _row(op, format, runtime.native().SLOT_FORMATS)
    _way(op, direction)
    sizes = (page_buffer_size, block_size, head_size, block_stride_elems)
    if are_tensors(ptrs):
        call = pages_call(op, row, kv, ptrs, sizes)
        if call is None:
            torch_ops.multi_layer_kv_transfer(
                kv, ptrs, slot_mapping, device, *sizes[:1], direction, format, block_size, head_size,
                skip_prefix_n_tokens, block_stride_elems,
            )  # fmt: skip
            return
    else:
        call = pointer_call(
            op, row, kv, table(op, "ptrs", ptrs, runtime.ordinal_of(device), MAX_VALUES), sizes
        )
        call = call._replace(ordinal=runtime.ordinal_of(device))
    _launch_slots(op, call, slot_mapping, direction, skip_prefix_n_tokens)


def multi_layer_kv_transfer_unilateral(
    kv: Any, ptrs: Any, slots: Any, device: Any, page_buffer_size: int, direction: int, format: int
) -> None:
    op = "multi_layer_kv_transfer_unilateral"
    row = _row(op, format, unilateral_formats())
    _way(op, direction)
    if are_tensors(ptrs):  # flat or as two lists, with blocks or without: the baseline tells them apart
        torch_ops.multi_layer_kv_transfer_unilateral(
            kv, ptrs, slots, device, page_buffer_size, direction, format
        )
        return
    if row.is_kv_list:
        row = kv_format("TWO_X_NL_X_NBBS_NH_HS")  # slots of all blocks follow one another
    ordinal = runtime.ordinal_of(device)
    pages = table(op, "ptrs", ptrs, ordinal, MAX_VALUES)
    call = pointer_call(op, row, kv, pages, (page_buffer_size, 0, 0, 0))._replace(ordinal=ordinal)
    _launch_slots(op, call, slots, direction, 0)


def unilateral_formats() -> tuple[int, ...]:
    """Formats whose K and V are buffers of their own, or that have one plane."""
    rows = [kv_format(fmt) for fmt in runtime.native().SLOT_FORMATS]
    return tuple(row.id for row in rows if row.is_kv_list or row.is_mla)


def single_layer_kv_transfer(
    lmc: Any, paged: Any, slots: Any, direction: int, format: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer"
    row = _row(op, format, runtime.native().SLOT_FORMATS)
    _way(op, direction)
    call = None if row.is_cross_layer else layer_call(op, row, lmc, paged, token_major)
    if call is None:
        torch_ops.single_layer_kv_transfer(lmc, paged, slots, direction, format, token_major)
    else:
        _launch_slots(op, call, slots, direction, 0)


def single_layer_kv_transfer_sgl(
    lmc: Any, k: Any, v: Any, slots: Any, direction: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer_sgl"
    _way(op, direction)
    call = pair_call(op, lmc, k, v, token_major)
    if call is None:
        torch_ops.single_layer_kv_transfer_sgl(lmc, k, v, slots, direction, token_major)
    else:
        _launch_slots(op, call, slots, direction, 0)


def _launch_slots(op: str, call: SlotCall, mapping: Any, direction: int, skip: int) -> None:
    way = int(direction)
    slots = table(op, "slot_mapping", mapping, call.ordinal)
    total = call.shape[2] * call.shape[3]
    if not isinstance(slots.values, int):
        bad = next((slot for slot in slots.values[max(0, skip) :] if slot >= total), None)
        if bad is not None:
            raise ValueError(f"{op}: slot {bad}: expected below {total}")
    _, stream = runtime.current_stream(call.ordinal)
    staged = runtime.staged(call.obj, call.ordinal) if call.stage else call.obj
    runtime.native().slot_transfer(
        call.row.id, call.shape, way, call.ordinal, stream, call.pages.values, staged.data_ptr(), slots.values,
        call.tokens, skip, token_major=call.token_major, page_count=_count(call.pages), slot_count=_count(slots),
        page_alignment=call.pages.alignment,
    )  # fmt: skip
    if call.stage and way == 1:
        call.obj.copy_(staged)
    elif not runtime.is_on_device(call.obj):
        keeping.until_done(call.ordinal, [call.obj])
