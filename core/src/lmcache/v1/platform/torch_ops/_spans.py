"""Which blocks go where: flat block ids cut into chunk objects."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Span", "as_ids", "cut"]


@dataclass(frozen=True)
class Span:
    """Blocks that lie one after the other in an object."""

    index: int
    """Of the object."""
    first: int
    """Position of the first block in the object, in blocks."""
    ids: list[int]

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(position in the object, first id, length) of each run of consecutive ids."""
        found, start = [], 0
        for at in range(1, len(self.ids) + 1):
            if at == len(self.ids) or self.ids[at] != self.ids[at - 1] + 1:
                found.append((self.first + start, self.ids[start], at - start))
                start = at
        return found

    @cached_property
    def id_tensor(self) -> torch.Tensor:
        """The ids as a tensor of the host."""
        import torch

        return torch.tensor(self.ids)

    @cached_property
    def singles(self) -> list[tuple[int, int, int]]:
        """The same with every block by itself."""
        return [(position, block, 1) for position, block in enumerate(self.ids, self.first)]


def as_ids(op: str, block_ids: Any) -> list[int]:
    """Block ids as a list; a tensor, wherever it lies, is read once.

    Raises:
        TypeError: Not one axis of integers.
    """
    try:
        return [*map(operator.index, block_ids.tolist() if hasattr(block_ids, "tolist") else block_ids)]
    except TypeError:
        raise TypeError(f"{op}: block_ids={block_ids!r}: expected one axis of integers") from None


def cut(op: str, ids: list[int], per_object: int, skip: int, num_objects: int, once: bool) -> list[Span]:
    """Cut ids into objects and drop the skipped prefix.

    Args:
        op: For messages.
        ids: Block ids.
        per_object: Blocks of an object.
        skip: Ids to drop.
        num_objects: Objects given.
        once: Of an id that occurs again, take the last occurrence only.

    Raises:
        ValueError: More ids than the objects hold.
    """
    if len(ids) > per_object * num_objects:
        raise ValueError(
            f"{op}: {len(ids)} block ids: expected at most {per_object * num_objects} "
            f"({num_objects} objects of {per_object} blocks)"
        )
    spans = []
    for start, stop in _stretches(ids, skip, once):
        while start < stop:
            index, first = divmod(start, per_object)
            end = min(stop, (index + 1) * per_object)
            spans.append(Span(index, first, ids[start:end]))
            start = end
    return spans


def _stretches(ids: list[int], skip: int, once: bool) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) that take part."""
    start = min(skip, len(ids))
    if once and len(set(ids[start:])) < len(ids) - start:
        last = {block: at for at, block in enumerate(ids) if at >= start}
        for at in range(start, len(ids)):
            if last[ids[at]] != at:
                yield start, at
                start = at + 1
    yield start, len(ids)
