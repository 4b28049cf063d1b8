"""Single slots between pages and an object in host memory, by index operations whose shapes do not follow the request.

A plane is seen as ``[slots, NH, W]``, and its slots are moved as :mod:`.fixed_shapes` moves blocks: in batches of a
few sizes, through a stage. Layouts whose blocks do not follow one another slot by slot are left to the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.v1.kv_layout import KVFormat, kv_format
from lmcache.v1.platform.fixed_shape_blocks import PagePlane, leaves, page_planes
from lmcache.v1.platform.fixed_shapes import FixedShapeMover, Plane, indexable

if TYPE_CHECKING:
    import torch

__all__ = ["multi_layer", "single_layer"]


class _Sizes(NamedTuple):
    """What a caller says of the pages; 0 is not said."""

    slots: int = 0
    block: int = 0
    head: int = 0
    block_stride: int = 0


def multi_layer(
    mover: FixedShapeMover, kv: Any, ptrs: Any, slot_mapping: Any, device: Any, page_buffer_size: int, direction: int,
    format: int, block_size: int = 0, head_size: int = 0, skip_prefix_n_tokens: int = 0, block_stride_elems: int = 0,
) -> bool:  # fmt: skip
    """``multi_layer_kv_transfer``; False, and nothing has moved, if the operands are not for this path."""
    said = _Sizes(page_buffer_size, block_size, head_size, block_stride_elems)
    return _transfer(mover, kv_format(format), kv, ptrs, slot_mapping, direction, said, skip_prefix_n_tokens)


def single_layer(
    mover: FixedShapeMover, lmc: Any, paged: Any, slots: Any, direction: int, format: int, token_major: bool = False
) -> bool:  # fmt: skip
    """``single_layer_kv_transfer``; False as of :func:`multi_layer`."""
    row = kv_format(format)
    if row.is_cross_layer or row.is_kv_list or not hasattr(lmc, "as_strided"):
        return False
    if lmc.dim() == 2 and row.kv_size == 1:
        obj = lmc.unsqueeze(0).unsqueeze(0)
    elif lmc.dim() == 3:
        obj = (lmc.transpose(0, 1) if token_major else lmc).unsqueeze(1)
    else:
        return False
    return _transfer(mover, row, obj, [paged], slots, direction, _Sizes(), 0)


def _transfer(
    mover: FixedShapeMover, row: KVFormat, kv: Any, paged: Any, mapping: Any, direction: int, said: _Sizes, skip: int
) -> bool:  # fmt: skip
    way = int(direction)
    if (
        way not in (0, 1)
        or not hasattr(kv, "as_strided")
        or kv.device.type != "cpu"
        or not row.token_addressable
    ):
        return False
    planes = _by_slot(row, paged, said)
    obj = _rows(row, kv, planes) if planes else None
    if not planes or obj is None:
        return False
    taking = _taking(mapping, skip, obj.shape[2], planes[0].pages.shape[0])
    if taking is None:
        return False
    tokens, slots = taking
    mover.move([_plane(plane, obj, tokens) for plane in planes], slots, way == 1)
    return True


def _by_slot(row: KVFormat, paged: Any, said: _Sizes) -> list[PagePlane] | None:
    """The planes as ``[slots, NH, W]``; None if they cannot be seen so, or are not what the caller says."""
    if row.is_pbs_fused:
        found = _fused(row, paged)
        block = stride = 0
    else:
        blocks = page_planes(row, paged)
        if not blocks:
            return None
        count, block = blocks[0].pages.shape[:2]
        stride = blocks[0].pages.stride(0)
        if count > 1 and any(one.pages.stride(0) != block * one.pages.stride(1) for one in blocks):
            return None
        found = [
            plane._replace(
                pages=pages.as_strided(
                    (count * block, *pages.shape[2:]), pages.stride()[1:], pages.storage_offset()
                )
            )
            for plane in blocks
            for pages in [plane.pages]
        ]
    if not found:
        return None
    slots, _, width = found[0].pages.shape
    told = zip(said, (slots, block, 0 if row.is_mla else width, stride), strict=True)
    return found if all(mine in (0, theirs) or not theirs for mine, theirs in told) else None


def _fused(row: KVFormat, paged: Any) -> list[PagePlane] | None:
    found: list[PagePlane] = []
    for at, tensor in leaves(paged, row.dims.levels, {}):
        if tensor is None or tensor.device.type == "cpu" or tensor.dim() != 3:
            return None
        found.append(PagePlane(indexable(tensor), at.get("NL", 0), at.get("2", 0), 0))
    kinds = {(one.pages.dtype, one.pages.device, tuple(one.pages.shape)) for one in found}
    return found if len(kinds) == 1 else None


def _rows(row: KVFormat, kv: torch.Tensor, planes: Sequence[PagePlane]) -> torch.Tensor | None:
    """The object as ``[KV, NL, T, hidden]`` with whole rows; None if it does not fit the planes."""
    obj = kv.unsqueeze(0) if kv.dim() == 3 and row.kv_size == 1 else kv
    layers = 1 + max(plane.layer for plane in planes)
    first = [plane for plane in planes if (plane.layer, plane.kv) == (0, 0)]
    hidden = sum(plane.pages.shape[1] * plane.pages.shape[2] for plane in first)
    fits = obj.dim() == 4 and (obj.shape[0], obj.shape[1], obj.shape[3]) == (row.kv_size, layers, hidden)
    whole = fits and obj.stride(3) == 1 and len(planes) == row.kv_size * layers * len(first)
    return obj if whole and obj.element_size() == planes[0].pages.element_size() else None


def _taking(mapping: Any, skip: int, tokens: int, total: int) -> tuple[list[int], list[int]] | None:
    """Tokens that take part and their slots; None where a number is out of range."""
    slots = mapping.tolist() if hasattr(mapping, "tolist") else list(mapping)
    if skip < 0 or len(slots) > tokens or not all(type(slot) is int for slot in slots):
        return None
    if any(slot >= total for slot in slots[skip:]):
        return None
    taken = [at for at in range(skip, len(slots)) if slots[at] >= 0]
    return taken, [slots[at] for at in taken]


def _plane(plane: PagePlane, obj: torch.Tensor, tokens: Sequence[int]) -> Plane:
    item = obj.element_size()
    start = obj.data_ptr() + (plane.kv * obj.stride(0) + plane.layer * obj.stride(1) + plane.column) * item
    step = obj.stride(2) * item
    nbytes = plane.pages.shape[1] * plane.pages.shape[2] * item
    return Plane(plane.pages, [start + token * step for token in tokens], 1, nbytes, 0)
