"""Slots of one layer, and of layers whose K and V are buffers of their own, against the same reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import TransferDirection

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
QUICK = settings(max_examples=12, deadline=None)
OPS = DeviceOps()
BY_LAYER = sorted(set(SERVED) - {0, 8})


@st.composite
def cases_and_plans(draw: st.DrawFn, strided: bool = True) -> tuple[Case, Plan]:
    case = draw(cases(strided))
    plan = draw(plans(case.slots))
    return case, Plan(plan.slots, 0, [(t, slot) for t, slot in enumerate(plan.slots) if slot >= 0])


def check(fmt: int, case: Case, plan: Plan, obj: Any, out: Any, back: Any, layers: Any = None) -> None:
    """``out(pages)`` fills the object from the slots of these layers, ``back(pages)`` restores them."""
    chosen = range(case.nl) if layers is None else layers
    source = build(fmt, case)
    held, rows, gaps = content(fmt, source), raw(obj), gaps_of(source)
    target = zeroed(source)
    expected = content(fmt, target)
    for token, slot in plan.moves:
        for layer in chosen:
            rows[:, layer, token] = held[:, layer, slot]
            expected[:, layer, slot] = held[:, layer, slot]
    out(source)
    assert (raw(obj) == rows).all()
    back(target)
    assert (content(fmt, target) == expected).all()
    assert (gaps_of(source), gaps_of(target)) == (gaps, gaps)
    assert (raw(obj) == rows).all()


def layer_of(fmt: int, paged: Any, layer: int) -> Any:
    return [part[layer] for part in paged] if Form.of(fmt).levels[0] == "2" else paged[layer]


def of_layer(obj: Any, layer: int, token_major: bool) -> Any:
    """``[KV, T, H]`` of an object, or ``[T, KV, H]`` over memory in that order."""
    return obj[:, layer] if not token_major else obj[:, layer].transpose(0, 1)


@pytest.mark.parametrize("fmt", BY_LAYER)
@given(both=cases_and_plans(), token_major=st.booleans(), flat=st.booleans(), spare=st.sampled_from([0, 2]))
@QUICK
def test_the_slots_of_one_layer_go_out_and_come_back_and_nothing_else_moves(
    fmt: int, both: tuple[Case, Plan], token_major: bool, flat: bool, spare: int
) -> None:
    case, plan = both
    layer = case.nl - 1
    tokens = len(plan.slots) + spare
    if token_major:  # rows of K and V of a token next to each other in memory
        form = Form.of(fmt)
        shape = (tokens, form.kv, case.nl, form.width(case) * case.dtype.itemsize)
        bytes_ = torch.randint(0, 256, shape, dtype=torch.uint8).view(-1).view(case.dtype)
        obj = bytes_.view(*shape[:3], form.width(case)).permute(1, 2, 0, 3)
    else:
        obj = an_object(fmt, case, tokens, spare)
    lmc = of_layer(obj, layer, token_major)
    if flat and Form.of(fmt).kv == 1:
        lmc = obj[0, layer]

    def move(paged: Any, way: int) -> None:
        OPS.single_layer_kv_transfer(lmc, layer_of(fmt, paged, layer), plan.slots, way, fmt, token_major)

    check(fmt, case, plan, obj, lambda p: move(p, D2H), lambda p: move(p, H2D), [layer])


@pytest.mark.parametrize("fmt", [4, 9])
@given(both=cases_and_plans(), token_major=st.booleans())
@QUICK
def test_k_and_v_of_one_layer_in_two_tensors_are_moved_the_same(
    fmt: int, both: tuple[Case, Plan], token_major: bool
) -> None:
    case, plan = both
    obj = an_object(fmt, case, len(plan.slots))
    lmc = of_layer(obj, 0, token_major)

    def move(paged: Any, way: int) -> None:
        k, v = layer_of(fmt, paged, 0)
        OPS.single_layer_kv_transfer_sgl(lmc, k, v, plan.slots, way, token_major)

    check(fmt, case, plan, obj, lambda p: move(p, D2H), lambda p: move(p, H2D), [0])


@pytest.mark.parametrize("fmt", [4, 9])
@given(both=cases_and_plans())
@QUICK
def test_the_older_ops_move_one_layer_of_an_object_of_all(fmt: int, both: tuple[Case, Plan]) -> None:
    case, plan = both
    layer = case.nl - 1
    obj = an_object(fmt, case, len(plan.slots))
    check(
        fmt,
        case,
        plan,
        obj,
        lambda p: OPS.load_and_reshape_flash(obj, *layer_of(fmt, p, layer), plan.slots, layer),
        lambda p: OPS.reshape_and_cache_back_flash(obj, *layer_of(fmt, p, layer), plan.slots, layer),
        [layer],
    )


@pytest.mark.parametrize("fmt", [3, 4, 5, 9])
@pytest.mark.parametrize("operand", ["addresses", "tensors in one list", "nested tensors"])
@given(data=st.data())
@QUICK
def test_buffers_of_k_and_of_v_are_moved_the_same(fmt: int, operand: str, data: Any) -> None:
    case, plan = data.draw(cases_and_plans(strided=operand != "addresses"))
    obj = an_object(fmt, case, len(plan.slots))

    def move(paged: Any, way: int) -> None:
        pages = paged if operand == "nested tensors" else list(leaves(paged))
        if operand == "addresses":
            pages = torch.tensor([tensor.data_ptr() for tensor in pages])
        OPS.multi_layer_kv_transfer_unilateral(obj, pages, plan.slots, "cpu", case.slots, way, fmt)

    check(fmt, case, plan, obj, lambda p: move(p, D2H), lambda p: move(p, H2D))


def test_buffers_may_be_two_dimensional() -> None:
    case = Case(nh=1)
    paged, obj = build(4, case), an_object(4, case, 3)
    flat = [tensor[:, 0] for tensor in leaves(paged)]
    held = content(4, paged)[:, :, [8, 0, 3]]
    OPS.multi_layer_kv_transfer_unilateral(obj, flat, [8, 0, 3], "cpu", case.slots, D2H, 4)
    assert (raw(obj) == held).all()
    one = torch.empty(2, 3, case.hs)
    OPS.single_layer_kv_transfer_sgl(one, flat[1], flat[case.nl + 1], [8, 0, 3], D2H)
    assert (raw(one) == held[:, 1]).all()


@pytest.mark.parametrize("way", [H2D, D2H])
def test_operands_of_one_layer_that_do_not_fit_are_refused_before_anything_moves(way: int) -> None:
    case = Case()
    paged, k, v = build(2, case)[0], *layer_of(9, build(9, case), 0)
    lmc, kv = an_object(2, case, 2)[:, 0], an_object(9, case, 2)
    single, sgl = OPS.single_layer_kv_transfer, OPS.single_layer_kv_transfer_sgl
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "slot 10 of token 1", lambda: single(lmc, paged, [0, 10], way, 2)),
        (LayoutError, "expected 2 for K and V", lambda: single(lmc[0], paged, [0], way, 2)),
        (ValueError, "3 slots: expected at most the 2 tokens", lambda: single(lmc, paged, [0, 1, 2], way, 2)),
        (LayoutError, "1 layers of 8", lambda: single(lmc[..., :4], paged, [0], way, 2)),
        (LayoutError, "is not of the form", lambda: single(lmc[0], paged, [0], way, 13)),
        (TypeError, "addresses alone do not say", lambda: single(lmc, paged.data_ptr(), [0], way, 2)),
        (LayoutError, "expected K and V, got 1 entries", lambda: single(lmc, k, [0], way, 9)),
        (TypeError, "expected a tensor, got int", lambda: single(lmc.data_ptr(), paged, [0], way, 2)),
        (LayoutError, "expected 2 for K and V", lambda: sgl(lmc[0], k, v, [0], way)),
        (LayoutError, "tensors differ: 10, 8", lambda: sgl(lmc, k, v[:4], [0], way)),
        (LayoutError, "is not of the form", lambda: sgl(lmc, k, v[0], [0], way)),
        (TypeError, "expected tensors of K and V, got int", lambda: sgl(lmc, k, 5, [0], way)),
        (ValueError, "layer=3: expected 0 to 2", lambda: OPS.load_and_reshape_flash(kv, k, v, [0], 3)),
        (ValueError, "layer=-1", lambda: OPS.reshape_and_cache_back_flash(kv, k, v, [0], -1)),
        (ValueError, "slot 10 of", lambda: OPS.reshape_and_cache_back_flash(kv, k, v, [10], 0)),
        (LayoutError, "expected 2 for K and V", lambda: OPS.load_and_reshape_flash(kv[0], k, v, [0], 0)),
        (TypeError, "expected a tensor, got int", lambda: OPS.load_and_reshape_flash(5, k, v, [0], 0)),
    ]
    before = [raw(side) for side in (paged, k, v, lmc, kv)]
    for error, match, op in calls:
        with pytest.raises(error, match=match):
            op()
    assert all((raw(s) == old).all() for s, old in zip((paged, k, v, lmc, kv), before, strict=True))


@pytest.mark.parametrize("way", [H2D, D2H])
def test_buffers_that_do_not_fit_are_refused_before_anything_moves(way: int) -> None:
    case = Case()
    paged, kv = build(4, case), an_object(4, case, 2)
    flat = list(leaves(paged))
    found = [tensor.data_ptr() for tensor in flat]
    before = [raw(side) for side in (*flat, kv)]
    for pages, error, match in [
        (flat[:5], LayoutError, "5 buffers: expected one of K and one of V per layer"),
        (flat[:4], LayoutError, "the pages have 2 layers of 8"),
        (found[:3], LayoutError, "3 pointers: expected 6"),
        ([*flat[:5], 7], TypeError, "got int"),
        (flat[0], TypeError, "expected tensors or addresses of K and V, got Tensor"),
        ([], LayoutError, "no tensors given"),
    ]:
        with pytest.raises(error, match=match):
            OPS.multi_layer_kv_transfer_unilateral(kv, pages, [0, 1], "cpu", case.slots, way, 4)
    assert all((raw(s) == old).all() for s, old in zip((*flat, kv), before, strict=True))
