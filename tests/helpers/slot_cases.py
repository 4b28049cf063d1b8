"""Paged KV of every layout for tests of slot transfers, and what it holds, read off the dimension string.

The reference knows the string's symbols and numpy's axes; it shares nothing with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from lmcache.v1.kv_layout import kv_formats

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]
STRINGS = {row.id: row.dims_text for row in kv_formats()}
SERVED = sorted(set(STRINGS) - {14, 100})


@dataclass(frozen=True)
class Case:
    """Sizes of a paged cache, and how its tensors lie in memory."""

    nl: int = 3
    nb: int = 5
    bs: int = 2
    nh: int = 2
    hs: int = 4
    dtype: torch.dtype = torch.float32
    order: tuple[int, ...] = ()
    """Axes from the innermost in memory outwards; empty for the row's own order."""
    gaps: tuple[int, ...] = (0,) * 6
    """Elements left free after each axis, from the innermost axis outwards."""

    @property
    def slots(self) -> int:
        return self.nb * self.bs


@dataclass(frozen=True)
class Form:
    """A format's dimension string, taken apart."""

    levels: list[str]
    axes: list[str]

    @classmethod
    def of(cls, fmt: int) -> Form:
        levels, _, axes = STRINGS[fmt].rstrip("]").rpartition("[")
        return cls([level for level in levels.split(" x ") if level], axes.split(", "))

    @property
    def kv(self) -> int:
        """K and V apart: 2, unless the 2 stands within a slot."""
        return 2 if "2" in self.levels or ("2" in self.axes and self.axes[-2] != "2") else 1

    def width(self, case: Case) -> int:
        """Elements of one slot and plane of the object."""
        if "NP" in self.levels:
            return sum(self.plane_widths(case))
        inner = self.axes[max(self.axes.index(a) for a in ("NB", "PBS") if a in self.axes) + 1 :]
        return prod(self.size(axis, case) for axis in inner if axis in ("NH", "HS", "CS")) * (
            2 if self.axes[-2] == "2" else 1
        )

    def head_size(self, case: Case) -> int:
        return case.hs * 2 if self.axes[-2] == "2" else case.hs

    def size(self, axis: str, case: Case) -> int:
        sizes = {"NL": case.nl, "NB": case.nb, "BS": case.bs, "PBS": case.slots, "NH": case.nh}
        return int(axis) if axis.isdigit() else sizes.get(axis, case.hs)

    def shape(self, case: Case) -> tuple[int, ...]:
        return tuple(self.size(axis, case) for axis in self.axes)

    def plane_widths(self, case: Case) -> tuple[int, ...]:
        return (case.hs, case.hs + 2, 1)


def allocate(shape: tuple[int, ...], case: Case, keep_last_two: bool = False) -> torch.Tensor:
    """Random bytes seen as a tensor whose axes lie in memory in the case's order, with its gaps."""
    order = [axis for axis in case.order if axis < len(shape)] or list(reversed(range(len(shape))))
    gaps = list(case.gaps)
    if keep_last_two:  # packed K and V must stay side by side
        last = len(shape) - 1
        order = [last, last - 1, *(axis for axis in order if axis < last - 1)]
        gaps[0] = 0
    strides, running = [0] * len(shape), 1
    for axis, gap in zip(order, gaps, strict=False):
        strides[axis] = running
        running = running * shape[axis] + gap
    memory = torch.randint(0, 256, (running * case.dtype.itemsize,), dtype=torch.uint8)
    return memory.view(case.dtype).as_strided(shape, strides)


def build(fmt: int, case: Case) -> Any:
    """Tensors nested as the format's string says."""
    form = Form.of(fmt)
    counts = {"NL": case.nl, "2": 2}

    def nest(levels: list[str], last: int) -> Any:
        if not levels:
            return allocate((*form.shape(case)[:-1], last), case, form.axes[-2] == "2")
        if levels[0] == "NP":
            return tuple(nest([], width) for width in form.plane_widths(case))
        return [nest(levels[1:], last) for _ in range(counts[levels[0]])]

    return nest(form.levels, case.hs)


def leaves(paged: Any) -> Iterator[torch.Tensor]:
    if isinstance(paged, (list, tuple)):
        for part in paged:
            yield from leaves(part)
    else:
        yield paged


def each(paged: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting of something else."""
    return [each(part, change) for part in paged] if isinstance(paged, (list, tuple)) else change(paged)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes below a tensor, gaps included."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def copy_of(paged: Any) -> Any:
    """The same tensors over memory of their own."""
    return each(paged, lambda t: memory(t).clone().view(t.dtype).as_strided(t.shape, t.stride()))


def zeroed(paged: Any) -> Any:
    """Tensors of the same form whose elements are zero; what lies in their gaps is kept."""

    def clear(tensor: torch.Tensor) -> torch.Tensor:
        fresh = copy_of(tensor)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        fresh.view(integers).zero_()
        return fresh  # type: ignore[no-any-return]

    return each(paged, clear)


def gaps_of(paged: Any) -> list[bytes]:
    """The bytes that belong to no element."""
    return [memory(tensor).numpy().tobytes() for tensor in leaves(zeroed(paged))]


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor; the last axis is elements times their size."""
    tight = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tight.view(torch.uint8).numpy()


def content(fmt: int, paged: Any) -> np.ndarray:
    """What the pages hold, as bytes ``[KV, NL, slots, hidden bytes]``."""
    form = Form.of(fmt)

    def of_tensor(tensor: torch.Tensor) -> np.ndarray:
        array, axes = raw(tensor), list(form.axes)
        for at in reversed([i for i, axis in enumerate(axes) if axis == "1"]):
            array = array.squeeze(at)
            axes.pop(at)
        if axes[-2] == "2":
            axes[-2] = "PAIR"
        wanted = ["2", "NL", "NB", "BS", "PBS", "NH", "PAIR", axes[-1]]
        present = [axis for axis in wanted if axis in axes]
        array = array.transpose([axes.index(axis) for axis in present])
        size = dict(zip(present, array.shape, strict=True))
        slots = size.get("PBS") or size["NB"] * size["BS"]
        return array.reshape(size.get("2", 1), size.get("NL", 1), slots, -1)

    def of_level(node: Any, levels: list[str]) -> np.ndarray:
        if not levels:
            return of_tensor(node)
        axis = {"2": 0, "NL": 1, "NP": 3}[levels[0]]
        return np.concatenate([of_level(child, levels[1:]) for child in node], axis=axis)

    return of_level(paged, form.levels)


def an_object(fmt: int, case: Case, tokens: int, spare: int = 0) -> torch.Tensor:
    """Random bytes ``[KV, NL, tokens, hidden]``; with ``spare``, rows are apart in memory."""
    form = Form.of(fmt)
    shape = (form.kv, case.nl, tokens, form.width(case) + spare)
    flat = torch.randint(0, 256, (prod(shape) * case.dtype.itemsize,), dtype=torch.uint8)
    return flat.view(case.dtype).view(shape)[..., : form.width(case)]


@st.composite
def cases(draw: st.DrawFn, strided: bool = True) -> Case:
    """Small sizes; if ``strided``, axes in any order in memory with gaps between them."""
    return Case(
        nl=draw(st.integers(1, 3)),
        nb=draw(st.integers(1, 6)),
        bs=draw(st.integers(1, 4)),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.sampled_from([1, 3, 4, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
        order=tuple(draw(st.permutations(range(6)))) if strided and draw(st.booleans()) else (),
        gaps=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 8]), min_size=6, max_size=6)))
        if strided
        else Case.gaps,
    )


@dataclass(frozen=True)
class Plan:
    """Which slots a transfer names. ``moves`` are (token, slot)."""

    slots: list[int]
    skip: int
    moves: list[tuple[int, int]] = field(default_factory=list)


@st.composite
def plans(draw: st.DrawFn, num_slots: int) -> Plan:
    """Distinct slots, in runs or not, some negative, after a prefix that is skipped."""
    if draw(st.booleans()):
        start = draw(st.integers(0, num_slots - 1))
        slots = [*range(start, num_slots), *range(start)]
    else:
        slots = list(draw(st.permutations(range(num_slots))))
    slots = slots[: draw(st.integers(0, num_slots))]
    if draw(st.booleans()):
        dropped = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        slots = [-1 - slot if drop else slot for slot, drop in zip(slots, dropped, strict=True)]
    skip = draw(st.one_of(st.just(0), st.integers(0, len(slots) + 1)))
    moves = [(token, slot) for token, slot in enumerate(slots) if token >= skip and slot >= 0]
    return Plan(slots, skip, moves)
