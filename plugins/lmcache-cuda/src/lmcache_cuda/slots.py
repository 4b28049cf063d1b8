"""Transfers of single slots: what the operands say, as the kernels' numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format
from lmcache_cuda import runtime
from lmcache_cuda.operands import Table, address_table, is_tensor, pages_of, serves_object

__all__ = ["SlotCall", "layer_call", "pages_call", "pair_call", "pointer_call"]

Sizes = tuple[int, int, int, int]
"""Slots of all blocks, slots per block, elements per head, elements between blocks; all but the first may be 0."""


class SlotCall(NamedTuple):
    """One object, and the pages that its rows belong to."""

    row: KVFormat
    shape: list[int]
    pages: Table
    obj: Any
    tokens: int
    ordinal: int
    token_major: bool = False
    stage: bool = False
    """The object is in pageable host memory or has gaps: it goes through the device."""


def pointer_call(op: str, row: KVFormat, kv: Any, pages: Table, sizes: Sizes) -> SlotCall:
    """Pages by their addresses; ``kv`` is ``[KV, NL, T, hidden]``, or ``[NL, T, hidden]`` where KV is 1.

    Raises:
        LayoutError: The object or the sizes do not fit the format.
        ValueError: Sizes that do not fit each other.
    """
    obj = kv.unsqueeze(0) if is_tensor(kv) and kv.dim() == 3 and row.kv_size == 1 else kv
    if not is_tensor(obj) or obj.dim() != 4 or obj.shape[0] != row.kv_size:
        what = tuple(kv.shape) if is_tensor(kv) else type(kv).__name__
        raise LayoutError(f"{op}: {row.label}: object {what}: expected [{row.kv_size}, NL, T, hidden]")
    if "NP" in row.dims.levels:
        raise LayoutError(f"{op}: {row.label}: addresses do not tell the widths of its planes; pass tensors")
    shape = _shape(op, row, obj.shape[1], obj.shape[3], obj.element_size(), sizes)
    usable = obj.is_contiguous() and (runtime.is_on_device(obj) or runtime.is_pinned(obj))
    return SlotCall(row, shape, pages, obj, obj.shape[2], 0, stage=not usable)


def pages_call(op: str, row: KVFormat, kv: Any, paged: Any, sizes: Sizes) -> SlotCall | None:
    """Pages as tensors; None if a kernel cannot take them, or they contradict ``sizes``."""
    if "NP" in row.dims.levels or not is_tensor(kv):
        return None
    pages = pages_of(row, paged)
    if pages is None:
        return None
    found = _sizes(row, pages.sizes, pages.block_stride)
    if found[0] != sizes[0] or any(
        said not in (0, have) for said, have in zip(sizes[1:3], found[1:3], strict=True)
    ):
        return None
    tokens = kv.shape[-2] if kv.dim() in (3, 4) else 0
    return _call(op, row, kv, pages.tensors, found, pages.sizes["NL"], (tokens, False))


def layer_call(op: str, row: KVFormat, lmc: Any, paged: Any, token_major: bool) -> SlotCall | None:
    """One layer: ``lmc`` is ``[KV, T, hidden]``, token-major ``[T, KV, hidden]``, or ``[T, hidden]``."""
    pages = None if "NP" in row.dims.levels else pages_of(row, [paged])
    if pages is None or not is_tensor(lmc) or lmc.dim() not in (2, 3):
        return None
    tokens = lmc.shape[0] if token_major or lmc.dim() == 2 else lmc.shape[1]
    found = _sizes(row, pages.sizes, pages.block_stride)
    return _call(op, row, lmc, pages.tensors, found, 1, (tokens, token_major))


def pair_call(op: str, lmc: Any, k: Any, v: Any, token_major: bool) -> SlotCall | None:
    """One layer whose K and V are ``[NB, BS, NH, HS]`` each."""
    row = kv_format("TWO_X_NL_X_NB_BS_NH_HS")
    pages = pages_of(row, [[k], [v]])
    if pages is None or not is_tensor(lmc) or lmc.dim() != 3:
        return None
    found = _sizes(row, pages.sizes, pages.block_stride)
    tokens = lmc.shape[0] if token_major else lmc.shape[1]
    return _call(op, row, lmc, pages.tensors, found, 1, (tokens, token_major))


def _sizes(row: KVFormat, sizes: dict[str, int], block_stride: int) -> Sizes:
    per_block = sizes.get("BS", 0)
    total = sizes["PBS"] if row.is_pbs_fused else sizes["NB"] * per_block
    width = sizes.get("CS") or sizes["HS"] * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
    return total, per_block, width, block_stride


def _call(
    op: str, row: KVFormat, obj: Any, tensors: list[Any], sizes: Sizes, layers: int, form: tuple[int, bool]
) -> SlotCall | None:
    tokens, token_major = form
    hidden = sizes[2] * (1 if row.is_mla else tensors[0].shape[row.dims.axes.index("NH")])
    lead = (tokens, row.kv_size) if token_major else (row.kv_size, tokens)
    shape = (row.kv_size, layers, tokens, hidden) if layers > 1 or obj.dim() == 4 else (*lead, hidden)
    if token_major and row.kv_size == 1:
        shape = (1, tokens, hidden)
    if not serves_object(obj, shape, tensors[0]):
        return None
    ordinal = runtime.ordinal_of(tensors[0].device)
    pages = address_table(op, [tensor.data_ptr() for tensor in tensors], ordinal)
    numbers = _shape(op, row, layers, hidden, obj.element_size(), sizes)
    return SlotCall(row, numbers, pages, obj, tokens, ordinal, token_major and row.kv_size == 2)


def _shape(op: str, row: KVFormat, layers: int, hidden: int, itemsize: int, sizes: Sizes) -> list[int]:
    """The eight numbers of ``PageBufferShapeDesc``."""
    total, per_block, head, stride = sizes
    if not per_block:
        if row.is_hnd or row.is_cross_layer or not (row.is_pbs_fused or row.block_axis == 0):
            raise LayoutError(f"{op}: {row.label}: expected block_size: its slots do not follow one another")
        per_block = 1
    if row.is_mla:
        head = hidden
    elif not head:
        if row.is_hnd:
            raise LayoutError(f"{op}: {row.label}: expected head_size: its heads stand outside slots")
        head = hidden
    if total < 1 or total % per_block or hidden % head:
        raise ValueError(
            f"{op}: page_buffer_size={total}, block_size={per_block}, head_size={head}: they do not fit"
        )
    return [row.kv_size, layers, total // per_block, per_block, hidden // head, head, itemsize, stride]
