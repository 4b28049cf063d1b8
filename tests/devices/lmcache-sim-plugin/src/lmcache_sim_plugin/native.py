"""The native module: functions with the contract's names and signatures over the compiled kernels.

All are queued on the current stream of the thread that calls. What is refused has moved nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from lmcache_sim import _driver

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache_sim_plugin import _library
from lmcache_sim_plugin._library import Table, Transfer, on_device, on_host
from lmcache_sim_plugin._plans import (  # noqa: F401 -- ops of this module
    BLOCK_FORMATS,
    DIRECT_FORMATS,
    batch_memcpy_supported,
    direct_copy_format_supported,
    execute_direct_copy_transfer,
    execute_object_group_transfer,
    pop_completed_phase_timings,
)
from lmcache_sim_plugin._slots import multi_layer, single_layer, two_tensors

LMCACHE_NATIVE_ABI = _library.ABI

_SLOTS = tuple(
    row.id
    for row in kv_formats()
    if (row.is_block_addressable or row.is_pbs_fused)
    and row.token_addressable
    and "NP" not in row.dims.levels
)
_LAYERS = tuple(i for i in _SLOTS if not kv_format(i).is_cross_layer)
_SEPARATE = tuple(i for i in _SLOTS if kv_format(i).is_kv_list or kv_format(i).is_mla)

LMCACHE_OP_FORMATS = {
    "multi_layer_block_kv_transfer": BLOCK_FORMATS,
    "multi_layer_kv_transfer": _SLOTS,
    "multi_layer_kv_transfer_unilateral": _SEPARATE,
    "single_layer_kv_transfer": _LAYERS,
    "execute_object_group_transfer": BLOCK_FORMATS,
    "execute_direct_copy_transfer": DIRECT_FORMATS,
}
LMCACHE_OP_OPERANDS = {
    "multi_layer_block_kv_transfer": ("pointers",),
    "multi_layer_kv_transfer": ("pointers",),
    "multi_layer_kv_transfer_unilateral": ("pointers",),
    "single_layer_kv_transfer": ("tensors",),
    "single_layer_kv_transfer_sgl": ("tensors",),
    "lmcache_memcpy_async": ("tensors", "pointers"),
    "tensor_from_ptr": ("pointers",),
    "record_completion_on_stream": (),
    "drain_recorded_completions": (),
    "execute_object_group_transfer": ("pointers",),
    "execute_direct_copy_transfer": ("pointers",),
}


def _served(op: str, engine_kv_format: Any) -> KVFormat:
    row = kv_format(engine_kv_format)
    if row.id not in LMCACHE_OP_FORMATS[op]:
        raise LayoutError(f"{op} does not serve {row.label}")
    return row


def _table(op: str, what: str, values: Any) -> Table:
    """Integers as an operand: a list, a tensor on the host, or an int64 tensor on the device."""
    if not hasattr(values, "as_strided"):
        return on_host([operator.index(value) for value in values])
    if values.dim() != 1 or values.is_floating_point():
        raise TypeError(f"{op}: {what} is {tuple(values.shape)} of {values.dtype}: expected integers, 1-D")
    if values.device.type == "cpu":
        return on_host(values.tolist())
    return on_device(values.to(torch.int64).contiguous())


def multi_layer_block_kv_transfer(
    paged: Any,
    objects: Sequence[int],
    block_ids: Any,
    device: Any,
    direction: int,
    shape_desc: Any,
    chunk_size: int,
    engine_kv_format: int,
    skip_prefix_n_blocks: int = 0,
) -> None:
    op = "multi_layer_block_kv_transfer"
    row = _served(op, engine_kv_format)
    if chunk_size < 1 or chunk_size % max(1, shape_desc.bs):
        raise ValueError(f"{op}: chunk_size={chunk_size}: expected a positive multiple of bs={shape_desc.bs}")
    ids = _table(op, "block_ids", block_ids)
    if not ids.device:
        _check_ids(op, list(ids.host[: ids.count])[skip_prefix_n_blocks:], shape_desc.nb)
    _library.launch(
        op,
        Transfer(
            torch.sim.current_stream(device).sim_stream,
            row.id,
            int(direction),
            shape_desc,
            _table(op, "paged", paged),
            on_host([operator.index(address) for address in objects]),
            ids,
            chunk_size,
            skip_prefix_n_blocks,
        ),
    )


def _check_ids(op: str, ids: list[int], num_blocks: int) -> None:
    for block in ids:  # unsigned: a negative one is far beyond any number of blocks
        if block >= (num_blocks or 1 << 63):
            raise ValueError(f"{op}: block id {block}: expected 0 to {num_blocks - 1}")


def multi_layer_kv_transfer(
    kv: torch.Tensor,
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
    row = _served(op, format)
    pages, slots = _table(op, "ptrs", ptrs), _table(op, "slot_mapping", slot_mapping)
    sizes = (page_buffer_size, block_size, head_size, block_stride_elems)
    multi_layer(op, row, kv, pages, slots, device, direction, sizes, skip_prefix_n_tokens)


def multi_layer_kv_transfer_unilateral(
    kv: torch.Tensor, ptrs: Any, slots: Any, device: Any, page_buffer_size: int, direction: int, format: int
) -> None:
    op = "multi_layer_kv_transfer_unilateral"
    row = _served(op, format)
    if row.is_kv_list:
        row = kv_format("TWO_X_NL_X_NBBS_NH_HS")  # slots of all blocks follow one another
    pages, mapping = _table(op, "ptrs", ptrs), _table(op, "slots", slots)
    multi_layer(op, row, kv, pages, mapping, device, direction, (page_buffer_size, 0, 0, 0), 0)


def single_layer_kv_transfer(
    lmc: torch.Tensor, paged: Any, slots: Any, direction: int, format: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer"
    row = _served(op, format)
    single_layer(op, row, lmc, paged, _table(op, "slots", slots), direction, token_major)


def single_layer_kv_transfer_sgl(
    lmc: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: Any, direction: int, token_major: bool = False
) -> None:
    op = "single_layer_kv_transfer_sgl"
    two_tensors(op, lmc, k, v, _table(op, "slots", slots), direction, token_major)


# ------------------------------------------------------------------------------------------------------- copies
_KINDS = {0: 1, 1: 2}
"""Of TransferDirection to the driver's."""


def lmcache_memcpy_async(
    dest: Any, src: Any, nbytes: int, direction: int, host_buffer_offset: int, host_buffer_alignments: int
) -> None:
    op = "lmcache_memcpy_async"
    if int(direction) not in _KINDS:
        raise ValueError(f"{op}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    if nbytes < 0 or host_buffer_offset < 0:
        raise ValueError(
            f"{op}: nbytes={nbytes}, host_buffer_offset={host_buffer_offset}: expected 0 or more"
        )
    if host_buffer_alignments < 1 or host_buffer_alignments & (host_buffer_alignments - 1):
        raise ValueError(f"{op}: host_buffer_alignments={host_buffer_alignments}: expected a power of two")
    host, there = (src, dest) if int(direction) == 0 else (dest, src)
    where = _device_of(op, host, there, nbytes)
    to, source = (_address(operand) for operand in (dest, src))
    stream = torch.sim.current_stream(where)
    _driver.call("memcpy_async", stream.sim_stream, to, source, nbytes, _KINDS[int(direction)])
    if hasattr(host, "as_strided") and nbytes:
        stream.launch_host_func(host.data_ptr)  # the copy needs the tensor until it is done


def _device_of(op: str, host: Any, there: Any, nbytes: int) -> Any:
    """The device of the copy; None: the current one."""
    tensors = [hasattr(operand, "as_strided") for operand in (host, there)]
    if not any(tensors):
        return None
    if not all(tensors):
        raise TypeError(f"{op}: expected two tensors or two addresses, got one of each")
    for name, tensor, kind in (("host", host, "cpu"), ("device", there, "sim")):
        if tensor.device.type != kind or not tensor.is_contiguous():
            raise ValueError(f"{op}: the {name} side is on {tensor.device}: expected {kind}, contiguous")
        if nbytes > tensor.numel() * tensor.element_size():
            raise ValueError(f"{op}: nbytes={nbytes}: the {name} side has {tensor.nbytes}")
    return there.device


def _address(operand: Any) -> int:
    return operand.data_ptr() if hasattr(operand, "as_strided") else operator.index(operand)


def tensor_from_ptr(ptr: int, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.sim.tensor_from_ptr(ptr, shape, dtype, device)


# -------------------------------------------------------------------------------------------------- completions
def record_completion_on_stream(stream_ptr: int, kind: str, payload: bytes) -> None:
    if not isinstance(kind, str) or not isinstance(payload, bytes):
        raise TypeError(f"record_completion_on_stream: {kind!r}, {payload!r}: expected str and bytes")
    _library.record(operator.index(stream_ptr), kind, payload)


def drain_recorded_completions() -> list[tuple[str, bytes]]:
    return _library.drain()
