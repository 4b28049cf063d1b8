"""Transfers of single slots: the four ops of the contract on the native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache.v1.platform import torch_ops
from lmcache_xpu import native, runtime
from lmcache_xpu.keeping import keep
from lmcache_xpu.operands import (
    Pages,
    are_tensors,
    is_tensor,
    pages_of,
    planes_of,
    serves_object,
    shape_numbers,
    table,
)
from lmcache_xpu.transfers import checked_row, checked_way

__all__ = [
    "LAYER_FORMATS",
    "SLOT_FORMATS",
    "UNILATERAL_FORMATS",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]

SLOT_FORMATS = tuple(
    row.id for row in kv_formats() if (row.is_block_addressable or row.is_pbs_fused) and row.token_addressable
)
LAYER_FORMATS = tuple(
    fmt
    for fmt in SLOT_FORMATS
    if not kv_format(fmt).is_cross_layer and "NP" not in kv_format(fmt).dims.levels
)
UNILATERAL_FORMATS = tuple(fmt for fmt in SLOT_FORMATS if kv_format(fmt).is_kv_list or kv_format(fmt).is_mla)
"""K and V are buffers of their own, or there is one plane."""

_SLOTS_IN_ROW = "TWO_X_NL_X_NBBS_NH_HS"


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
    row = checked_row(op, format, SLOT_FORMATS)
    sizes = (page_buffer_size, block_size, head_size, block_stride_elems)
    if not are_tensors(ptrs):
        _by_address(op, row, kv, ptrs, slot_mapping, device, direction, sizes, skip_prefix_n_tokens)
        return
    checked_way(op, direction)
    pages, widths, queue = pages_of(row, ptrs), list[int](), runtime.current_queue(device)
    if "NP" in row.dims.levels:
        pages, widths = planes_of(row, ptrs) or (None, widths)
    if pages is not None and is_tensor(kv) and kv.dim() in (3, 4) and _agree(_sizes(row, pages), sizes):
        shape = (row.kv_size, pages.sizes["NL"], kv.shape[-2], _hidden(row, pages))
        if serves_object(queue, kv, shape, pages.tensors[0]):
            _launch(
                op, row, queue, pages, kv, kv.shape[-2], slot_mapping, direction, skip_prefix_n_tokens, widths=widths
            )  # fmt: skip
            return
    torch_ops.multi_layer_kv_transfer(
        kv, ptrs, slot_mapping, device, page_buffer_size, direction, format, block_size, head_size,
        skip_prefix_n_tokens, block_stride_elems,
    )  # fmt: skip


def multi_layer_kv_transfer_unilateral(
    kv: Any, ptrs: Any, slots: Any, device: Any, page_buffer_size: int, direction: int, format: int
) -> None:
    op = "multi_layer_kv_transfer_unilateral"
    row = checked_row(op, format, UNILATERAL_FORMATS)
    if are_tensors(ptrs):  # flat or as two lists, with blocks or without: the baseline tells them apart
        torch_ops.multi_layer_kv_transfer_unilateral(
            kv, ptrs, slots, device, page_buffer_size, direction, format
        )
        return
    if row.is_kv_list:
        row = kv_format(_SLOTS_IN_ROW)  # slots of all blocks follow one another
    _by_address(op, row, kv, ptrs, slots, device, direction, (page_buffer_size, 0, 0, 0), 0)


def single_layer_kv_transfer(
    lmc: Any, paged: Any, slots: Any, direction: int, format: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer"
    row = checked_row(op, format, LAYER_FORMATS)
    apart = row.is_kv_list and isinstance(paged, (list, tuple))
    nested = [[part] for part in paged] if apart else [paged]
    if not _one_layer(op, row, lmc, nested, slots, direction, token_major):
        torch_ops.single_layer_kv_transfer(lmc, paged, slots, direction, format, token_major)


def single_layer_kv_transfer_sgl(
    lmc: Any, k: Any, v: Any, slots: Any, direction: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer_sgl"
    row = kv_format("TWO_X_NL_X_NB_BS_NH_HS")
    if not _one_layer(op, row, lmc, [[k], [v]], slots, direction, token_major):
        torch_ops.single_layer_kv_transfer_sgl(lmc, k, v, slots, direction, token_major)


def _by_address(
    op: str, row: KVFormat, kv: Any, ptrs: Any, slots: Any, device: Any, direction: int, sizes: Sequence[int],
    skip: int,
) -> None:  # fmt: skip
    """``kv`` is ``[KV, NL, T, hidden]``, or ``[NL, T, hidden]`` where KV is 1.

    Raises:
        LayoutError: It is not, or the kernel cannot reach it.
    """
    way = checked_way(op, direction)
    if "NP" in row.dims.levels:
        raise LayoutError(f"{op}: {row.label}: addresses do not tell the widths of its planes; pass tensors")
    obj = kv.unsqueeze(0) if is_tensor(kv) and kv.dim() == 3 and row.kv_size == 1 else kv
    if not is_tensor(obj) or obj.dim() != 4 or obj.shape[0] != row.kv_size:
        what = tuple(kv.shape) if is_tensor(kv) else type(kv).__name__
        raise LayoutError(f"{op}: {row.label}: object {what}: expected [{row.kv_size}, NL, T, hidden]")
    queue = runtime.current_queue(device)
    numbers = shape_numbers(op, row, obj.shape[1], obj.shape[3], obj.element_size(), sizes)
    # An object with gaps, or in memory that the device does not reach, goes through the device.
    direct = obj.is_contiguous() and runtime.reaches(queue, obj)
    there = obj if direct else runtime.staged(obj, device)
    addresses, _held = table(op, "ptrs", ptrs)
    mapping, _also_held = table(op, "slot_mapping", slots)
    native.load().transfer(
        op, queue, row.id, way, numbers, addresses, [there.data_ptr()], mapping, obj.shape[2], skip, by_slot=True
    )  # fmt: skip
    if direct:
        keep(queue, [obj])
    elif way == 1:
        obj.copy_(there)


def _one_layer(
    op: str, row: KVFormat, lmc: Any, paged: Any, slots: Any, direction: int, token_major: bool
) -> bool:
    """``lmc`` is ``[KV, T, hidden]``, token-major ``[T, KV, hidden]``, or ``[T, hidden]``.

    Returns:
        Whether the kernel takes it; nothing was done if not.
    """
    checked_way(op, direction)
    pages = pages_of(row, paged)
    if pages is None or not is_tensor(lmc) or lmc.dim() not in (2, 3):
        return False
    queue = runtime.current_queue(pages.tensors[0].device)
    swapped = token_major and row.kv_size == 2
    tokens = lmc.shape[0] if swapped or lmc.dim() == 2 else lmc.shape[1]
    if token_major and row.kv_size == 1 and lmc.dim() == 3:
        tokens = lmc.shape[0]
        lmc = lmc.transpose(0, 1)
    hidden = _hidden(row, pages)
    shape = (tokens, 2, hidden) if swapped else (row.kv_size, tokens, hidden)
    if not serves_object(queue, lmc, shape, pages.tensors[0]):
        return False
    _launch(op, row, queue, pages, lmc, tokens, slots, direction, 0, swapped)
    return True


def _sizes(row: KVFormat, pages: Pages) -> tuple[int, int, int, int]:
    """Slots of all blocks, slots per block, elements per head, elements between blocks."""
    per_block = pages.sizes.get("BS", 0)
    total = pages.sizes["PBS"] if row.is_pbs_fused else pages.sizes["NB"] * per_block
    return total, per_block, pages.width, pages.block_stride


def _agree(found: Sequence[int], said: Sequence[int]) -> bool:
    """Whether what a caller says contradicts nothing; 0 is not said, or not known where slots are one axis."""
    return found[0] == said[0] and all(
        not a or b in (0, a) for a, b in zip(found[1:3], said[1:3], strict=True)
    )


def _hidden(row: KVFormat, pages: Pages) -> int:
    return pages.width * (1 if row.is_mla else pages.sizes["NH"])


def _launch(
    op: str, row: KVFormat, queue: int, pages: Pages, obj: Any, tokens: int, slots: Any, direction: int, skip: int,
    token_major: bool = False, widths: Sequence[int] = (),
) -> None:  # fmt: skip
    numbers = shape_numbers(
        op, row, pages.sizes["NL"], _hidden(row, pages), obj.element_size(), _sizes(row, pages)
    )
    mapping, _held = table(op, "slot_mapping", slots)
    for plane in range(max(1, len(widths))):
        native.load().transfer(
            op, queue, row.id, int(direction), numbers, pages.addresses, [obj.data_ptr()], mapping, tokens, skip,
            by_slot=True, token_major=token_major, widths=widths, plane=plane,
        )  # fmt: skip
    keep(queue, [obj])
