"""Laws of the whole-block transfer, against a reference in numpy that knows a layout's dimension string only.

Everything lies in byte arrays with guards at both ends, and all bytes of all arrays are compared, so nothing
can be read or written beside what was named. That the laws can fail is a test of its own: for every row and
every pair of its axes that could be confused.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import CanonicalView, KVFormat, kv_formats, register_kv_format, table
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform.torch_ops import _host_jobs, _hostcopy, _paged, _tensorcopy, block_transfer

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

ROWS = [row for row in kv_formats() if row.is_block_addressable]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8"]
GUARD = 64


@dataclass(frozen=True)
class Plan:
    """One transfer. ``order`` is how the axes, list levels among them, lie in memory."""

    dtype: str = "float32"
    nb: int = 2
    nl: int = 2
    bs: int = 2
    nh: int = 2
    hs: int = 8
    ids: tuple[int, ...] = (1, 0)
    per_object: int = 2
    spare: int = 0
    """Objects more than the ids need."""
    skip: int = 0
    memory: str = "tight"
    shuffle: int = 0
    pad: int = 0
    """Elements between blocks beside what they need."""
    operands: str = "tensors"

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)


# ----------------------------------------------------------------------------------- a structure and its bytes


class Array:
    """A logical array with named axes in guarded bytes of its own."""

    def __init__(self, axes: list[str], sizes: list[int], memory: list[str], plan: Plan, seed: int) -> None:
        self.axes, self.itemsize, self.dtype = axes, plan.itemsize, getattr(torch, plan.dtype)
        size = dict(zip(axes, sizes, strict=True))
        strides, running = {}, 1
        for axis in reversed(memory):
            running += plan.pad if axis == "NB" else 0
            strides[axis] = running
            running *= size[axis]
        self.sizes, self.strides = sizes, [strides[axis] for axis in axes]
        total = GUARD * 2 + running * self.itemsize
        self.bytes = np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8)

    def elements(self) -> Any:
        """As numpy: the axes, and the bytes of an element."""
        strides = [stride * self.itemsize for stride in self.strides] + [1]
        return np.lib.stride_tricks.as_strided(self.bytes[GUARD:], (*self.sizes, self.itemsize), strides)

    def tensor(self, at: tuple[int, ...]) -> Any:
        """As torch: the array at this position of its first axes."""
        start = sum(i * stride for i, stride in zip(at, self.strides[: len(at)], strict=True))
        raw = torch.from_numpy(self.bytes[GUARD:-GUARD]).view(self.dtype)
        return raw.as_strided(self.sizes[len(at) :], self.strides[len(at) :], start)


class Structure:
    """A paged KV structure of one row, and its canonical content."""

    def __init__(self, row: KVFormat, plan: Plan, seed: int) -> None:
        found = re.fullmatch(r"((?:\w+ x )*)\[(.*)\]", row.dims_text)
        assert found is not None
        self.levels = found[1].split(" x ")[:-1]
        axes = found[2].split(", ")
        self.packed_pair = axes[-2:] == ["2", "HS"]
        named = [f"one{i}" if axis == "1" else axis for i, axis in enumerate(axes)]
        size = {"NB": plan.nb, "NL": plan.nl, "BS": plan.bs, "NH": plan.nh, "2": 2}
        size |= {"HS": plan.hs, "CS": plan.hs} | {axis: 1 for axis in named if axis.startswith("one")}
        levels = [level for level in self.levels if level != "NP"]
        order = self._order(levels, named, plan, row.token_addressable)
        widths = [plan.hs, plan.hs + 3] if "NP" in self.levels else [plan.hs]
        self.arrays = []
        for index, width in enumerate(widths):
            sizes = [width if axis == "HS" and len(widths) > 1 else size[axis] for axis in levels + named]
            self.arrays.append(Array(levels + named, sizes, order, plan, seed + index))

    def _order(self, levels: list[str], axes: list[str], plan: Plan, cuttable: bool) -> list[str]:
        if plan.memory == "tight":
            return levels + axes
        if plan.memory == "interleaved":  # all layers of a block lie together
            return ["NB", *levels, *(axis for axis in axes if axis != "NB")]
        fixed = 2 if self.packed_pair or not cuttable else 0  # these stay innermost, in order
        order = levels + axes
        free, rest = order[: len(order) - fixed], order[len(order) - fixed :]
        permutations = list(itertools.permutations(free))
        return [*permutations[plan.shuffle % len(permutations)], *rest]

    def canonical(self) -> list[Any]:
        """One view per plane of a layer: ``[KV, NL, NB, BS, NH, W, bytes]``. K and V of a packed pair keep
        their axis beside W."""
        views = []
        for array in self.arrays:
            view, axes = array.elements(), list(array.axes)
            wanted = ["NL", "NB", "BS", "NH", *(["2", "HS"] if self.packed_pair else []), axes[-1]]
            if self.packed_pair:
                wanted.pop()
            else:
                wanted.insert(0, "2")
            for axis in [axis for axis in axes if axis.startswith("one")]:
                view = view[(slice(None),) * axes.index(axis) + (0,)]
                axes.remove(axis)
            for axis in wanted:
                if axis not in axes:
                    view, axes = view[None], [axis, *axes]
            view = view.transpose([axes.index(axis) for axis in wanted] + [len(axes)])
            views.append(view[None] if self.packed_pair else view)
        return views

    def page(self, kv: int, layer: int, block: int) -> Any:
        """``[BS, hidden bytes]``, by indexing."""
        parts = [view[kv, layer, block] for view in self.canonical()]
        return np.concatenate([part.reshape(part.shape[0], -1) for part in parts], axis=-1)

    def set_page(self, kv: int, layer: int, block: int, page: Any) -> None:
        at = 0
        for view in self.canonical():
            part = view[kv, layer, block]
            width = prod(part.shape[1:])
            part[...] = page[:, at : at + width].reshape(part.shape)
            at += width

    def operands(self, plan: Plan) -> Any:
        nested = self._nested((), self.levels)
        if plan.operands == "tensors":
            return nested
        flat = nested if isinstance(nested, list) else [nested]
        while isinstance(flat[0], (list, tuple)):
            flat = [tensor for part in flat for tensor in part]
        addresses = [tensor.data_ptr() for tensor in flat]
        return torch.tensor(addresses) if plan.shuffle % 2 else addresses

    def _nested(self, at: tuple[int, ...], levels: list[str]) -> Any:
        if not levels:
            return self.arrays[0].tensor(at)
        if levels[0] == "NP":
            return tuple(array.tensor(at) for array in self.arrays)
        size = self.arrays[0].sizes[len(at)]
        return [self._nested((*at, i), levels[1:]) for i in range(size)]

    def memory(self) -> list[Any]:
        return [array.bytes for array in self.arrays]


# ------------------------------------------------------------------------------------------------------ the law


def check(truth: KVFormat, plan: Plan, told: int | None = None) -> None:
    """Gather, then scatter elsewhere; ``told`` is the row that the op is told, if not the true one."""
    source, target = Structure(truth, plan, 1), Structure(truth, plan, 100)
    planes = source.canonical()
    kv, hidden = planes[0].shape[0], source.page(0, 0, 0).shape[1] // plan.itemsize
    nh = plan.nh if "NH" in truth.dims_text else 1
    strides = {array.strides[array.axes.index("NB")] for array in source.arrays}
    stride = strides.pop() if plan.pad and len(strides) == 1 else 0  # one number cannot say two
    desc = PageBufferShapeDesc(kv, plan.nl, plan.nb, plan.bs, nh, hidden // nh, plan.itemsize, stride)
    count = -(-len(plan.ids) // plan.per_object) + plan.spare
    sizes = [kv, plan.nl, plan.per_object * plan.bs, hidden]
    axes = ["KV", "NL", "slots", "hidden"]
    chunks = [Array(axes, sizes, axes, replace(plan, pad=0), 50 + i) for i in range(count)]
    objects = [chunk.tensor(()) for chunk in chunks]
    if plan.operands == "pointers":
        objects = [obj.data_ptr() for obj in objects]
    expected = [chunk.bytes.copy() for chunk in chunks]
    after = [array.copy() for array in target.memory()]
    before = [array.copy() for array in source.memory()]

    def move(structure: Structure, way: TransferDirection) -> None:
        fmt = truth.id if told is None else told
        args = (structure.operands(plan), objects, list(plan.ids), "cpu", way, desc)
        DeviceOps().multi_layer_block_kv_transfer(*args, plan.per_object * plan.bs, fmt, plan.skip)

    wanted = Structure(truth, plan, 100)  # same seed: as the target is now
    for position in range(plan.skip, len(plan.ids)):
        index, block = divmod(position, plan.per_object)
        inner = expected[index][GUARD:-GUARD].reshape(kv, plan.nl, plan.per_object, plan.bs, -1)
        for k, layer in itertools.product(range(kv), range(plan.nl)):
            page = source.page(k, layer, plan.ids[position])
            inner[k, layer, block] = page
            wanted.set_page(k, layer, plan.ids[position], page)

    move(source, TransferDirection.D2H)
    assert_equal([chunk.bytes for chunk in chunks], expected)
    assert_equal(source.memory(), before)
    assert_equal(target.memory(), after)
    move(target, TransferDirection.H2D)
    assert_equal(target.memory(), wanted.memory())
    assert_equal([chunk.bytes for chunk in chunks], expected)


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    nb, per_object = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    ids = draw(st.permutations(range(nb)))[: draw(st.integers(0, nb))]
    return Plan(
        dtype=draw(st.sampled_from(DTYPES)),
        nb=nb,
        nl=draw(st.integers(1, 3)),
        bs=draw(st.integers(1, 4)),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        ids=tuple(sorted(ids) if draw(st.booleans()) else ids),
        per_object=per_object,
        spare=draw(st.integers(0, 1)),
        skip=draw(st.integers(0, len(ids) + 1)),
        memory=draw(st.sampled_from(["tight", "tight", "interleaved", "shuffled"])),
        shuffle=draw(st.integers(0, 5039)),
        pad=draw(st.sampled_from([0, 0, 5, 8])),
        operands=draw(st.sampled_from(["tensors", "pointers"])),
    )


LAW = settings(max_examples=30, deadline=None)
by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@by_name
@given(plan=plans())
@LAW
def test_gather_then_scatter_is_the_identity_and_touches_nothing_else(row: KVFormat, plan: Plan) -> None:
    if plan.operands == "pointers":  # they say no strides but that of blocks, and no widths of planes
        plan = replace(plan, memory="tight", operands="tensors" if row.id == 17 else "pointers")
    check(row, plan)


@by_name
@given(plan=plans())
@settings(LAW, max_examples=12)
def test_the_law_holds_in_small_pieces_among_threads(row: KVFormat, plan: Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hostcopy, "_THREADED", 0)
        patch.setattr(_hostcopy, "_UNIT", 64)
        patch.setattr(_host_jobs, "_SERIAL", 16)
        patch.setattr(_hostcopy, "_threads", lambda: 3)
        check(row, replace(plan, operands="tensors"))


@by_name
@given(plan=plans(), blocks_per_run=st.sampled_from([0, 1, 8]))
@settings(LAW, max_examples=12)
def test_the_law_holds_where_no_run_is_worth_a_memcpy(row: KVFormat, plan: Plan, blocks_per_run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host_jobs, "_FEW_RUNS", 0)
        patch.setattr(_host_jobs, "_LONG_RUN", 1 << 40)
        patch.setattr(_host_jobs, "_BLOCKS_PER_RUN", blocks_per_run)
        check(row, replace(plan, operands="tensors"))


@by_name
@given(plan=plans())
@settings(LAW, max_examples=12)
def test_the_law_holds_for_the_copies_that_a_device_is_given(row: KVFormat, plan: Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_transfer, "_all_on_host", lambda *_: False)
        patch.setattr(_tensorcopy, "_takes_index", lambda _: True)
        check(row, replace(plan, operands="tensors"))


# --------------------------------------------------------------------------------------- that the law can fail


def confused(row: KVFormat) -> list[str]:
    """Dimension strings that differ from the row's by two neighbours changing places."""
    *levels, axes_text = row.dims_text.split(" x ")
    axes = axes_text.strip("[]").split(", ")
    texts = []
    real = [at for at, axis in enumerate(axes[:-1]) if axis != "1"]
    for a, b in itertools.pairwise(real):
        swapped = list(axes)
        swapped[a], swapped[b] = axes[b], axes[a]
        texts.append(" x ".join([*levels, f"[{', '.join(swapped)}]"]))
    if levels in (["2", "NL"], ["NL", "2"]):
        texts.append(" x ".join([*reversed(levels), axes_text]))
    return texts


# Pointers do not tell the widths of the planes of 17.
WRONG = [
    (row, text, operands)
    for row in ROWS
    for text in confused(row)
    for operands in ("tensors", "pointers")
    if (row.id, operands) != (17, "pointers")
]
# The axes of a plane whose stride a row gives: no heads in MLA, and a page of 14 that is no run is refused.
STRIDES = [
    (row, axis)
    for row in ROWS
    for axis, name in enumerate(("block", "slot", "head"), 1)
    if not (name == "head" and row.is_mla) and not (name == "slot" and not row.token_addressable)
]


def test_every_row_has_a_confusion() -> None:
    assert {row.id for row, *_ in WRONG} == {row.id for row, _ in STRIDES} == {row.id for row in ROWS}


@pytest.mark.parametrize(("row", "text", "operands"), WRONG, ids=lambda value: getattr(value, "name", value))
def test_a_row_with_two_axes_confused_breaks_the_law(
    row: KVFormat, text: str, operands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_by_id", dict(table._by_id))
    monkeypatch.setattr(table, "_by_name", dict(table._by_name))
    wrong = KVFormat(1000, "CONFUSED", text)
    register_kv_format(wrong)
    plan = Plan(operands=operands)  # all sizes are 2: the shapes cannot give the confusion away
    check(row, plan)
    # K and V that are no longer packed contradict the descriptor; anything else moves the wrong bytes.
    with pytest.raises(AssertionError if wrong.kv_size == row.kv_size else LayoutError):
        check(row, plan, told=1000)


@pytest.mark.parametrize(("row", "axis"), STRIDES, ids=lambda value: getattr(value, "name", value))
def test_a_stride_that_is_off_breaks_the_law(
    row: KVFormat, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = _paged.canonical_view

    def off(*args: Any) -> Any:
        view = true(*args)
        strides = list(view.strides)
        strides[axis] -= 1
        return replace(view, strides=tuple(strides))

    monkeypatch.setattr(_paged, "canonical_view", off)
    monkeypatch.setattr(CanonicalView, "overlaps", False)  # which would give it away before the law does
    with pytest.raises(AssertionError):
        check(row, Plan())
