"""Which slots a range of tokens has, and which of them take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["BROKEN", "Slots", "cached_prefix", "joined", "mapping_of", "slots_of", "whole_blocks"]


@dataclass(frozen=True)
class Slots:
    """Slots of consecutive tokens."""

    tensor: torch.Tensor
    """int64 ``[T]``, contiguous; negative ones take no part."""
    may_skip: bool
    """Whether some may be negative: on a device that is not known without waiting for it."""
    _runs: dict[Any, list[tuple[int, int, int]]] = field(default_factory=dict, compare=False)

    @cached_property
    def values(self) -> list[int]:
        """The slots as integers; for slots on the host. A few hundred are looked through in less time than torch takes
        to begin."""
        found: list[int] = self.tensor.tolist()
        return found

    @cached_property
    def led(self) -> tuple[int, torch.Tensor] | None:
        """How many at the beginning are padding, and the slots after them; None if padding is among those, too, or
        there are none. For slots on the host."""
        values = self.values
        first = next((at for at, slot in enumerate(values) if slot >= 0), len(values)) if self.may_skip else 0
        rest = values[first:]
        return (first, self.tensor[first:]) if rest and min(rest) >= 0 else None

    def check(self, limit: int) -> None:
        """
        Raises:
            ValueError: A slot of the host's beyond the limit. On a device nobody looks: there it counts as padding.
        """
        if self.tensor.device.type == "cpu":
            highest = max(self.values, default=-1)
            if highest >= limit:
                raise ValueError(
                    f"slot {highest} of token {self.values.index(highest)}: expected less than {limit}"
                )

    def runs(self, cut: int, joined: bool) -> list[tuple[int, int, int]]:
        """(token, slot, how many) of what lies together, padding left out. For slots on the host.

        Args:
            cut: A run ends where a multiple of it begins; 0: nowhere.
            joined: Whether consecutive slots lie together at all.
        """
        key = (cut, joined)
        if key not in self._runs:
            self._runs[key] = self._as_runs(cut, joined)
        return self._runs[key]

    def _as_runs(self, cut: int, joined: bool) -> list[tuple[int, int, int]]:
        slots = self.values
        if not joined:
            return [(token, slot, 1) for token, slot in enumerate(slots) if slot >= 0]
        every = cut or 1 << 63  # of which 0 alone is a multiple: -1, which is padding, is no neighbour of it
        starts = [at for at, (a, b) in enumerate(pairwise(slots), 1) if b - a != 1 or b % every == 0]
        edges = [0, *starts, len(slots)]
        return [(at, slots[at], end - at) for at, end in pairwise(edges) if end > at and slots[at] >= 0]


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
    if found.device.type != "cpu":
        return Slots(found, True)
    slots = Slots(found, False)
    return replace(slots, may_skip=True) if min(slots.values, default=0) < 0 else slots


def cached_prefix(kwargs: Mapping[str, Any], start: int, end: int) -> int:
    """How many of the tokens ``[start, end)`` the engine has in its pages already."""
    return min(end - start, max(0, int(kwargs.get("vllm_cached_tokens") or 0) - start))


def joined(parts: list[Slots]) -> Slots:
    """The slots of several ranges, one after the other."""
    import torch

    if len(parts) == 1:
        return parts[0]
    return Slots(torch.cat([part.tensor for part in parts]), any(part.may_skip for part in parts))
