"""Transfers of single slots: what the operands say, as the kernels' numbers."""

from __future__ import annotations

from typing import Any

import torch

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format
from lmcache.v1.platform.ops_types import PageBufferShapeDesc
from lmcache_sim_plugin import _library
from lmcache_sim_plugin._library import Table, Transfer, on_host

__all__ = ["multi_layer", "single_layer", "two_tensors"]


def multi_layer(
    op: str, row: KVFormat, kv: Any, pages: Table, slots: Table, device: Any, direction: int,
    sizes: tuple[int, int, int, int], skip: int,
) -> None:  # fmt: skip
    """``kv`` is ``[KV, NL, T, hidden]``, or ``[NL, T, hidden]`` where KV is 1.

    Args:
        sizes: slots of all blocks, slots per block, elements per head, elements between blocks; all but the
            first may be 0.
    """
    obj = kv.unsqueeze(0) if kv.dim() == 3 and row.kv_size == 1 else kv
    if obj.dim() != 4 or obj.shape[0] != row.kv_size:
        raise LayoutError(
            f"{op}: {row.label}: object of shape {tuple(kv.shape)}: expected [KV, NL, T, hidden]"
        )
    shape = _shape(op, row, obj.shape[1], obj.shape[3], obj.element_size(), sizes)
    _launch(op, row, obj, obj.shape[2], shape, pages, slots, device, direction, skip, False)


def single_layer(
    op: str, row: KVFormat, lmc: Any, paged: Any, slots: Table, direction: int, token_major: bool
) -> None:
    """``lmc`` is ``[KV, T, hidden]``, token-major ``[T, KV, hidden]``, or ``[T, hidden]`` where KV is 1."""
    tensors = list(paged) if isinstance(paged, (list, tuple)) else [paged]
    if any(not tensor.is_contiguous() for tensor in tensors):
        raise LayoutError(f"{op}: {row.label}: pages with gaps: expected contiguous ones")
    sizes = row.sizes(tensors[0].shape)
    per_block = sizes.get("BS", 0)
    total = sizes["PBS"] if row.is_pbs_fused else sizes["NB"] * per_block
    head = 0 if row.is_mla else sizes.get("HS", 0) * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
    _one_layer(
        op,
        row,
        lmc,
        tensors,
        slots,
        direction,
        token_major,
        (total, per_block, head or sizes.get("CS", 0), 0),
    )


def two_tensors(op: str, lmc: Any, k: Any, v: Any, slots: Table, direction: int, token_major: bool) -> None:
    """K and V are ``[NB, BS, NH, HS]``, ``[slots, NH, HS]`` or ``[slots, hidden]``."""
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise LayoutError(f"{op}: K {tuple(k.shape)} and V {tuple(v.shape)}: expected alike, contiguous")
    total = k.shape[0] * k.shape[1] if k.dim() == 4 else k.shape[0]
    row = kv_format("TWO_X_NL_X_NBBS_NH_HS")  # a contiguous tensor of blocks is one of slots, too
    _one_layer(op, row, lmc, [k, v], slots, direction, token_major, (total, 0, 0, 0))


def _one_layer(
    op: str, row: KVFormat, lmc: Any, tensors: list[Any], slots: Table, direction: int, token_major: bool,
    sizes: tuple[int, int, int, int],
) -> None:  # fmt: skip
    tokens = lmc.shape[0] if token_major or lmc.dim() == 2 else lmc.shape[1]
    if lmc.dim() not in (2, 3) or lmc.numel() != row.kv_size * tokens * lmc.shape[-1]:
        raise LayoutError(f"{op}: {row.label}: object of shape {tuple(lmc.shape)}: expected [KV, T, hidden]")
    shape = _shape(op, row, 1, lmc.shape[-1], lmc.element_size(), sizes)
    if {tensor.device for tensor in tensors} != {tensors[0].device}:
        raise LayoutError(f"{op}: pages on several devices")
    if tensors[0].element_size() != lmc.element_size():
        raise LayoutError(f"{op}: {row.label}: object of {lmc.dtype}: the pages have {tensors[0].dtype}")
    if sum(tensor.numel() for tensor in tensors) != row.kv_size * sizes[0] * lmc.shape[-1]:
        raise LayoutError(f"{op}: {row.label}: object of shape {tuple(lmc.shape)}: it does not fit the pages")
    pages = on_host([tensor.data_ptr() for tensor in tensors])
    _launch(op, row, lmc, tokens, shape, pages, slots, tensors[0].device, direction, 0, token_major)


def _shape(
    op: str, row: KVFormat, layers: int, hidden: int, itemsize: int, sizes: tuple[int, int, int, int]
) -> PageBufferShapeDesc:
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
    return PageBufferShapeDesc(
        row.kv_size, layers, total // per_block, per_block, hidden // head, head, itemsize, stride
    )


def _launch(
    op: str, row: KVFormat, obj: Any, tokens: int, shape: PageBufferShapeDesc, pages: Table, slots: Table,
    device: Any, direction: int, skip: int, token_major: bool,
) -> None:  # fmt: skip
    if not obj.is_contiguous():
        raise LayoutError(f"{op}: object with strides {tuple(obj.stride())}: expected it contiguous")
    on_host_memory = obj.device.type == "cpu"
    stream = torch.sim.current_stream(device)
    _library.launch(
        op,
        Transfer(
            stream.sim_stream, row.id, int(direction), shape, pages, on_host([obj.data_ptr()]), slots, tokens, skip,
            by_slot=True, token_major=token_major, objects_on_host=on_host_memory,
        ),
    )  # fmt: skip
    if on_host_memory:
        stream.launch_host_func(obj.data_ptr)  # the kernel needs the tensor until it is done
