"""Which slots a range of tokens has, and which of them take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.errors import LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["BROKEN", "Blocks", "Slots", "cached_prefix", "joined", "mapping_of", "slots_of", "whole_blocks"]


class Blocks(NamedTuple):
    """Whole blocks of slots, in the order of tokens."""

    ids: list[int]
    skip: int
    """So many at the beginning take no part; their ids say nothing."""


@dataclass(frozen=True)
class Slots:
    """Slots of consecutive tokens."""

    tensor: torch.Tensor
    """int64 ``[T]``, contiguous; negative ones take no part."""
    may_skip: bool
    """Whether some may be negative: on a device that is not known without waiting for it."""
    _blocks: dict[int, Blocks | None] = field(default_factory=dict, compare=False)
    _runs: dict[Any, list[tuple[int, int, int]]] = field(default_factory=dict, compare=False)

    def check(self, limit: int) -> None:
        """
        Raises:
            ValueError: A slot of the host's beyond the limit. On a device nobody looks: there it counts as padding.
        """
        if self.tensor.device.type == "cpu" and len(self.tensor):
            highest = int(self.tensor.max())
            if highest >= limit:
                raise ValueError(
                    f"slot {highest} of token {int(self.tensor.argmax())}: expected less than {limit}"
                )

    def runs(self, limit: int, cut: int, joined: bool) -> list[tuple[int, int, int]]:
        """(token, slot, how many) of what lies together, padding left out. For slots on the host.

        Args:
            limit: Slots that there are.
            cut: A run ends where a multiple of it begins; 0: nowhere.
            joined: Whether consecutive slots lie together at all.

        Raises:
            ValueError: A slot beyond the limit.
        """
        key = (limit, cut, joined)
        if key not in self._runs:
            self._runs[key] = self._as_runs(limit, cut, joined)
        return self._runs[key]

    def _as_runs(self, limit: int, cut: int, joined: bool) -> list[tuple[int, int, int]]:
        slots = self.tensor
        if not len(slots):
            return []
        self.check(limit)
        if not joined:
            return [(token, slot, 1) for token, slot in enumerate(slots.tolist()) if slot >= 0]
        apart = slots.diff() != 1
        if self.may_skip:
            apart |= slots[1:] == 0  # -1, which is padding, is no neighbour of 0
        if cut:
            apart |= slots[1:] % cut == 0
        edges = [0, *(apart.nonzero().flatten() + 1).tolist(), len(slots)]
        heads = slots.tolist()
        return [(token, heads[token], end - token) for token, end in pairwise(edges) if heads[token] >= 0]

    def blocks(self, size: int) -> Blocks | None:
        """The blocks that these slots make up one after the other, those that take no part only at the beginning;
        None if they do not. For slots on the host."""
        if size not in self._blocks:
            self._blocks[size] = self._as_blocks(size)
        return self._blocks[size]

    def _as_blocks(self, size: int) -> Blocks | None:
        if not len(self.tensor) or len(self.tensor) % size:
            return None
        ids: list[int] = whole_blocks(self.tensor, size).tolist()
        skip = next((at for at, block in enumerate(ids) if block != PADDING), len(ids))
        return Blocks([0] * skip + ids[skip:], skip) if min(ids[skip:], default=0) >= 0 else None


PADDING, BROKEN = -1, -2


def whole_blocks(slots: torch.Tensor, size: int) -> torch.Tensor:
    """The block of each ``size`` slots of the host: ``PADDING`` where all are negative, ``BROKEN`` where they are not
    one whole block in order. The number of slots is a multiple of ``size``."""
    import torch

    rows = slots.view(-1, size)
    first = rows[:, 0]
    whole = (rows == first.unsqueeze(1) + torch.arange(size)).all(dim=1) & (first >= 0) & (first % size == 0)
    found = torch.where(whole, first // size, BROKEN)
    return torch.where((rows < 0).all(dim=1), PADDING, found)


def mapping_of(kwargs: Mapping[str, Any], group: int = 0) -> torch.Tensor:
    """The call's slot mapping; that of an engine group where the call gives one per group.

    Raises:
        LayoutError: There is none, or it is not one axis of signed integers.
    """
    import torch

    given = kwargs.get("slot_mapping")
    mapping: Any = given[group] if isinstance(given, (list, tuple)) and group < len(given) else given
    signed = (torch.int64, torch.int32, torch.int16)
    if not hasattr(mapping, "as_strided") or mapping.dim() != 1 or mapping.dtype not in signed:
        told = type(mapping).__name__
        if hasattr(mapping, "shape"):
            told = f"{tuple(mapping.shape)} of {mapping.dtype}"
        raise LayoutError(
            f"slot_mapping={told}: expected a tensor of integers with one axis, signed as padding is negative"
        )
    found: torch.Tensor = mapping
    return found


def slots_of(mapping: torch.Tensor, start: int, end: int, skip: int = 0, offset: int = 0) -> Slots | None:
    """Slots of tokens ``[start, end)``; None if none takes part.

    Args:
        mapping: From :func:`mapping_of`; its first entry is token ``offset``.
        start, end: Tokens of the sequence.
        skip: So many at the beginning take no part.
        offset: Tokens before the mapping begins.

    Raises:
        LayoutError: The mapping does not reach so far.
    """
    import torch

    if not offset <= start <= end <= offset + len(mapping):
        raise LayoutError(
            f"tokens {start} to {end}: expected them within the {len(mapping)} tokens that slot_mapping has from "
            f"token {offset} on"
        )
    if skip >= end - start:
        return None
    found = mapping[start - offset : end - offset].to(torch.int64).contiguous()
    if skip > 0:
        found = found.clone()
        found[:skip] = -1
    unknown = found.device.type != "cpu"
    return Slots(found, skip > 0 or unknown or bool((found < 0).any()))


def cached_prefix(kwargs: Mapping[str, Any], start: int, end: int) -> int:
    """How many of the tokens ``[start, end)`` the engine has in its pages already."""
    return min(end - start, max(0, int(kwargs.get("vllm_cached_tokens") or 0) - start))


def joined(parts: list[Slots]) -> Slots:
    """The slots of several ranges, one after the other."""
    import torch

    if len(parts) == 1:
        return parts[0]
    return Slots(torch.cat([part.tensor for part in parts]), any(part.may_skip for part in parts))
