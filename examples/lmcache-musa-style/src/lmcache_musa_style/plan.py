"""Which transfers this backend does itself, seen as plain strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache.v1.kv_layout import canonical_view, kv_format

if TYPE_CHECKING:
    from lmcache.v1.kv_layout import KVFormat


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of one object: ``chunk`` is ``[KV, NL, blocks, BS, NH * W]``, ``ids`` their pages."""

    chunk: Any
    ids: list[int]


@dataclass(frozen=True)
class Plan:
    """One transfer that is sound and that we serve. ``layers`` are ``[KV, NB, BS, NH, W]``, views on the pages."""

    layers: list[Any]
    spans: list[Span]


def has_blocks(row: KVFormat) -> str:
    """Why block transfers do not serve a layout; nothing if they do. What is no plan is the baseline's."""
    return "" if row.is_block_addressable else "it has no blocks"


def make_plan(
    paged: Any, objects: Sequence[Any], block_ids: Any, desc: Any, chunk_size: int, engine_kv_format: int, skip: int
) -> Plan | None:
    """The transfer as views, or None: then the torch baseline does it, or refuses it with a reason.

    Served is every layout with one tensor per layer and whole blocks.
    """
    row = kv_format(engine_kv_format)
    if row.dims.levels != ("NL",) or not row.is_block_addressable:
        return None
    if not isinstance(paged, (list, tuple)) or not paged or chunk_size < 1 or chunk_size % desc.bs or skip < 0:
        return None
    layers = [_pages(tensor, row) for tensor in paged]
    ids = [int(i) for i in (block_ids.tolist() if hasattr(block_ids, "tolist") else block_ids)]
    if not _agree(layers, desc) or not all(0 <= i < layers[0].shape[1] for i in ids[skip:]):
        return None
    if len(set(ids[skip:])) != len(ids[skip:]):
        return None  # the last write of a block counts, and kernels do not tell which one is last
    spans = []
    per_object = chunk_size // desc.bs
    if len(ids) > per_object * len(objects):
        return None
    for index, start in enumerate(range(0, len(ids), per_object)):
        first = max(skip - start, 0)
        mine = ids[start + first : start + per_object]
        if not mine:
            continue
        chunk = _chunk(objects[index], layers, first, len(mine))
        if chunk is None:
            return None
        spans.append(Span(chunk, mine))
    return Plan(layers, spans)


def _raw(tensor: Any) -> Any:
    """The same memory as integers of the same size: copies need not know about floats."""
    import torch

    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(same_size[tensor.element_size()])


def _pages(tensor: Any, row: KVFormat) -> Any:
    """A layer's tensor as ``[KV, NB, BS, NH, W]``, whatever the order of its axes."""
    view = canonical_view(row, tuple(tensor.shape), tuple(tensor.stride()))
    return _raw(tensor).as_strided(view.shape, view.strides, tensor.storage_offset())


def _agree(layers: list[Any], desc: Any) -> bool:
    """Whether all layers are alike, and as the descriptor says."""
    kv, nb, bs, nh, width = layers[0].shape
    told = (desc.kv_size, desc.nl, desc.nb or nb, desc.bs, desc.nh, desc.hs, desc.element_size)
    alike = all(layer.shape == layers[0].shape and layer.dtype == layers[0].dtype for layer in layers)
    return alike and told == (kv, len(layers), nb, bs, nh, width, layers[0].element_size())


def _chunk(obj: Any, layers: list[Any], first: int, count: int) -> Any:
    """``count`` blocks of an object from its block ``first`` on, or None if the object has another shape."""
    kv, _, bs, nh, width = layers[0].shape
    whole = _raw(obj)
    if whole.dim() == 3 and kv == 1:
        whole = whole.unsqueeze(0)
    fits = whole.dim() == 4 and whole.is_contiguous() and whole.dtype == layers[0].dtype
    if not fits or (whole.shape[0], whole.shape[1], whole.shape[3]) != (kv, len(layers), nh * width):
        return None
    if whole.shape[2] < (first + count) * bs:
        return None
    return whole.narrow(2, first * bs, count * bs).view(kv, len(layers), count, bs, nh * width)
