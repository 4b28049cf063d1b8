"""One call of a slot transfer: which rows can be served, and that all operands fit before anything moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._paged_operands import (
    are_pointers,
    check_written,
    pointer_list,
    same_elements,
)
from lmcache.v1.platform.torch_ops._planes import Plane, as_integers, planes_of
from lmcache.v1.platform.torch_ops._pointer_planes import PointerGeometry, planes_at
from lmcache.v1.platform.torch_ops._slots import as_slots, move, pair_up

if TYPE_CHECKING:
    import torch

__all__ = ["PageFacts", "has_slots", "is_separate", "separate_buffers", "transfer"]

_SEPARATE_BLOCKS, _SEPARATE_SLOTS = "TWO_X_NL_X_NB_BS_NH_HS", "TWO_X_NL_X_NBBS_NH_HS"


@dataclass(frozen=True)
class PageFacts:
    """What a caller says about the pages besides handing them over; 0 is unknown, or tight."""

    device: Any
    page_buffer_size: int
    block_size: int = 0
    head_size: int = 0
    block_stride_elems: int = 0


def has_slots(row: KVFormat) -> str:
    """Why the slots of ``row`` cannot be reached one by one; nothing if they can."""
    if not row.token_addressable:
        return "its pages can only be taken whole; use multi_layer_block_kv_transfer"
    return (
        ""
        if row.is_block_addressable or row.is_pbs_fused
        else "it has neither blocks nor slots of all blocks"
    )


def is_separate(row: KVFormat) -> str:
    """Why K and V of a layer are not two tensors with slots outside heads; nothing if they are."""
    separate = "2" in row.dims.levels and not row.is_hnd
    return has_slots(row) if separate else "K and V of a layer are not two tensors with slots outside heads"


def separate_buffers(op: str, buffers: Any) -> tuple[KVFormat, Any]:
    """The row and the nesting of K tensors followed by V tensors, or of a list of each.

    Args:
        op: For messages.
        buffers: Tensors ``[NB, BS, NH, HS]``, ``[slots, NH, HS]`` or ``[slots, hidden]``.

    Raises:
        TypeError: Not tensors.
        LayoutError: An odd number of them.
    """
    if not isinstance(buffers, (list, tuple)):
        raise TypeError(f"{op}: expected tensors or addresses of K and V, got {type(buffers).__name__}")
    if len(buffers) == 2 and all(isinstance(part, (list, tuple)) for part in buffers):
        buffers = [*buffers[0], *buffers[1]]
    for buffer in buffers:
        if not hasattr(buffer, "as_strided"):
            raise TypeError(f"{op}: expected tensors of K and V, got {type(buffer).__name__}")
    if len(buffers) % 2:
        raise LayoutError(f"{op}: {len(buffers)} buffers: expected one of K and one of V per layer")
    in_blocks = any(buffer.dim() == 4 for buffer in buffers)
    buffers = [buffer.unsqueeze(1) if buffer.dim() == 2 else buffer for buffer in buffers]
    half = len(buffers) // 2
    row = kv_format(_SEPARATE_BLOCKS if in_blocks else _SEPARATE_SLOTS)
    return row, [buffers[:half], buffers[half:]]


def transfer(
    op: str,
    row: KVFormat,
    kv: torch.Tensor,
    paged: Any,
    slots: Any,
    direction: int,
    facts: PageFacts | None = None,
    skip: int = 0,
) -> None:
    """Move slots between an object and pages.

    Args:
        op: For messages.
        row: The layout of the pages.
        kv: ``[KV, NL, T, hidden]``, or ``[NL, T, hidden]`` where KV is 1.
        paged: Tensors nested as ``row`` says, or, if there are ``facts``, addresses.
        slots: Integers ``[n]``, ``n <= T``.
        direction: ``TransferDirection``.
        facts: What must be known with addresses, and must agree with tensors.
        skip: Tokens of the prefix to leave alone.

    Raises:
        LayoutError, TypeError, ValueError: Operands that do not fit; nothing has moved.
    """
    way = TransferDirection(int(direction))
    obj = _object(op, row, kv)
    if way is TransferDirection.D2H:
        check_written(op, obj)
    planes = _planes(op, row, obj, paged, facts)
    _check_fit(op, row, kv, obj, planes)
    mapping = as_slots(op, slots)
    if len(mapping) > obj.shape[2]:
        raise ValueError(
            f"{op}: {len(mapping)} slots: expected at most the {obj.shape[2]} tokens of the object"
        )
    pairs = pair_up(op, mapping, skip, planes[0].grid.num_slots, planes[0].memory.device)
    if pairs is not None:
        move(planes, obj, pairs, way)


def _object(op: str, row: KVFormat, kv: Any) -> torch.Tensor:
    obj = as_integers(op, kv)
    if obj.dim() == 3 and row.kv_size == 1:
        obj = obj.unsqueeze(0)
    if obj.dim() != 4 or obj.shape[0] != row.kv_size:
        raise LayoutError(
            f"{op}: {row.label}: object of shape {tuple(kv.shape)}: expected {row.kv_size} for K and V, "
            "then layers, tokens and hidden"
        )
    if 0 in (obj.shape[1], obj.shape[3]):
        raise LayoutError(f"{op}: object of shape {tuple(kv.shape)}: expected layers and elements")
    if obj.shape[-1] > 1 and obj.stride(-1) != 1:
        raise LayoutError(f"{op}: object with strides {tuple(kv.stride())}: expected contiguous rows")
    return obj


def _planes(op: str, row: KVFormat, obj: torch.Tensor, paged: Any, facts: PageFacts | None) -> list[Plane]:
    if facts is not None and facts.page_buffer_size < 1:
        raise ValueError(f"{op}: page_buffer_size={facts.page_buffer_size}: expected 1 or more")
    if not are_pointers(paged):
        planes = planes_of(op, row, paged)
        if facts is not None:
            _check_facts(op, row, planes, facts)
        return planes
    if facts is None:
        raise TypeError(f"{op}: {row.label}: addresses alone do not say how pages lie; pass tensors")
    geometry = PointerGeometry(
        num_layers=obj.shape[1],
        hidden=obj.shape[3],
        itemsize=obj.element_size(),
        page_buffer_size=facts.page_buffer_size,
        block_size=facts.block_size,
        head_size=facts.head_size,
        block_stride_elems=facts.block_stride_elems,
    )
    return planes_at(op, row, pointer_list(paged), geometry, facts.device)


def _check_facts(op: str, row: KVFormat, planes: list[Plane], facts: PageFacts) -> None:
    """Tensors and facts must tell one story; a kernel that trusts the latter would go astray."""
    for plane in planes:
        found = {"page_buffer_size": plane.grid.num_slots}
        if facts.block_size and not row.is_pbs_fused:
            found["block_size"] = plane.grid.block_size
        if facts.head_size and "NP" not in row.dims.levels:
            found["head_size"] = plane.head_size
        if facts.block_stride_elems and plane.grid.block_stride:
            found["block_stride_elems"] = plane.grid.block_stride
        for name, size in found.items():
            if getattr(facts, name) != size:
                raise LayoutError(
                    f"{op}: {row.label}: {name}={getattr(facts, name)}: the tensors have {size}"
                )


def _check_fit(op: str, row: KVFormat, kv: torch.Tensor, obj: torch.Tensor, planes: list[Plane]) -> None:
    """Each row of the object is filled by one layer's planes, no more and no less."""
    widths = {(part, layer): 0 for part in range(obj.shape[0]) for layer in range(obj.shape[1])}
    for plane in planes:
        key = (plane.kv, plane.layer)
        widths[key] = widths.get(key, 0) + plane.grid.width
    hidden = obj.shape[3]
    if len(widths) != obj.shape[0] * obj.shape[1] or any(width != hidden for width in widths.values()):
        layers = 1 + max(plane.layer for plane in planes)
        found = ", ".join(str(width) for width in sorted(set(widths.values()) - {0}))
        raise LayoutError(
            f"{op}: {row.label}: object of shape {tuple(kv.shape)}: the pages have {layers} layers of {found}"
        )
    if not same_elements(kv.dtype, planes[0].dtype):
        raise LayoutError(f"{op}: {row.label}: object of {kv.dtype}: the pages have {planes[0].dtype}")
