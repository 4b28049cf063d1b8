"""Whole-block transfer between paged KV and chunk objects.

A chunk object is token-major, ``[KV, NL, slots, NH * W]``, whatever the layout of the pages. Every structure
of pages is first taken apart into planes, ``[NB, BS, NH, W]`` each; then blocks are copied, by address on
the host and by torch's own copies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.base.op_contract import serves, stream_ordered, takes
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform.torch_ops import _hostcopy, _tensorcopy
from lmcache.v1.platform.torch_ops._paged import Paged, paged_pointers, paged_tensors
from lmcache.v1.platform.torch_ops._paged_operands import (
    are_pointers,
    check_written,
    int_dtype,
    pointer_list,
    same_elements,
)
from lmcache.v1.platform.torch_ops._spans import Span, as_ids, cut
from lmcache.v1.platform.torch_ops.formats import served_row
from lmcache.v1.platform.torch_ops.pointers import tensor_from_ptr

if TYPE_CHECKING:
    import torch

__all__ = ["multi_layer_block_kv_transfer"]

_OP = "multi_layer_block_kv_transfer"


def _why_not(row: KVFormat) -> str:
    return "" if row.is_block_addressable else "it has no block axis"


@stream_ordered
@serves(_why_not)
@takes("tensors", "pointers")
def multi_layer_block_kv_transfer(
    paged: Any,
    objects: Sequence[Any],
    block_ids: Any,
    device: Any,
    direction: int,
    shape_desc: PageBufferShapeDesc,
    chunk_size: int,
    engine_kv_format: int,
    skip_prefix_n_blocks: int = 0,
) -> None:
    """Copy whole blocks between paged KV and chunk objects; see ``DeviceOps`` for the contract.

    Serves every row that has a block axis. Operands are either tensors, then ``device`` is read off them and
    on a device the copies are queued on the current stream; or addresses of host memory on both sides, then
    the geometry is what ``shape_desc`` says: one address per layer (one in all where a tensor holds all
    layers; K of all layers, then V, for lists of K and of V; K and V in turn for pairs), and one per object
    of ``chunk_size`` slots. With addresses and ``shape_desc.nb`` 0, nothing bounds block ids from above.

    A block named twice is read twice; where blocks are written, the last one that names it wins.

    Raises:
        LayoutError: The format is not served, or tensors do not fit the row or the descriptor.
        ValueError: ``chunk_size``, ``skip_prefix_n_blocks``, ``direction``, an address or a block id is out
            of range, or addresses with another device than the CPU.
        TypeError: Tensors on one side and addresses on the other, or neither.
    """
    way = TransferDirection(int(direction))
    row = served_row(_OP, engine_kv_format, _why_not)
    per_object = _blocks_per_object(chunk_size, shape_desc.bs, skip_prefix_n_blocks)
    once = way is TransferDirection.H2D
    spans = cut(_OP, as_ids(_OP, block_ids), per_object, skip_prefix_n_blocks, len(objects), once)
    by_address = are_pointers(paged)
    if by_address:
        pages = _behind_pointers(paged, row, shape_desc, device)
    else:
        pages = paged_tensors(_OP, paged, row)
        _check_desc(pages, shape_desc)
    _check_ids(spans, pages.num_blocks)
    # All is checked before anything moves: a refused transfer leaves both sides as they were.
    chunks = _chunks(objects, spans, pages, shape_desc, chunk_size)
    if way is TransferDirection.D2H:
        for chunk in chunks.values():
            check_written(_OP, chunk)
    work = [(span, chunks[span.index]) for span in spans]
    _copy(pages, work, to_chunk=way is TransferDirection.D2H)


def _copy(pages: Paged, work: list[tuple[Span, torch.Tensor]], to_chunk: bool) -> None:
    """By address where all lies on the host, else by torch on tensors."""
    if work:
        side = _hostcopy if _all_on_host(pages, work) else _tensorcopy
        side.copy_blocks(pages.groups, work, to_chunk)


def _all_on_host(pages: Paged, work: list[tuple[Span, torch.Tensor]]) -> bool:
    return pages.device.type == "cpu" and all(chunk.device.type == "cpu" for _, chunk in work)


def _blocks_per_object(chunk_size: int, block_size: int, skip: int) -> int:
    if block_size < 1 or chunk_size < 1 or chunk_size % block_size:
        raise ValueError(f"{_OP}: chunk_size={chunk_size}: expected a positive multiple of bs={block_size}")
    if skip < 0:
        raise ValueError(f"{_OP}: skip_prefix_n_blocks={skip}: expected 0 or more")
    return chunk_size // block_size


def _behind_pointers(paged: Any, row: KVFormat, desc: PageBufferShapeDesc, device: Any) -> Paged:
    import torch

    if torch.device(device).type != "cpu":
        raise ValueError(f"{_OP}: device {device}: the baseline takes addresses of host memory only")
    return paged_pointers(_OP, paged, row, desc)


def _check_desc(pages: Paged, desc: PageBufferShapeDesc) -> None:
    """Tensors and descriptor must tell one story; a kernel that trusts the latter would go astray."""
    row = pages.row
    widths = pages.widths()
    shapes = {group.shape for group in pages.groups}
    heads = {1} if row.is_mla else {shape.sizes[2] for shape in shapes}
    found: dict[str, set[Any]] = {
        "kv_size": {row.kv_size},
        "nl": {len(widths)},
        "nb": {pages.num_blocks},
        "bs": {shape.sizes[1] for shape in shapes},
        "nh": heads,
        "hs": {width // max(1, min(heads)) for width in widths.values()},
        "element_size": {pages.itemsize},
    }
    if pages.num_blocks != 1:  # the stride of an axis of size one says nothing
        found["block_stride_elems"] = {shape.strides[0] for shape in shapes}
    for name, values in found.items():
        said = getattr(desc, name)
        if values != {said} and not (said == 0 and name in ("nb", "block_stride_elems")):
            listed = ", ".join(str(value) for value in sorted(values))
            raise LayoutError(f"{_OP}: {row.label}: shape_desc.{name}={said}: the tensors have {listed}")


def _check_ids(spans: list[Span], num_blocks: int | None) -> None:
    for span in spans:
        if min(span.ids) < 0 or (num_blocks is not None and max(span.ids) >= num_blocks):
            bad = next(i for i in span.ids if i < 0 or (num_blocks is not None and i >= num_blocks))
            bound = "0 or more" if num_blocks is None else f"0 to {num_blocks - 1}"
            raise ValueError(f"{_OP}: block id {bad}: expected {bound}")


def _chunks(
    objects: Sequence[Any], spans: list[Span], pages: Paged, desc: PageBufferShapeDesc, chunk_size: int
) -> dict[int, torch.Tensor]:
    """The objects that take part, as integers: ``[KV, NL, slots, NH * W]``."""
    stops = {span.index: (span.first + len(span.ids)) * desc.bs for span in spans}
    if pages.dtype is not None:
        return {index: _chunk(objects[index], index, pages, desc, stop) for index, stop in stops.items()}
    if not are_pointers(objects) and len(objects):
        raise TypeError(f"{_OP}: objects: expected addresses as pages are, got {type(objects[0]).__name__}")
    addresses = pointer_list(objects)
    shape = (desc.kv_size, desc.nl, chunk_size, desc.nh * desc.hs)
    dtype = int_dtype(_OP, desc.element_size)
    return {index: tensor_from_ptr(addresses[index], shape, dtype, "cpu") for index in stops}


def _chunk(obj: Any, index: int, pages: Paged, desc: PageBufferShapeDesc, stop: int) -> torch.Tensor:
    if not hasattr(obj, "as_strided"):
        raise TypeError(f"{_OP}: objects: expected tensors, got {type(obj).__name__}")
    whole = obj.unsqueeze(0) if obj.dim() == 3 and pages.row.kv_size == 1 else obj
    shape = (pages.row.kv_size, desc.nl, desc.nh * desc.hs)
    fits = (
        whole.dim() == 4
        and same_elements(obj.dtype, pages.dtype)
        and (whole.shape[0], whole.shape[1], whole.shape[3]) == shape
        and whole.shape[2] >= stop
    )
    if not fits:
        raise LayoutError(
            f"{_OP}: {pages.row.label}: object {index} is {tuple(obj.shape)} of {obj.dtype}: expected "
            f"({shape[0]}, {shape[1]}, {stop} or more, {shape[2]}) of {pages.dtype}"
        )
    return whole.view(int_dtype(_OP, pages.itemsize))
