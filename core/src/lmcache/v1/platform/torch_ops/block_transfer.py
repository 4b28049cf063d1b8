"""Whole-block transfer between paged KV tensors and chunk objects.

A chunk object is token-major, ``[KV, NL, slots, NH * W]``, whatever the layout of the pages. Both sides are
viewed as ``[KV, blocks, BS, NH, W]``: the pages through the layout's canonical view, the object by splitting
its axes. A transfer is then one strided copy per run of consecutive blocks, layer and object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, canonical_view, kv_format
from lmcache.v1.platform.base.op_contract import stream_ordered
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

if TYPE_CHECKING:
    import torch

__all__ = ["multi_layer_block_kv_transfer"]

_OP = "multi_layer_block_kv_transfer"


@dataclass(frozen=True)
class _Part:
    """One tensor's share of a layer: ``pages`` is ``[KV, NB, BS, NH, W]``, a view on the engine's memory."""

    pages: torch.Tensor
    dtype: torch.dtype
    """Of the engine's tensor; ``pages`` itself is seen as integers."""
    layer: int
    kv: int
    """First plane of the object that ``pages`` fills."""
    column: int
    """First element in the object's last axis that ``pages`` fills."""


@dataclass(frozen=True)
class _Span:
    """The blocks of one object that take part: ids, and the position of the first in the object."""

    index: int
    first: int
    ids: list[int]


@stream_ordered
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
    """Copy whole blocks between paged KV tensors and chunk objects; see ``DeviceOps`` for the contract.

    Serves every row that has a block axis, with tensors as operands; ``device`` is read off them. On a device
    the copies are queued on the current stream.
    """
    way = TransferDirection(int(direction))
    row = kv_format(engine_kv_format)
    if not row.is_block_addressable:
        raise LayoutError(f"{_OP} does not serve {row.label}: it has no block axis")
    spans = _spans(_as_ids(block_ids), chunk_size, shape_desc.bs, skip_prefix_n_blocks, len(objects))
    parts = _parts(paged, row)
    _check_desc(row, parts, shape_desc)
    _check_ids(spans, parts)
    # All is checked before anything moves: a refused transfer leaves both sides as they were.
    chunks = [_chunk_view(objects[span.index], row, shape_desc, parts[0].dtype, span) for span in spans]
    for span, chunk in zip(spans, chunks, strict=True):
        runs = list(_runs(span.ids))
        for part in parts:
            _copy(part, chunk, runs, way)


def _spans(ids: list[int], chunk_size: int, block_size: int, skip: int, num_objects: int) -> list[_Span]:
    """Cut the ids into objects and drop the skipped prefix."""
    if block_size < 1 or chunk_size < 1 or chunk_size % block_size:
        raise ValueError(f"{_OP}: chunk_size={chunk_size}: expected a positive multiple of bs={block_size}")
    if skip < 0:
        raise ValueError(f"{_OP}: skip_prefix_n_blocks={skip}: expected 0 or more")
    per_object = chunk_size // block_size
    if len(ids) > per_object * num_objects:
        raise ValueError(
            f"{_OP}: {len(ids)} block ids: expected at most {per_object * num_objects} "
            f"({num_objects} objects of {per_object} blocks)"
        )
    spans = []
    for index, start in enumerate(range(0, len(ids), per_object)):
        first = max(skip - start, 0)
        taken = ids[start + first : start + per_object] if first < per_object else []
        if taken:
            spans.append(_Span(index, first, taken))
    return spans


def _parts(paged: Any, row: KVFormat) -> list[_Part]:
    """View every tensor of the structure canonically, one part per tensor and layer."""
    if row.depth == 0 and isinstance(paged, (list, tuple)) and len(paged) == 1:
        paged = paged[0]
    parts: list[_Part] = []
    columns: dict[int, int] = {}
    for at, tensor in _leaves(paged, row, row.dims.levels, {}):
        view = canonical_view(row, tuple(tensor.shape), tuple(tensor.stride()))
        raw = _as_raw(tensor)
        width = view.shape[3] * view.shape[4]
        for step in range(view.num_layers):
            layer = at.get("NL", step)
            column = columns.get(layer, 0) if "NP" in row.dims.levels else 0
            columns[layer] = column + width
            offset = tensor.storage_offset() + step * view.layer_stride
            pages = raw.as_strided(view.shape, view.strides, offset)
            parts.append(_Part(pages, tensor.dtype, layer, at.get("2", 0), column))
    if not parts:
        raise LayoutError(f"{_OP}: {row.label}: no tensors given")
    if len({part.dtype for part in parts}) > 1:
        raise LayoutError(f"{_OP}: {row.label}: tensors differ in dtype")
    return parts


def _leaves(
    node: Any, row: KVFormat, levels: tuple[str, ...], at: dict[str, int]
) -> Iterator[tuple[dict[str, int], torch.Tensor]]:
    """Walk the nesting that the row declares; yield each tensor with its position per level."""
    if not levels:
        if not hasattr(node, "as_strided"):
            raise TypeError(f"{_OP}: {row.label}: expected a tensor of {row.dims}, got {type(node).__name__}")
        yield at, node
        return
    if not isinstance(node, (list, tuple)):
        raise TypeError(f"{_OP}: {row.label}: expected {row.dims}, got {type(node).__name__} for {levels[0]}")
    if levels[0] == "2" and len(node) != 2:
        raise LayoutError(f"{_OP}: {row.label}: expected K and V, got {len(node)} entries")
    for index, child in enumerate(node):
        yield from _leaves(child, row, levels[1:], {**at, levels[0]: index})


def _as_raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size: copies then serve types that torch cannot index."""
    import torch

    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    if size not in same_size:
        raise LayoutError(f"{_OP}: elements of {size} bytes ({tensor.dtype}) are not supported")
    return tensor.view(same_size[size])


def _same_elements(one: torch.dtype, other: torch.dtype) -> bool:
    """Equal, or bytes on one side: an engine may keep 8-bit floats as plain bytes."""
    import torch

    return one == other or (torch.uint8 in (one, other) and one.itemsize == other.itemsize)


def _check_desc(row: KVFormat, parts: list[_Part], desc: PageBufferShapeDesc) -> None:
    """Tensors and descriptor must tell one story; a kernel that trusts the latter would go astray."""
    shape = parts[0].pages.shape
    layers = {part.layer for part in parts}
    columns = {part.layer: part.column + part.pages.shape[3] * part.pages.shape[4] for part in parts}
    heads = 1 if row.is_mla else shape[3]
    found = {
        "kv_size": {row.kv_size},
        "nl": {len(layers)},
        "nb": {part.pages.shape[1] for part in parts},
        "bs": {part.pages.shape[2] for part in parts},
        "nh": {1 if row.is_mla else part.pages.shape[3] for part in parts},
        "hs": {width // heads for width in columns.values()},
        "element_size": {part.pages.element_size() for part in parts},
    }
    for name, values in found.items():
        said = getattr(desc, name)
        if values != {said} and not (name == "nb" and said == 0 and len(values) == 1):
            listed = ", ".join(str(value) for value in sorted(values))
            raise LayoutError(f"{_OP}: {row.label}: shape_desc.{name}={said}: the tensors have {listed}")


def _check_ids(spans: list[_Span], parts: list[_Part]) -> None:
    num_blocks = parts[0].pages.shape[1]
    for span in spans:
        if min(span.ids) < 0 or max(span.ids) >= num_blocks:
            bad = next(i for i in span.ids if not 0 <= i < num_blocks)
            raise ValueError(f"{_OP}: block id {bad}: expected 0 to {num_blocks - 1}")


def _chunk_view(
    obj: Any, row: KVFormat, desc: PageBufferShapeDesc, dtype: torch.dtype, span: _Span
) -> torch.Tensor:
    """The blocks of ``span`` in an object, as ``[KV, NL, n, BS, NH * W]``."""
    if not hasattr(obj, "as_strided"):
        raise TypeError(f"{_OP}: objects: expected tensors, got {type(obj).__name__}")
    whole = _as_raw(obj)
    if whole.dim() == 3 and row.kv_size == 1:
        whole = whole.unsqueeze(0)
    start, stop = span.first * desc.bs, (span.first + len(span.ids)) * desc.bs
    hidden = desc.nh * desc.hs
    fits = (
        whole.dim() == 4
        and _same_elements(obj.dtype, dtype)
        and (whole.shape[0], whole.shape[1], whole.shape[3]) == (row.kv_size, desc.nl, hidden)
        and whole.shape[2] >= stop
    )
    if not fits:
        raise LayoutError(
            f"{_OP}: {row.label}: object {span.index} is {tuple(obj.shape)} of {obj.dtype}: expected "
            f"({row.kv_size}, {desc.nl}, {stop} or more, {hidden}) of {dtype}"
        )
    return whole.narrow(2, start, stop - start).view(row.kv_size, desc.nl, len(span.ids), desc.bs, hidden)


def _copy(part: _Part, chunk: torch.Tensor, runs: list[tuple[int, int, int]], way: TransferDirection) -> None:
    """Move one part of one object, one copy per run of consecutive blocks."""
    planes, _, _, heads, width = part.pages.shape
    mine = chunk[part.kv : part.kv + planes, part.layer]
    mine = mine.narrow(-1, part.column, heads * width).view(*mine.shape[:-1], heads, width)
    for position, block, count in runs:
        pages, slots = part.pages.narrow(1, block, count), mine.narrow(1, position, count)
        if way is TransferDirection.D2H:
            slots.copy_(pages)
        else:
            pages.copy_(slots)


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (position of the first, first id, length) of each run of consecutive ids."""
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            yield start, ids[start], at - start
            start = at


def _as_ids(block_ids: Any) -> list[int]:
    ids = block_ids.tolist() if hasattr(block_ids, "tolist") else list(block_ids)
    return [int(i) for i in ids]
