"""Moving slots between planes and an object that has a row per token.

Both sides are cut into rows of whole words, so that what moves is a choice of rows: ``index_select`` one way,
``index_copy_`` the other. On the host, long runs of consecutive slots are plain copies instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._planes import Plane
from lmcache.v1.platform.torch_ops._slot_grid import SlotGrid

if TYPE_CHECKING:
    import torch

__all__ = ["Pairs", "as_slots", "move", "pair_up"]

#: Mean bytes of a run from which one copy per run is quicker than choosing rows (measured, one thread).
_LONG_RUN = 128 * 1024


@dataclass(frozen=True)
class Pairs:
    """Slots and the tokens that belong to them, none out of range."""

    first: int
    """First token of the stretch that takes part."""
    count: int
    """Tokens of that stretch."""
    slots: torch.Tensor
    """int64 ``[n]``, on the pages' device."""
    tokens: torch.Tensor | None = None
    """int64 ``[n]``, counted from ``first``; None for all of the stretch in order."""
    any_valid: torch.Tensor | None = None
    """A bool on the device: False if no slot is valid, and then both sides must stay. None for True."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """(token from ``first``, slot, length) of the runs of consecutive slots, where that is known."""


def as_slots(op: str, slot_mapping: Any) -> torch.Tensor:
    """The slots as int64 ``[n]``, where they are.

    Raises:
        TypeError: Not one axis of integers.
    """
    import torch

    slots = slot_mapping if hasattr(slot_mapping, "as_strided") else torch.tensor(list(slot_mapping))
    if slots.numel() and (slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool):
        raise TypeError(f"{op}: slots of {slots.dtype}: expected integers")
    if slots.dim() != 1:
        raise TypeError(f"{op}: slots of shape {tuple(slots.shape)}: expected one axis")
    return slots.to(torch.int64)


def pair_up(op: str, slots: torch.Tensor, skip: int, limit: int, device: torch.device) -> Pairs | None:
    """Choose the tokens that move: those after the first ``skip`` whose slot is not negative.

    On the host the slots are looked at. If slots and pages are both on a device, looking would wait for the
    device: then nothing is read back, and a slot out of range counts as negative.

    Args:
        op: For messages.
        slots: int64 ``[n]``, from :func:`as_slots`.
        skip: Tokens of the prefix to leave alone; their slots are not looked at.
        limit: Slots that the pages have.
        device: Where the pages are.

    Returns:
        None if nothing moves.

    Raises:
        ValueError: ``skip`` is negative, or a slot is beyond the pages.
    """
    if skip < 0:
        raise ValueError(f"{op}: skip_prefix_n_tokens={skip}: expected 0 or more")
    taken = slots[skip:]
    if taken.numel() == 0:
        return None
    if _is_host(device) or _is_host(taken.device):
        return _checked(op, taken.cpu(), skip, limit, device)
    return _masked(taken, skip, limit)


def move(planes: Sequence[Plane], obj: torch.Tensor, pairs: Pairs, way: TransferDirection) -> None:
    """Move what ``pairs`` names. All must have been checked.

    Args:
        planes: The pages.
        obj: ``[KV, NL, T, hidden]``, integers of the elements' size. On another device than the pages it
            is staged there.
        pairs: From :func:`pair_up`.
        way: H2D writes the pages, D2H reads them.
    """
    word = _word(planes, obj)
    scale = int(word.itemsize) // obj.element_size()
    window = obj.view(word).narrow(2, pairs.first, pairs.count)
    staged = _staged(window, planes[0].memory.device, pairs, way)
    lines = [of_plane.unbind(0) for of_plane in staged.unbind(0)]
    rows_of: dict[SlotGrid, torch.Tensor] = {}
    for plane in planes:
        grid = plane.grid
        table = plane.memory.view(word).view(-1, grid.unit // scale)
        mine = lines[plane.kv][plane.layer]
        if grid.width < obj.shape[-1]:
            mine = mine.narrow(-1, plane.column // scale, grid.width // scale)
        if grid.is_dense and _runs_are_long(pairs, grid.width * obj.element_size()):
            _copy_runs(table, mine, pairs, way)
            continue
        if grid not in rows_of:
            rows_of[grid] = grid.rows(pairs.slots)
        if way is TransferDirection.D2H:
            _gather(table, rows_of[grid], mine, pairs)
        else:
            _scatter(table, rows_of[grid], mine, pairs)
    if way is TransferDirection.D2H and staged is not window:
        window.copy_(staged, non_blocking=True)


def _gather(table: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, pairs: Pairs) -> None:
    import torch

    if pairs.tokens is None:
        if mine.is_contiguous():
            mine = mine.view(-1, table.shape[1])
        if mine.shape[1] == table.shape[1]:
            torch.index_select(table, 0, rows, out=mine)
        else:
            mine.copy_(table.index_select(0, rows).view(mine.shape))
        return
    found = table.index_select(0, rows).view(-1, mine.shape[1])
    if pairs.any_valid is not None:
        found = torch.where(pairs.any_valid, found, mine[:1])
    mine.index_copy_(0, pairs.tokens, found)


def _scatter(table: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, pairs: Pairs) -> None:
    import torch

    source = mine if pairs.tokens is None else mine.index_select(0, pairs.tokens)
    if pairs.any_valid is not None:
        per_slot = rows.numel() // len(source)
        there = table.index_select(0, rows[:per_slot]).view(1, -1)
        source = torch.where(pairs.any_valid, source, there)
    table.index_copy_(0, rows, source.reshape(-1, table.shape[1]))


def _runs_are_long(pairs: Pairs, slot_bytes: int) -> bool:
    if not pairs.runs:
        return False
    return len(pairs.runs) == 1 or pairs.count * slot_bytes >= len(pairs.runs) * _LONG_RUN


def _copy_runs(table: torch.Tensor, mine: torch.Tensor, pairs: Pairs, way: TransferDirection) -> None:
    for token, slot, length in pairs.runs:
        there, here = table.narrow(0, slot, length), mine.narrow(0, token, length)
        if way is TransferDirection.D2H:
            here.copy_(there)
        else:
            there.copy_(here)


def _staged(window: torch.Tensor, device: torch.device, pairs: Pairs, way: TransferDirection) -> torch.Tensor:
    """The object's part on the pages' device; itself if it is there already."""
    import torch

    if window.device == device:
        return window
    if way is TransferDirection.D2H and pairs.tokens is None:  # all of it will be written
        return torch.empty(window.shape, dtype=window.dtype, device=device)
    return window.to(device, non_blocking=True)


def _word(planes: Sequence[Plane], obj: torch.Tensor) -> torch.dtype:
    """The widest integer that every row and every offset is whole in: wide words index faster."""
    import torch

    elements = {obj.storage_offset(), obj.shape[-1], *obj.stride()[:-1]}
    for plane in planes:
        elements |= {plane.memory.storage_offset(), plane.grid.unit}  # columns are sums of whole units
    size = gcd(8, gcd(*elements) * obj.element_size())
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


def _is_host(device: torch.device) -> bool:
    return bool(device.type == "cpu")


def _checked(op: str, taken: torch.Tensor, skip: int, limit: int, device: torch.device) -> Pairs | None:
    """Slots that the host may look at: those beyond the pages are refused, negative ones dropped."""
    highest = int(taken.max())
    if highest >= limit:
        token = skip + int(taken.argmax())
        raise ValueError(f"{op}: slot {highest} of token {token}: expected less than {limit}")
    valid = taken >= 0
    tokens = None
    if not bool(valid.all()):
        tokens = valid.nonzero().flatten()
        if tokens.numel() == 0:
            return None
        first, last = int(tokens[0]), int(tokens[-1])
        skip, taken = skip + first, taken[tokens]
        tokens = None if last - first + 1 == tokens.numel() else tokens - first
    if tokens is None:
        runs = _runs(taken) if _is_host(device) else ()
        return Pairs(skip, taken.numel(), taken.to(device, non_blocking=True), runs=runs)
    return Pairs(
        skip,
        int(tokens[-1]) + 1,
        taken.to(device, non_blocking=True),
        tokens.to(device, non_blocking=True),
    )


def _masked(taken: torch.Tensor, skip: int, limit: int) -> Pairs:
    """Slots that the host must not wait for. A token that does not move does again what the first does that
    moves: writing the same twice changes nothing, and no length depends on what the slots are."""
    import torch

    valid = (taken >= 0) & (taken < limit)
    tokens = torch.arange(taken.numel(), device=taken.device)
    tokens = torch.where(valid, tokens, valid.to(torch.uint8).argmax())
    slots = taken.index_select(0, tokens).clamp(0, limit - 1)
    return Pairs(skip, taken.numel(), slots, tokens, valid.any())


def _runs(slots: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    """Runs of consecutive slots, unless there are so many that one copy each is no use."""
    starts = (slots[1:] != slots[:-1] + 1).nonzero().flatten() + 1
    if starts.numel() > slots.numel() // 8:
        return ()
    edges = [0, *starts.tolist(), slots.numel()]
    heads = slots[edges[:-1]].tolist()
    return tuple((at, slot, end - at) for at, end, slot in zip(edges, edges[1:], heads, strict=False))
