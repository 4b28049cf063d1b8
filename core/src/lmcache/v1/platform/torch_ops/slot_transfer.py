"""Transfer of single token slots between paged KV and objects that have a row per token.

An object is token-major, ``[KV, NL, T, hidden]``, whatever the layout of the pages: ``KV`` is 2 where K and V
are apart, ``hidden`` is heads times head size (times two where K and V are packed; the widths of all planes
where a layer has several). Every op here says what its operands mean; :mod:`._planes` finds the slots and
:mod:`._slots` moves them.

What holds for each of them:

* A negative slot moves nothing: neither the page nor the object's row is touched.
* A slot beyond the pages raises ValueError before anything moves, if the host may look at the slots. If slots
  and pages both lie on a device it may not, without waiting for the device: there such a slot counts as
  negative. If no slot is valid there, the first token's row, or slot 0, is written as it was.
* Slots written to (H2D) must differ from each other. Where two are the same, each element of that slot is
  afterwards that of one of the rows.
* On a device all is queued on the current stream. An object elsewhere is staged on the pages' device, with
  copies that do not wait if its memory is pinned; where single slots are negative, its rows between the
  first and the last that take part are then written back as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.base.op_contract import serves, stream_ordered, takes
from lmcache.v1.platform.torch_ops._paged_operands import are_pointers
from lmcache.v1.platform.torch_ops._slot_call import (
    PageFacts,
    has_slots,
    is_separate,
    separate_buffers,
    transfer,
)
from lmcache.v1.platform.torch_ops.formats import served_row

if TYPE_CHECKING:
    import torch

__all__ = [
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]


def _has_slots_by_layer(row: KVFormat) -> str:
    if row.is_cross_layer:
        return "one tensor holds all layers; pass a layer's view of it as the format that the view has"
    return has_slots(row)


def _has_separate_buffers(row: KVFormat) -> str:
    if row.is_mla or row.is_kv_list:
        return has_slots(row)
    return "K and V are not a list of buffers each; use multi_layer_kv_transfer"


@stream_ordered
@serves(has_slots)
@takes("tensors", "pointers")
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
    """Copy token slots of all layers between pages and one object.

    Args:
        kv: ``[KV, NL, T, hidden]``, or ``[NL, T, hidden]`` where KV is 1; rows contiguous.
        ptrs: The paged tensors, nested as the format's row says, any strides; or the addresses of tight
            ones: a 1-D integer tensor or a list of ints in the row's order (by layer; K list, then V list;
            K and V of a layer side by side; one for a tensor of all layers).
        slot_mapping: Integers ``[n]``, ``n <= T``; token ``t`` belongs to slot ``slot_mapping[t]``.
        device: Where addresses lie. Tensors say it themselves.
        page_buffer_size: Slots of all blocks.
        direction: ``TransferDirection``: H2D (0) writes the pages, D2H (1) reads them.
        format: Id of the layout's row; any that is token-addressable and has blocks or slots.
        block_size: Slots per block. With pointers, 0 is enough where slots follow blocks without padding.
        head_size: Elements per head and slot, the packed width where K and V are packed. With pointers, 0 is
            enough where a slot's heads lie together. Tensors say both sizes; what is given must agree.
        skip_prefix_n_tokens: The first so many tokens are left alone; their slots are not looked at.
        block_stride_elems: With pointers, elements between blocks where they are padded; 0 is tight.

    Raises:
        LayoutError: The format is not served, or not without what is missing; operands that do not fit.
        TypeError: Operands of another kind.
        ValueError: An argument, an address or a slot out of range.
    """
    op = "multi_layer_kv_transfer"
    row = served_row(op, format, has_slots)
    facts = PageFacts(device, page_buffer_size, block_size, head_size, block_stride_elems)
    transfer(op, row, kv, ptrs, slot_mapping, direction, facts, skip_prefix_n_tokens)


@stream_ordered
@serves(_has_separate_buffers)
@takes("tensors", "pointers")
def multi_layer_kv_transfer_unilateral(
    kv: torch.Tensor,
    ptrs: Any,
    slots: Any,
    device: Any,
    page_buffer_size: int,
    direction: int,
    format: int,
) -> None:
    """Copy token slots of all layers where K and V of every layer are tight buffers ``[slots, hidden]``.

    Args:
        kv: ``[2, NL, T, hidden]``; for MLA, ``[1, NL, T, hidden]`` or ``[NL, T, hidden]``.
        ptrs: Addresses of NL K buffers, then of NL V buffers; or tensors in that order, flat or as two lists,
            each ``[slots, hidden]``, ``[slots, NH, HS]`` or ``[NB, BS, NH, HS]``. For MLA as in
            :func:`multi_layer_kv_transfer`, which does the work.
        slots, device, page_buffer_size, direction, format: As there.

    Raises:
        LayoutError, TypeError, ValueError: As there.
    """
    op = "multi_layer_kv_transfer_unilateral"
    row = served_row(op, format, _has_separate_buffers)
    if not row.is_mla and not are_pointers(ptrs):
        row, ptrs = separate_buffers(op, ptrs)
    transfer(op, row, kv, ptrs, slots, direction, PageFacts(device, page_buffer_size))


@stream_ordered
@serves(_has_slots_by_layer)
@takes("tensors")
def single_layer_kv_transfer(
    lmc: torch.Tensor,
    paged: Any,
    slots: Any,
    direction: int,
    format: int,
    token_major: bool = False,
) -> None:
    """Copy token slots of one layer.

    Args:
        lmc: ``[T, 2, hidden]`` if ``token_major``, else ``[2, T, hidden]``. Where KV is 1 (MLA, packed K and
            V, one of both): ``[T, hidden]``, or with an axis of 1 in the place of the 2. ``hidden`` is
            ``NH * CS`` where K and V are packed: per head first K, then V.
        paged: The layer's tensor, or its tensors where the format's row nests them (K and V; planes).
        slots: Integers ``[n]``, ``n <= T``.
        direction: ``TransferDirection``.
        format: Id of the layout's row, of one layer: not a tensor of all layers.
        token_major: See ``lmc``.

    Raises:
        LayoutError, TypeError, ValueError: As in :func:`multi_layer_kv_transfer`.
    """
    op = "single_layer_kv_transfer"
    row = served_row(op, format, _has_slots_by_layer)
    if row.is_kv_list and isinstance(paged, (list, tuple)):
        paged = [[part] for part in paged]
    else:
        paged = [paged]
    transfer(op, row, _of_one_layer(lmc, row.kv_size, token_major), paged, slots, direction)


@stream_ordered
@serves(is_separate)
@takes("tensors")
def single_layer_kv_transfer_sgl(
    lmc: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Any,
    direction: int,
    token_major: bool = False,
) -> None:
    """Copy token slots of one layer whose K and V are two tensors.

    Args:
        lmc: ``[T, 2, hidden]`` if ``token_major``, else ``[2, T, hidden]``.
        k, v: ``[NB, BS, NH, HS]``, ``[slots, NH, HS]`` or ``[slots, hidden]``, any strides.
        slots: Integers ``[n]``, ``n <= T``.
        direction: ``TransferDirection``.
        token_major: See ``lmc``.

    Raises:
        LayoutError, TypeError, ValueError: As in :func:`multi_layer_kv_transfer`.
    """
    op = "single_layer_kv_transfer_sgl"
    row, paged = separate_buffers(op, [k, v])
    transfer(op, row, _of_one_layer(lmc, row.kv_size, token_major), paged, slots, direction)


def _of_one_layer(lmc: torch.Tensor, kv_size: int, token_major: bool) -> torch.Tensor:
    """``[KV, 1, T, hidden]``, a view; anything else is left to the checks that follow."""
    rank = lmc.dim() if hasattr(lmc, "dim") else 0
    if rank == 2 and kv_size == 1:
        return lmc.unsqueeze(0).unsqueeze(0)
    if rank == 3:
        return (lmc.transpose(0, 1) if token_major else lmc).unsqueeze(1)
    return lmc
