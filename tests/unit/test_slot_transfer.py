"""Slots of all layers, both ways, for every layout that has slots, against a reference read off its string."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.slot_cases import (  # noqa: E402
    SERVED,
    Case,
    Form,
    Plan,
    an_object,
    build,
    cases,
    content,
    gaps_of,
    leaves,
    plans,
    raw,
    zeroed,
)

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
QUICK = settings(max_examples=10, deadline=None)
OPS = DeviceOps()
BLOCKS_OUTERMOST = [fmt for fmt in SERVED if Form.of(fmt).axes[0] == "NB" and fmt != 17]


def transfer(
    fmt: int, case: Case, kv: Any, paged: Any, plan: Plan, way: int, sizes: tuple[int, ...] = (0, 0)
) -> None:
    block_size, head_size, *stride = sizes
    OPS.multi_layer_kv_transfer(
        kv,
        paged,
        torch.tensor(plan.slots),
        "cpu",
        case.slots,
        way,
        fmt,
        block_size,
        head_size,
        plan.skip,
        *stride,
    )


def check_both_ways(fmt: int, case: Case, plan: Plan, spare: int, operand: Any, **how: Any) -> None:
    """D2H is what the reference reads; H2D into zeroed pages restores the slots named and nothing else."""
    source = build(fmt, case)
    held = content(fmt, source)
    source_gaps = gaps_of(source)
    obj = an_object(fmt, case, len(plan.slots) + spare, spare)
    rows = raw(obj)
    for token, slot in plan.moves:
        rows[:, :, token] = held[:, :, slot]

    transfer(fmt, case, obj, operand(source), plan, D2H, **how)
    assert (raw(obj) == rows).all()
    assert (content(fmt, source) == held).all()
    assert gaps_of(source) == source_gaps

    target = zeroed(source)
    expected = content(fmt, target)
    assert not expected.any()
    for _, slot in plan.moves:
        expected[:, :, slot] = held[:, :, slot]
    transfer(fmt, case, obj, operand(target), plan, H2D, **how)
    assert (content(fmt, target) == expected).all()
    assert gaps_of(target) == source_gaps
    assert (raw(obj) == rows).all()


@st.composite
def cases_and_plans(draw: st.DrawFn, strided: bool = True) -> tuple[Case, Plan]:
    case = draw(cases(strided))
    return case, draw(plans(case.slots))


@pytest.mark.parametrize("fmt", SERVED)
@given(both=cases_and_plans(), spare=st.sampled_from([0, 0, 3]))
@QUICK
def test_named_slots_of_tensors_go_out_and_come_back_and_nothing_else_moves(
    fmt: int, both: tuple[Case, Plan], spare: int
) -> None:
    check_both_ways(fmt, *both, spare, lambda paged: paged)


@pytest.mark.parametrize("fmt", SERVED)
@given(both=cases_and_plans(), spare=st.sampled_from([0, 0, 3]))
@QUICK
def test_slots_that_the_host_must_not_look_at_are_moved_the_same(
    fmt: int, both: tuple[Case, Plan], spare: int
) -> None:
    with mock.patch("lmcache.v1.platform.torch_ops._slots._is_host", return_value=False):
        check_both_ways(fmt, *both, spare, lambda paged: paged)


@pytest.mark.parametrize("fmt", sorted(set(SERVED) - {17}))
@given(both=cases_and_plans(strided=False), as_list=st.booleans(), spare=st.sampled_from([0, 0, 3]))
@QUICK
def test_named_slots_of_pages_known_by_address_are_moved_the_same(
    fmt: int, both: tuple[Case, Plan], as_list: bool, spare: int
) -> None:
    case, plan = both

    def addresses(paged: Any) -> Any:
        found = [tensor.data_ptr() for tensor in leaves(paged)]
        return found if as_list else torch.tensor(found)

    sizes = (case.bs, Form.of(fmt).head_size(case))
    check_both_ways(fmt, case, plan, spare, addresses, sizes=sizes)


@pytest.mark.parametrize("fmt", BLOCKS_OUTERMOST)
@given(both=cases_and_plans(strided=False), pad=st.integers(0, 9))
@QUICK
def test_a_stride_between_blocks_is_kept_to_with_addresses(
    fmt: int, both: tuple[Case, Plan], pad: int
) -> None:
    case, plan = both
    rank = len(Form.of(fmt).axes)
    padded = replace(case, gaps=(*[0] * (rank - 2), pad, *[0] * 6))  # after the last axis inside a block
    stride = next(leaves(build(fmt, padded))).stride(0)
    sizes = (case.bs, Form.of(fmt).head_size(case), stride)
    check_both_ways(fmt, padded, plan, 0, lambda p: [t.data_ptr() for t in leaves(p)], sizes=sizes)


@pytest.mark.parametrize("fmt", [1, 3, 4, 5, 9, 11, 13, 16, 18])
@given(both=cases_and_plans(strided=False))
@QUICK
def test_addresses_alone_are_enough_where_slots_and_heads_follow_each_other(
    fmt: int, both: tuple[Case, Plan]
) -> None:
    check_both_ways(fmt, *both, 0, lambda paged: [tensor.data_ptr() for tensor in leaves(paged)])


@pytest.mark.parametrize("fmt", [fmt for fmt in SERVED if "NB" in Form.of(fmt).axes])
@given(case=cases(), data=st.data())
@QUICK
def test_whole_blocks_read_by_slots_equal_blocks_read_by_blocks(fmt: int, case: Case, data: Any) -> None:
    blocks = data.draw(st.permutations(range(case.nb)))[: data.draw(st.integers(1, case.nb))]
    slots = [block * case.bs + slot for block in blocks for slot in range(case.bs)]
    paged = build(fmt, case)
    by_slots, by_blocks = an_object(fmt, case, len(slots)), an_object(fmt, case, len(slots))
    transfer(fmt, case, by_slots, paged, Plan(slots, 0), D2H)
    form = Form.of(fmt)
    nh = case.nh if "NH" in form.axes else 1
    shape = PageBufferShapeDesc(
        form.kv, case.nl, case.nb, case.bs, nh, form.width(case) // nh, case.dtype.itemsize
    )
    OPS.multi_layer_block_kv_transfer(paged, [by_blocks], blocks, "cpu", D2H, shape, len(slots), fmt, 0)
    assert (raw(by_slots) == raw(by_blocks)).all()


@pytest.mark.parametrize("fmt", [0, 2, 4, 12, 13])
def test_long_runs_of_slots_are_moved_as_runs_and_to_the_same_effect(fmt: int) -> None:
    case = Case(nl=2, nb=96, bs=16, nh=4, hs=64)
    slots = [*range(900, 1400), *range(40, 600)]
    plan = Plan(slots, 30, list(enumerate(slots))[30:])
    from lmcache.v1.platform.torch_ops import _slots

    with mock.patch.object(_slots, "_copy_runs", wraps=_slots._copy_runs) as runs:
        check_both_ways(fmt, case, plan, 0, lambda paged: paged)
    # Where a block's slots are not next to those of the block after it, there are no such runs.
    assert bool(runs.call_count) == (fmt in (4, 13))


@pytest.mark.parametrize("make", [list, torch.tensor, lambda s: torch.tensor(s, dtype=torch.int32)])
def test_slots_may_be_a_list_or_integers_of_any_size(make: Any) -> None:
    case, paged = Case(), build(13, Case())
    obj = an_object(13, case, 3)
    OPS.multi_layer_kv_transfer(obj, paged, make([7, -1, 2]), "cpu", case.slots, D2H, 13)
    held = content(13, paged)
    assert (raw(obj)[:, :, [0, 2]] == held[:, :, [7, 2]]).all()


@pytest.mark.parametrize("slots", [[], [-1, -5], [3, 4]])
def test_nothing_moves_where_no_slot_is_left(slots: list[int]) -> None:
    case = Case()
    for way in (H2D, D2H):
        paged, obj = build(2, case), an_object(2, case, 2)
        before = content(2, paged), raw(obj)
        transfer(2, case, obj, paged, Plan(slots, 2), way)
        assert (content(2, paged) == before[0]).all()
        assert (raw(obj) == before[1]).all()


def test_of_equal_slots_each_element_is_that_of_one_row() -> None:
    case = Case()
    paged, obj = build(12, case), an_object(12, case, 4)
    transfer(12, case, obj, paged, Plan([3, 8, 3, 3], 0), H2D)
    held, rows = content(12, paged), raw(obj)
    assert ((held[:, :, 3, None] == rows[:, :, [0, 2, 3]]).any(axis=2)).all()
    assert (held[:, :, 8] == rows[:, :, 1]).all()


def test_an_object_of_one_plane_may_lack_the_plane_axis_and_a_bare_tensor_may_stand_in_a_list() -> None:
    case, plan = Case(), Plan([4, 1], 0)
    paged, obj = build(3, case), an_object(3, case, 2)
    transfer(3, case, obj[0], paged, plan, D2H)
    assert (raw(obj) == content(3, paged)[:, :, plan.slots]).all()
    paged, obj = build(8, case), an_object(8, case, 2)
    transfer(8, case, obj, [paged], plan, D2H)
    assert (raw(obj) == content(8, paged)[:, :, plan.slots]).all()
