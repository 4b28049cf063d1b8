"""The SDK's kernel bodies, looped over a grid on the host, do what the torch baseline does.

Whole blocks are compared with the baseline, transfers by slot with plain indexing. Every buffer has bytes before,
behind and (where it is padded) inside it that no transfer may touch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import sdk
from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format, kv_formats
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer, multi_layer_kv_transfer  # noqa: E402

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
SERVED = [row.id for row in kv_formats() if row.id < 100]
BY_SLOT = [fmt for fmt in SERVED if kv_format(fmt).token_addressable]
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD = 64
QUICK = settings(max_examples=15, deadline=None)
#: x, y, z, threads: one thread for all, a device's shape, and shapes that divide nothing.
GRIDS = [(1, 1, 1, 1), (9, 3, 2, 32), (2, 1, 1, 7), (3, 2, 2, 5), (20, 5, 3, 64)]


@dataclass(frozen=True)
class Case:
    """Sizes of one transfer. ``pad`` elements lie between blocks, ``shift`` before the first."""

    fmt: int
    nl: int = 3
    nb: int = 7
    bs: int = 2
    nh: int = 2
    hs: int = 3
    size: int = 4
    pad: int = 0
    shift: int = 0

    @property
    def row(self) -> KVFormat:
        return kv_format(self.fmt)

    @property
    def heads(self) -> int:
        return 1 if self.row.is_mla else self.nh

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a layer's planes, where they have their own."""
        return (self.hs, self.hs + 1, 2) if "NP" in self.row.dims.levels else ()

    @property
    def width(self) -> int:
        packed_pair = self.row.dims.axes[-2:] == ("2", "HS")
        return sum(self.widths) or self.hs * (2 if packed_pair else 1)

    def tensor_shape(self, width: int) -> tuple[int, ...]:
        sizes = {"NL": self.nl, "NB": self.nb, "BS": self.bs, "PBS": self.nb * self.bs, "NH": self.nh}
        return self.row.shape({**sizes, "HS": width, "CS": width})

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        strides, running = [], 1
        for symbol, count in zip(reversed(self.row.dims.axes), reversed(shape), strict=True):
            running += self.pad if symbol == "NB" else 0
            strides.append(running)
            running *= count
        return tuple(reversed(strides))

    def numbers(self) -> tuple[int, ...]:
        stride = 0
        if self.pad:
            shape = self.tensor_shape(self.hs)
            stride = self.strides(shape)[self.row.dims.axes.index("NB")]
        return (
            self.row.kv_size, self.nl, self.nb, self.bs, self.heads, self.width, self.size, stride
        )  # fmt: skip


def memory(nbytes: int) -> Any:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def tensor(case: Case, shape: tuple[int, ...], strides: tuple[int, ...], shift: int) -> Any:
    """Random content, with a guard on both sides; aligned no better than elements must be."""
    span = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    flat = memory(2 * GUARD + (span + shift + case.pad) * case.size).view(DTYPES[case.size])
    return flat.as_strided(shape, strides, GUARD // case.size + shift)


def tensors(case: Case) -> list[Any]:
    """The format's tensors, in the order of pointers."""
    levels = {"NL": case.nl, "2": 2, "NP": len(case.widths)}
    count = prod(levels[level] for level in case.row.dims.levels)
    made = []
    for at in range(count):
        shape = case.tensor_shape(case.widths[at % len(case.widths)] if case.widths else case.hs)
        made.append(tensor(case, shape, case.strides(shape), case.shift))
    return made


def objects(case: Case, count: int, slots: int) -> list[Any]:
    shape = (case.row.kv_size, case.nl, slots, case.heads * case.width)
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(4))
    return [tensor(case, shape, strides, case.shift) for _ in range(count)]


def storage(one: Any) -> Any:
    return torch.tensor([], dtype=torch.uint8).set_(one.untyped_storage())


def copies(many: Sequence[Any]) -> list[Any]:
    """The same tensors, with all memory around them, over memory of their own."""
    return [
        storage(t).clone().view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()) for t in many
    ]


def same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(torch.equal(storage(a), storage(b)) for a, b in zip(ones, others, strict=True))


def addresses(many: Sequence[Any]) -> list[int]:
    return [int(t.data_ptr()) for t in many]


def emulate(case: Case, way: int, pages: list[Any], objs: list[Any], ids: Sequence[int], **more: Any) -> None:
    slots = objs[0].shape[0 if more.get("token_major") else 2] if objs else case.bs
    arguments = (case.fmt, way, case.numbers(), addresses(pages), addresses(objs), ids, slots)
    for plane in range(max(len(case.widths), 1)):
        sdk.transfer(*arguments, widths=case.widths, plane=plane, **more)


# ------------------------------------------------------------------------------------------- whole blocks
def baseline(case: Case, way: int, pages: list[Any], objs: list[Any], ids: list[int], skip: int) -> None:
    """The torch baseline on the same tensors; where slots are one axis, on views that have blocks."""
    fmt, per_layer = case.fmt, max(len(case.widths), 2)
    if case.row.is_pbs_fused:
        fmt = 9 if case.row.is_kv_list else 3
        inner = (case.nb, case.bs, case.nh, case.hs) if fmt == 9 else (case.nb, case.bs, case.hs)
        pages = [page.view(inner) for page in pages]
    nested: Any = pages
    if kv_format(fmt).is_kv_list:
        nested = [pages[: case.nl], pages[case.nl :]]
    elif kv_format(fmt).is_kv_second_tuple:
        nested = [tuple(pages[at : at + per_layer]) for at in range(0, len(pages), per_layer)]
    desc = PageBufferShapeDesc(*case.numbers()[:7])
    slots = objs[0].shape[2] if objs else case.bs
    multi_layer_block_kv_transfer(nested, objs, ids, "cpu", way, desc, slots, fmt, skip)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Case, list[int], int, int, int]:
    """Sizes, permuted ids, objects, blocks per object, blocks to skip. The tail may be short or absent."""
    case = Case(
        fmt=0,
        nl=draw(st.integers(1, 3)),
        nb=draw(st.integers(1, 9)),
        bs=draw(st.sampled_from([1, 2, 3, 8])),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.sampled_from([1, 3, 4, 8, 16])),
        size=draw(st.sampled_from(sorted(DTYPES))),
        pad=draw(st.sampled_from([0, 0, 5, 16])),
        shift=draw(st.sampled_from([0, 0, 1, 4])),
    )
    ids = draw(st.permutations(range(case.nb)))[: draw(st.integers(0, case.nb))]
    per_object = draw(st.integers(1, 4))
    count = -(-len(ids) // per_object) + draw(st.integers(0, 1))
    return case, ids, count, per_object, draw(st.integers(0, len(ids) + 1))


def of_format(case: Case, fmt: int) -> Case:
    """The case in this format. Slots of one axis and planes of other widths cannot be padded alike."""
    unpadded = kv_format(fmt).is_pbs_fused or "NP" in kv_format(fmt).dims.levels
    return replace(case, fmt=fmt, pad=0 if unpadded else case.pad)


@pytest.mark.parametrize("fmt", SERVED)
@given(plan=plans(), grid=st.sampled_from(GRIDS))
@QUICK
def test_blocks_move_as_the_baseline_moves_them_and_nothing_else_is_touched(
    fmt: int, plan: tuple[Case, list[int], int, int, int], grid: tuple[int, ...]
) -> None:
    base, ids, count, per_object, skip = plan
    case = of_format(base, fmt)
    pages, objs = tensors(case), objects(case, count, per_object * case.bs)
    for way in (D2H, H2D):
        mine, theirs = (copies(pages), copies(objs)), (copies(pages), copies(objs))
        emulate(case, way, *mine, ids, skip=skip, grid=grid)
        baseline(case, way, *theirs, ids, skip)
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The op that the SDK's document writes, over the module that it writes."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "module.cpp").write_text(sdk.example("cpp"))
    (folder / "native.py").write_text(sdk.example("python"))
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=undefined", *sdk.STRICT)
    sdk.run(sdk.cxx(), *flags, folder / "module.cpp", "-o", folder / "foo.so")
    return sdk.load(folder / "native.py").FooKernels(str(folder / "foo.so")).multi_layer_block_kv_transfer


@pytest.mark.parametrize("fmt", [0, 2, 9, 12, 16])
def test_the_documented_op_does_what_the_baseline_does(fmt: int, documented: Any) -> None:
    case = Case(fmt=fmt, nb=6, size=2)
    pages, objs = tensors(case), objects(case, 2, 2 * case.bs)
    desc = PageBufferShapeDesc(*case.numbers())
    arguments = ([5, 0, 3], "cpu", D2H, desc, 2 * case.bs, fmt, 1)
    expected = copies(objs)
    baseline(case, D2H, pages, expected, [5, 0, 3], 1)
    nested = {0: pages, 9: [pages[:3], pages[3:]], 16: [tuple(pages[at : at + 2]) for at in (0, 2, 4)]}
    documented(nested.get(fmt, pages), objs, *arguments)
    assert same(objs, expected)


@pytest.mark.parametrize("odd", ["pages", "objects"])
def test_the_documented_op_serves_tensors_that_eight_numbers_do_not_describe(
    odd: str, documented: Any
) -> None:
    case = Case(fmt=13, nb=6, size=2)
    pages, objs = tensors(case), objects(case, 2, 2 * case.bs + (odd == "objects"))
    if odd == "pages":
        pages = [page.transpose(1, 2).contiguous().transpose(1, 2) for page in pages]
    desc, expected = PageBufferShapeDesc(*case.numbers()), copies(objs)
    for where, op in ((objs, documented), (expected, multi_layer_block_kv_transfer)):
        op(pages, where, [5, 0, 3], "cpu", D2H, desc, 2 * case.bs, 13, 1)
    assert same(objs, expected)


@pytest.mark.parametrize("fmt", [fmt for fmt in SERVED if fmt != 17])
def test_the_documented_op_refuses_a_table_of_pages_of_another_length(fmt: int, documented: Any) -> None:
    case = Case(fmt=fmt)
    pages, objs = tensors(case), objects(case, 1, 4)
    desc = PageBufferShapeDesc(*case.numbers())
    documented(pages, objs, [0], "cpu", D2H, desc, 4, fmt)
    for wrong in (pages[:-1], [*pages, pages[0]]):
        with pytest.raises(LayoutError, match="count"):
            documented(wrong, objs, [0], "cpu", D2H, desc, 4, fmt)


def test_the_documented_op_refuses_by_name_and_number(documented: Any) -> None:
    case = Case(fmt=12)
    pages, objs = tensors(case), objects(case, 1, 4)
    desc = PageBufferShapeDesc(*case.numbers())
    with pytest.raises(LayoutError, match="KV format 100: the KV format has no blocks"):
        documented(pages, objs, [0], "cpu", D2H, desc, 4, 100)
    with pytest.raises(ValueError, match="expected 0 to 6"):
        documented(pages, objs, [7], "cpu", D2H, desc, 4, 12)


# ---------------------------------------------------------------------------------------------- by slots
def planes_of(case: Case, pages: list[Any]) -> list[tuple[Any, int, int]]:
    """Every plane of every layer as ``[NB, BS, heads, W]``, with its index in the object: (kv, layer).

    Written out per format, without the layout table.
    """
    found = []
    for layer in range(case.nl):
        if case.fmt in (0, 8):
            both = [pages[0][:, layer, kv] for kv in range(2)]
        elif case.fmt in (1, 6, 15):
            both = [pages[layer][kv] for kv in range(2)]
        elif case.fmt in (2, 7):
            both = [pages[layer][:, kv] for kv in range(2)]
        elif case.fmt in (4, 9):
            both = [pages[layer], pages[case.nl + layer]]
        elif case.fmt == 16:
            both = [pages[2 * layer], pages[2 * layer + 1]]
        else:
            both = [pages[layer]]
        for kv, plane in enumerate(both):
            if case.fmt == 15:
                plane = plane[:, :, 0]
            if case.fmt in (6, 7, 8, 10, 12, 15):
                plane = plane.transpose(1, 2)
            if case.fmt in (4, 5):
                plane = plane.unflatten(0, (case.nb, case.bs))
            found.append((plane, kv, layer))
    return found


def by_index(case: Case, way: int, pages: list[Any], obj: Any, slots: Sequence[int], skip: int) -> None:
    """Slot by slot with plain indexing; ``obj`` is indexed ``[kv, layer, token]``."""
    for token, slot in enumerate(slots):
        if token < skip or not 0 <= slot < case.nb * case.bs:
            continue
        for plane, kv, layer in planes_of(case, pages):
            here = plane[slot // case.bs, slot % case.bs]
            if way == D2H:
                obj[kv, layer, token] = here.reshape(-1)
            else:
                here[:] = obj[kv, layer, token].view(here.shape)


@st.composite
def mappings(draw: st.DrawFn) -> tuple[Case, list[int], int]:
    case = draw(plans())[0]
    total = case.nb * case.bs
    slots = draw(st.permutations(range(total)))[: draw(st.integers(1, total))]
    holes = draw(st.lists(st.sampled_from([-1, -7, total, total + 100]), max_size=3))
    return case, draw(st.permutations([*slots, *holes])), draw(st.integers(0, len(slots) + 1))


@pytest.mark.parametrize("fmt", [fmt for fmt in BY_SLOT if fmt != 17])
@given(mapping=mappings(), grid=st.sampled_from(GRIDS))
@QUICK
def test_slots_move_as_plain_indexing_moves_them_and_holes_are_left_alone(
    fmt: int, mapping: tuple[Case, list[int], int], grid: tuple[int, ...]
) -> None:
    base, slots, skip = mapping
    case = of_format(base, fmt)
    pages, objs = tensors(case), objects(case, 1, len(slots))
    for way in (D2H, H2D):
        mine, theirs = (copies(pages), copies(objs)), (copies(pages), copies(objs))
        emulate(case, way, *mine, slots, skip=skip, grid=grid, by_slot=True)
        by_index(case, way, theirs[0], theirs[1][0], slots, skip)
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("fmt", "by_slot"), [(fmt, False) for fmt in SERVED] + [(fmt, True) for fmt in BY_SLOT]
)
def test_a_kernel_in_opencl_c_finds_the_same_bytes(fmt: int, by_slot: bool) -> None:
    case = of_format(Case(fmt=fmt, bs=3, size=2, pad=4, shift=1), fmt)
    pages, ids = tensors(case), [5, 0, 3]
    objs = objects(case, 1, 3 if by_slot else 3 * case.bs)
    expected = copies(objs)
    emulate(case, D2H, pages, expected, ids, by_slot=by_slot)
    emulate(case, D2H, pages, objs, ids, by_slot=by_slot, opencl=True, grid=(0, 0, 0, 5))
    assert same(objs, expected)


@pytest.mark.parametrize("fmt", [1, 2, 3, 7, 9, 12])
@given(mapping=mappings(), grid=st.sampled_from(GRIDS))
@QUICK
def test_one_layer_moves_to_and_from_token_major_objects(
    fmt: int, mapping: tuple[Case, list[int], int], grid: tuple[int, ...]
) -> None:
    base, slots, skip = mapping
    case = replace(of_format(base, fmt), nl=1)
    pages = tensors(case)
    shape = (len(slots), case.row.kv_size, case.heads * case.width)
    objs = [tensor(case, shape, (shape[1] * shape[2], shape[2], 1), case.shift)]
    for way in (D2H, H2D):
        mine, theirs = (copies(pages), copies(objs)), (copies(pages), copies(objs))
        emulate(case, way, *mine, slots, skip=skip, grid=grid, by_slot=True, token_major=True)
        by_index(case, way, theirs[0], theirs[1][0].permute(1, 0, 2).unsqueeze(1), slots, skip)
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])


@pytest.mark.parametrize("pad", [None, 0, 5])
@pytest.mark.parametrize("fmt", [fmt for fmt in BY_SLOT if kv_format(fmt).is_block_addressable and fmt != 17])
def test_a_block_stride_means_the_same_to_the_baseline_s_two_ways_and_to_the_kernels(
    fmt: int, pad: int | None
) -> None:
    """0, tight and padded, on blocks that are not the outermost axis too."""
    case = Case(fmt=fmt, pad=pad or 0)
    pages, blocks, total = tensors(case), [5, 0, 3], case.nb * case.bs
    slots = [block * case.bs + slot for block in blocks for slot in range(case.bs)]
    numbers = list(case.numbers())
    if pad == 0:
        numbers[7] = case.strides(case.tensor_shape(case.hs))[case.row.dims.axes.index("NB")]
    want, *found = (objects(case, 1, len(slots)) for _ in range(5))
    by_index(case, D2H, pages, want[0], slots, 0)
    given = (fmt, D2H, numbers, addresses(pages))
    desc, stride = PageBufferShapeDesc(*numbers), numbers[7]
    multi_layer_block_kv_transfer(
        addresses(pages), addresses(found[0]), blocks, "cpu", D2H, desc, len(slots), fmt
    )
    multi_layer_kv_transfer(
        found[1][0], addresses(pages), slots, "cpu", total, D2H, fmt, case.bs, case.width, 0, stride
    )
    sdk.transfer(*given, addresses(found[2]), blocks, len(slots))
    sdk.transfer(*given, addresses(found[3]), slots, len(slots), by_slot=True)
    for (obj,) in found:
        assert torch.equal(obj.view(torch.int32), want[0].view(torch.int32))


def test_planes_of_their_own_width_move_by_slot_into_their_columns() -> None:
    case = Case(fmt=17, size=2)
    pages, objs = tensors(case), objects(case, 1, 3)
    emulate(case, D2H, pages, objs, [9, -1, 2], by_slot=True)
    for layer in range(case.nl):
        for token, slot in ((0, 9), (2, 2)):
            parts = [
                pages[3 * layer + plane][slot // case.bs, slot % case.bs].flatten() for plane in range(3)
            ]
            assert torch.equal(objs[0][0, layer, token], torch.cat(parts))


# ------------------------------------------------------------------------------------------------- rotary
def rope_table(positions: int, rotated: int, factor: float = 1.0) -> tuple[Any, Any]:
    """Angles, and the table of their cosines and sines, all multiplied by one factor as YaRN does."""
    angle = torch.outer(
        torch.arange(float(positions)), 10000.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    )
    return angle, (torch.cat([angle.cos(), angle.sin()], dim=1) * factor).contiguous()


def rotate(keys: Any, table: Any, old: Any, new: Any, rope: sdk.Rope, grid: tuple[int, ...]) -> None:
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (keys, table, old, new)]
    sdk.emulation().emu_rope(*pointers, ctypes.byref(rope), sdk.Four(*grid))


@pytest.mark.parametrize("factor", [1.0, 1.7])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_keys_are_rotated_from_their_old_positions_to_the_new(
    interleaved: bool, grid: tuple[int, ...], factor: float
) -> None:
    tokens, heads, size, rotated = 5, 3, 10, 8
    angle, table = rope_table(50, rotated, factor)
    plain = torch.randn(tokens, heads, size)
    old, new = torch.randint(0, 50, (tokens,)), torch.randint(0, 50, (tokens,))

    def turned(positions: Any) -> Any:
        """By complex numbers, not by the formula of the body."""
        head = plain[..., :rotated]
        pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
        spun = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle[positions])[:, None] * factor
        parts = torch.view_as_real(spun)
        out = plain.clone()
        out[..., :rotated] = (parts if interleaved else parts.transpose(-1, -2)).flatten(-2)
        return out

    keys = turned(old).contiguous()
    rope = sdk.Rope(tokens, heads, rotated, interleaved, heads * size, size)
    rotate(keys, table, old, new, rope, grid)
    torch.testing.assert_close(keys, turned(new), rtol=1e-5, atol=1e-5)
    assert torch.equal(keys[..., rotated:], plain[..., rotated:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_rotation_is_the_baseline_s(interleaved: bool, factor: float) -> None:
    from lmcache.v1.platform.torch_ops.rope import rotary_embedding_k_fused_strided

    tokens, heads, size, rotated, step = 40, 2, 12, 8, 3
    _, table = rope_table(30, rotated, factor)
    memory = torch.randn(tokens, heads, size * step)
    keys, expected = memory.clone(), memory.clone()
    old, new = torch.randint(0, 30, (tokens,)), torch.randint(0, 30, (tokens,))
    rotary_embedding_k_fused_strided(old, new, expected[..., ::step], size, size, table, not interleaved)
    rope = sdk.Rope(tokens, heads, rotated, interleaved, heads * size * step, size * step, step, 30)
    rotate(keys, table, old, new, rope, GRIDS[0])
    torch.testing.assert_close(keys, expected, rtol=1e-6, atol=1e-6)


def test_a_key_whose_position_stays_or_is_not_in_the_table_keeps_every_bit() -> None:
    _, table = rope_table(4, 4, 1.3)
    keys = torch.tensor([-0.0, float("inf"), float("nan"), 0.1]).repeat(4, 1, 1).contiguous()
    before = keys.clone()
    old, new = torch.tensor([3, 1, -1, 0]), torch.tensor([3, 4, 2, -2])
    rotate(keys, table, old, new, sdk.Rope(4, 1, 4, 0, 4, 4, 1, 4), GRIDS[0])
    assert torch.equal(keys.view(torch.int32), before.view(torch.int32))
