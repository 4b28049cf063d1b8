"""Whole blocks between pages and chunk objects, by index operations whose shapes do not follow the request.

On either side a plane is seen as ``[blocks, BS, NH, W]``. A batch of ids, filled up to one of the fixed sizes, chooses
blocks of the pages; a batch of places as long chooses those of an object on the device, and native code spreads them
over objects in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.v1.kv_layout import KVFormat, canonical_view, kv_format
from lmcache.v1.platform.fixed_shapes import (
    FixedShapeMover,
    Plane,
    batches,
    indexable,
    last_of_each,
    padded,
)

if TYPE_CHECKING:
    import torch

__all__ = ["PagePlane", "leaves", "page_planes", "transfer"]


class PagePlane(NamedTuple):
    """K or V of one layer; ``column`` is its first element in a slot's row of an object."""

    pages: torch.Tensor
    layer: int
    kv: int
    column: int


class _Block(NamedTuple):
    """A block to move: its id, its object, and its place in that."""

    id: int
    object: int
    place: int


def transfer(
    mover: FixedShapeMover, paged: Any, objects: Sequence[Any], block_ids: Any, device: Any, direction: int, desc: Any,
    chunk_size: int, engine_kv_format: int, skip: int = 0,
) -> bool:  # fmt: skip
    """Move blocks; see ``DeviceOps``. False, and nothing has moved, if the operands are not for this path."""
    import torch

    way = int(direction)
    row = kv_format(engine_kv_format)
    with torch.inference_mode():
        planes = page_planes(row, paged)
        if planes is None or way not in (0, 1) or not _as_described(row, planes, desc):
            return False
        blocks = _blocks(block_ids, chunk_size, desc.bs, skip, len(objects), planes[0].pages.shape[0])
        if blocks is None:
            return False
        if way == 0:
            blocks = [blocks[at] for at in last_of_each([block.id for block in blocks])]
        chunks = {block.object: _chunk(objects[block.object], row, planes, desc) for block in blocks}
        if any(not _holds(chunks[block.object], block, desc.bs) for block in blocks):
            return False
        for index, chunk in chunks.items():
            if chunk.device.type != "cpu":
                _on_device(
                    mover, planes, chunk, [block for block in blocks if block.object == index], desc.bs, way
                )
    staged = [block for block in blocks if chunks[block.object].device.type == "cpu"]
    if staged:
        _through_the_stage(mover, planes, chunks, staged, desc.bs, way)
    return True


# ------------------------------------------------------------------------------------------------ what is given


def page_planes(row: KVFormat, paged: Any) -> list[PagePlane] | None:
    """All planes as ``[NB, BS, NH, W]``, views of the pages; None if the structure is not as the row says."""
    if not row.is_block_addressable:
        return None
    if row.depth == 0 and isinstance(paged, (list, tuple)) and len(paged) == 1:
        paged = paged[0]
    found: list[PagePlane] = []
    columns: dict[tuple[int, int], int] = {}
    for at, tensor in leaves(paged, row.dims.levels, {}):
        if tensor is None or tensor.device.type == "cpu":
            return None
        view = canonical_view(row, tuple(tensor.shape), tuple(tensor.stride()))
        if view.overlaps or (not row.token_addressable and not tensor[0].is_contiguous()):
            return None
        for kv in range(view.shape[0]):
            for step in range(view.num_layers):
                start = tensor.storage_offset() + step * view.layer_stride + kv * view.strides[0]
                pages = indexable(tensor).as_strided(view.shape[1:], view.strides[1:], start)
                layer, plane = at.get("NL", step), at.get("2", kv)
                column = columns.get((layer, plane), 0)
                columns[layer, plane] = column + view.shape[3] * view.shape[4]
                found.append(PagePlane(pages, layer, plane, column))
    alike = {(plane.pages.dtype, plane.pages.device, tuple(plane.pages.shape[:3])) for plane in found}
    return found if len(alike) == 1 else None


def leaves(node: Any, levels: tuple[str, ...], at: dict[str, int]) -> Iterator[tuple[dict[str, int], Any]]:
    """The tensors with their position per level; None in the place of anything else."""
    if not levels:
        yield at, node if hasattr(node, "as_strided") else None
    elif not isinstance(node, (list, tuple)) or (levels[0] == "2" and len(node) != 2):
        yield at, None
    else:
        for index, child in enumerate(node):
            yield from leaves(child, levels[1:], {**at, levels[0]: index})


def _as_described(row: KVFormat, planes: list[PagePlane], desc: Any) -> bool:
    """Whether descriptor and tensors tell one story, with rows of one width in all layers."""
    first = planes[0].pages
    widths: dict[tuple[int, int], int] = {}
    for plane in planes:
        key = (plane.layer, plane.kv)
        widths[key] = widths.get(key, 0) + plane.pages.shape[2] * plane.pages.shape[3]
    layers = {layer for layer, _ in widths}
    strides = {plane.pages.stride(0) for plane in planes}
    return (
        len(set(widths.values())) == 1
        and len(widths) == len(layers) * row.kv_size
        and (desc.kv_size, desc.nl, desc.bs) == (row.kv_size, len(layers), first.shape[1])
        and desc.nh == (1 if row.is_mla else first.shape[2])
        and desc.nh * desc.hs in widths.values()
        and desc.element_size == first.element_size()
        and desc.nb in (0, first.shape[0])
        and (first.shape[0] == 1 or desc.block_stride_elems == 0 or strides == {desc.block_stride_elems})
    )


def _blocks(
    block_ids: Any, chunk_size: int, block_size: int, skip: int, num_objects: int, num_blocks: int
) -> list[_Block] | None:
    """What is to move, in order; None where a number is out of range."""
    if chunk_size < 1 or chunk_size % block_size or skip < 0:
        return None
    per_object = chunk_size // block_size
    ids = block_ids.tolist() if hasattr(block_ids, "tolist") else list(block_ids)
    if len(ids) > per_object * num_objects or not all(type(block) is int for block in ids):
        return None
    if any(not 0 <= block < num_blocks for block in ids[skip:]):
        return None
    return [_Block(ids[at], *divmod(at, per_object)) for at in range(skip, len(ids))]


def _chunk(obj: Any, row: KVFormat, planes: list[PagePlane], desc: Any) -> Any:
    """An object as ``[KV, NL, slots, row]`` in the pages' type; None if it is not such a one."""
    import torch

    pages = planes[0].pages
    if not hasattr(obj, "as_strided") or obj.element_size() != pages.element_size():
        return None
    whole = indexable(obj.unsqueeze(0) if obj.dim() == 3 and row.kv_size == 1 else obj)
    if whole.dim() != 4 or whole.device not in (pages.device, torch.device("cpu")):
        return None
    kv, layers, slots, width = whole.shape
    if (kv, layers, width) != (row.kv_size, desc.nl, desc.nh * desc.hs):
        return None
    s = whole.stride()
    apart = s[3] == 1 and s[2] >= width and s[1] >= s[2] * slots and (kv == 1 or s[0] >= s[1] * layers)
    if not apart:
        return None
    if whole.dtype != pages.dtype:
        if pages.element_size() != 1:
            return None
        whole = whole.view(pages.dtype)
    return whole


def _holds(chunk: Any, block: _Block, block_size: int) -> bool:
    return chunk is not None and (block.place + 1) * block_size <= chunk.shape[2]


# ------------------------------------------------------------------------------------------------- what is done


def _on_device(
    mover: FixedShapeMover,
    planes: list[PagePlane],
    chunk: torch.Tensor,
    blocks: list[_Block],
    block_size: int,
    way: int,
) -> None:
    """Queued on the current stream: both sides are chosen by index. Each batch is a graph of its own."""
    import torch

    mover.end_step()
    for first, count, size in batches(len(blocks), mover.sizes):
        taken = blocks[first : first + count]
        both = [padded([block.id for block in taken], size), padded([block.place for block in taken], size)]
        ids, places = torch.tensor(both).to(chunk.device).unbind(0)
        for plane in planes:
            mine = _object_blocks(chunk, plane, block_size)
            if way == 1:
                mine.index_copy_(0, places, plane.pages.index_select(0, ids))
            else:
                plane.pages.index_copy_(0, ids, mine.index_select(0, places))
        mover.end_step()


def _object_blocks(chunk: torch.Tensor, plane: PagePlane, block_size: int) -> torch.Tensor:
    """The plane's part of an object as ``[blocks, BS, NH, W]``."""
    heads, width = plane.pages.shape[2:]
    part = chunk[plane.kv, plane.layer]
    slot = chunk.stride(2)
    shape = (chunk.shape[2] // block_size, block_size, heads, width)
    return part.as_strided(shape, (slot * block_size, slot, width, 1), part.storage_offset() + plane.column)


def _through_the_stage(
    mover: FixedShapeMover,
    planes: list[PagePlane],
    chunks: dict[int, Any],
    blocks: list[_Block],
    block_size: int,
    way: int,
) -> None:
    """By way of the stage, for objects in host memory; done on return."""
    item = planes[0].pages.element_size()
    for slot in sorted({chunks[block.object].stride(2) for block in blocks}):
        mine = [block for block in blocks if chunks[block.object].stride(2) == slot]
        moved = [_host_plane(plane, chunks, mine, block_size, slot, item) for plane in planes]
        mover.move(moved, [block.id for block in mine], way == 1)


def _host_plane(
    plane: PagePlane, chunks: dict[int, Any], blocks: list[_Block], block_size: int, slot: int, item: int
) -> Plane:
    hidden = plane.pages.shape[2] * plane.pages.shape[3]
    starts = {
        index: chunk.data_ptr()
        + (plane.kv * chunk.stride(0) + plane.layer * chunk.stride(1) + plane.column) * item
        for index, chunk in chunks.items()
    }
    hosts = [starts[block.object] + block.place * block_size * slot * item for block in blocks]
    if slot == hidden or block_size == 1:
        return Plane(plane.pages, hosts, 1, block_size * hidden * item, 0)
    return Plane(plane.pages, hosts, block_size, hidden * item, slot * item)
