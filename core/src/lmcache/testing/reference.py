"""What transfers must do, in numpy and index by index, from a layout's dimension string alone.

Nothing here shares code with what it judges: no canonical views, no strides. Slow, and meant to be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache.v1.kv_layout import KVFormat

__all__ = ["Case", "Paged", "build", "gather", "make_objects", "move_slots", "scatter"]

Array = Any
"""A numpy array. Elements are unsigned integers of the dtype's size, so that every bit counts."""


@dataclass(frozen=True)
class Case:
    """Sizes of a KV cache. ``width`` is the elements per head and slot of one plane."""

    layers: int = 2
    blocks: int = 9
    block_size: int = 4
    heads: int = 2
    width: int = 8
    planes: tuple[int, ...] = (8, 4)
    """Widths of a layer's planes, for rows with planes of their own."""

    def sizes(self, row: KVFormat, plane: int) -> dict[str, int]:
        """Size of each axis and level symbol."""
        width = self.planes[plane] if "NP" in row.dims.levels else self.width
        return {
            "NL": self.layers, "NB": self.blocks, "BS": self.block_size, "PBS": self.blocks * self.block_size,
            "NH": self.heads, "HS": width, "CS": 2 * width, "NP": len(self.planes), "2": 2, "1": 1,
        }  # fmt: skip


@dataclass
class Paged:
    """A cache of some row: its tensors by position in the nesting, such as ``(layer, plane)``."""

    row: KVFormat
    case: Case
    leaves: dict[tuple[int, ...], Array]

    @property
    def nested(self) -> Any:
        """The tensors in lists, as an engine hands them over."""
        return self._nest((), len(self.row.dims.levels))

    def _nest(self, at: tuple[int, ...], levels: int) -> Any:
        if not levels:
            return self.leaves[at]
        count = len({key[len(at)] for key in self.leaves if key[: len(at)] == at})
        return [self._nest((*at, index), levels - 1) for index in range(count)]

    def in_pointer_order(self) -> Iterator[Array]:
        """Tensors in the order in which their addresses are passed: as they are nested, outermost first."""
        yield from (self.leaves[at] for at in sorted(self.leaves))

    def slots(self, layer: int, kv: int) -> Iterator[tuple[Array, Any]]:
        """Per tensor that holds part ``kv`` of ``layer``: the tensor, and a function from (block, slot) to
        an index into it, under which lie that slot's elements, head by head."""
        levels = self.row.dims.levels
        for at in sorted(self.leaves):
            place = dict(zip(levels, at, strict=True))
            if place.get("NL", layer) == layer and place.get("2", kv) == kv:
                yield self.leaves[at], lambda block, slot: self._index(layer, kv, block, slot)

    def _index(self, layer: int, kv: int, block: int, slot: int) -> tuple[Any, ...]:
        axes = self.row.dims.axes
        packed = axes[-2:] == ("2", "HS")
        fixed: Mapping[str, Any] = {
            "NL": layer, "NB": block, "BS": slot, "PBS": block * self.case.block_size + slot, "1": 0,
            "2": slice(None) if packed else kv,
        }  # fmt: skip
        return tuple(fixed.get(axis, slice(None)) for axis in axes)


def build(row: KVFormat, case: Case, itemsize: int, seed: int = 0) -> Paged:
    """A cache of random elements."""
    rng = np.random.default_rng([seed, row.id, itemsize])
    levels = row.dims.levels
    counts = [case.sizes(row, 0)[level] for level in levels]
    leaves = {}
    for at in itertools.product(*map(range, counts)):
        plane = at[levels.index("NP")] if "NP" in levels else 0
        shape = tuple(case.sizes(row, plane)[axis] for axis in row.dims.axes)
        leaves[at] = _random(rng, shape, itemsize)
    return Paged(row, case, leaves)


def _random(rng: Any, shape: Sequence[int], itemsize: int) -> Array:
    return rng.integers(0, 256, size=(*shape, itemsize), dtype=np.uint8).view(f"u{itemsize}")[..., 0]


def make_objects(
    paged: Paged, blocks_per_object: int, count: int, itemsize: int, seed: int = 1
) -> list[Array]:
    """``count`` chunk objects ``[kv, layers, slots, hidden]`` of random elements."""
    rng = np.random.default_rng([seed, paged.row.id, itemsize])
    row, case = paged.row, paged.case
    parts = sum(_elements(tensor, index) for tensor, index in paged.slots(0, 0))
    shape = (row.kv_size, case.layers, blocks_per_object * case.block_size, parts)
    return [_random(rng, shape, itemsize) for _ in range(count)]


def _elements(tensor: Array, index: Any) -> int:
    return int(tensor[index(0, 0)].size)


def _walk(
    paged: Paged, objects: Sequence[Array], block_ids: Sequence[int], skip: int
) -> Iterator[tuple[Array, Any, Array, Any]]:
    """(engine tensor, index, object, index) of each slot of each block that takes part."""
    size = paged.case.block_size
    per_object = objects[0].shape[2] // size
    for position, block in enumerate(block_ids):
        if position < skip:
            continue
        chunk, place = objects[position // per_object], position % per_object
        for layer, kv, slot in itertools.product(
            range(paged.case.layers), range(paged.row.kv_size), range(size)
        ):
            column = 0
            for tensor, index in paged.slots(layer, kv):
                width = _elements(tensor, index)
                yield tensor, index(block, slot), chunk, (
                    kv, layer, place * size + slot, slice(column, column + width)
                )  # fmt: skip
                column += width


def gather(paged: Paged, objects: Sequence[Array], block_ids: Sequence[int], skip: int = 0) -> None:
    """Pages to objects."""
    for tensor, source, chunk, target in _walk(paged, objects, block_ids, skip):
        chunk[target] = tensor[source].reshape(-1)


def scatter(paged: Paged, objects: Sequence[Array], block_ids: Sequence[int], skip: int = 0) -> None:
    """Objects to pages."""
    for tensor, target, chunk, source in _walk(paged, objects, block_ids, skip):
        tensor[target] = chunk[source].reshape(tensor[target].shape)


def move_slots(
    paged: Paged,
    chunk: Array,
    slots: Sequence[int],
    to_pages: bool,
    skip: int = 0,
    layers: Sequence[int] = (),
) -> None:
    """Tokens between pages and an object ``[kv, layers, tokens, hidden]``, slot by slot.

    A negative slot, and each of the first ``skip`` tokens, moves nothing. Layer ``i`` of the object is layer
    ``layers[i]`` of the pages; by default all, in order.
    """
    size = paged.case.block_size
    for (at, layer), kv in itertools.product(
        enumerate(layers or range(paged.case.layers)), range(paged.row.kv_size)
    ):
        column = 0
        for tensor, index in paged.slots(layer, kv):
            width = _elements(tensor, index)
            for token, slot in enumerate(slots):
                if slot < 0 or token < skip:
                    continue
                place = index(slot // size, slot % size)
                mine = chunk[kv, at, token, column : column + width]
                if to_pages:
                    tensor[place] = mine.reshape(tensor[place].shape)
                else:
                    mine[...] = tensor[place].reshape(-1)
            column += width
