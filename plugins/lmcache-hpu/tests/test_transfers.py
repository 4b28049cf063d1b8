"""Blocks and pages on the simulated accelerator, by the same Python as on Gaudi."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_hpu._native")

from lmcache.testing.blocks import GATHER, SCATTER
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform.ops_types import PageBufferShapeDesc

pytestmark = [pytest.mark.torch, pytest.mark.sim]

BLOCKS, SIZE, HEADS, WIDTH, LAYERS = 20, 4, 2, 8, 3
FORMS = {
    "K and V as tuples": ("NL_X_TWO_X_NB_BS_NH_HS", (BLOCKS, SIZE, HEADS, WIDTH), 2),
    "K and V in one tensor": ("NL_X_TWO_NB_BS_NH_HS", (2, BLOCKS, SIZE, HEADS, WIDTH), 2),
    "heads outside slots": ("NL_X_NB_TWO_NH_BS_HS", (BLOCKS, 2, HEADS, SIZE, WIDTH), 2),
    "one latent": ("NL_X_NB_BS_HS", (BLOCKS, SIZE, WIDTH), 1),
}
IDS = [7, 2, 19, 0, 11, 3, 5]


def case(form: str, place: str) -> dict[str, Any]:
    """Pages on the device, and two objects of four blocks."""
    name, shape, kv = FORMS[form]
    torch.manual_seed(3)

    def tensor() -> Any:
        return torch.randn(shape).to(torch.bfloat16).to("sim")

    pages = [(tensor(), tensor()) if name.startswith("NL_X_TWO_X") else tensor() for _ in range(LAYERS)]
    heads = 1 if "NH" not in name else HEADS
    objects = [
        torch.randn(kv, LAYERS, 4 * SIZE, heads * WIDTH).to(torch.bfloat16).to(place) for _ in range(2)
    ]
    desc = PageBufferShapeDesc(kv_size=kv, nl=LAYERS, nb=BLOCKS, bs=SIZE, nh=heads, hs=WIDTH, element_size=2)
    return {"pages": pages, "objects": objects, "desc": desc, "row": kv_format(name)}


def run(op: Any, made: dict[str, Any], way: int, ids: Any = IDS, skip: int = 1) -> None:
    op(
        made["pages"], made["objects"], ids, torch.device("sim"), way, made["desc"], 4 * SIZE, made["row"].id, skip
    )  # fmt: skip
    torch.sim.synchronize()


def everything(made: dict[str, Any]) -> list[Any]:
    flat = [t for part in made["pages"] for t in (part if isinstance(part, tuple) else (part,))]
    return [t.cpu().clone() for t in [*flat, *made["objects"]]]


@pytest.mark.parametrize("way", [GATHER, SCATTER], ids=["gather", "scatter"])
@pytest.mark.parametrize("place", ["sim", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_move_as_torch_moves_them(sim: Any, form: str, place: str, way: int) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    mine, theirs = case(form, place), case(form, place)
    before = everything(mine)
    run(HpuDeviceOps().multi_layer_block_kv_transfer, mine, way)
    run(torch_ops.multi_layer_block_kv_transfer, theirs, way)
    assert all(
        torch.equal(one, other) for one, other in zip(everything(mine), everything(theirs), strict=True)
    )
    assert any(not torch.equal(one, other) for one, other in zip(everything(mine), before, strict=True))


@pytest.mark.parametrize("place", ["sim", "cpu"])
def test_a_block_that_is_written_twice_holds_the_last(sim: Any, place: str) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    mine, theirs = case("K and V as tuples", place), case("K and V as tuples", place)
    for made, op in (
        (mine, HpuDeviceOps().multi_layer_block_kv_transfer),
        (theirs, torch_ops.multi_layer_block_kv_transfer),
    ):
        run(op, made, SCATTER, [4, 5, 4, 4, 9, 5], 0)
    assert all(
        torch.equal(one, other) for one, other in zip(everything(mine), everything(theirs), strict=True)
    )


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0, BLOCKS], f"block id {BLOCKS}"), ([-1], "block id -1"), (list(range(9)), "9 block ids")],
)
@pytest.mark.parametrize("way", [GATHER, SCATTER])
def test_what_is_out_of_range_is_refused_in_the_baseline_s_words_and_nothing_moves(
    sim: Any, ids: list[int], said: str, way: int
) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    made = case("K and V as tuples", "sim")
    before = everything(made)
    with pytest.raises(ValueError, match=said):
        run(HpuDeviceOps().multi_layer_block_kv_transfer, made, way, ids, 0)
    assert all(torch.equal(one, other) for one, other in zip(everything(made), before, strict=True))


def test_what_was_queued_before_a_store_is_in_what_is_stored(sim: Any) -> None:
    from lmcache_hpu import runtime

    pages = torch.zeros(8, 1 << 16, device="sim")
    host = torch.zeros(8, 1 << 16)
    sim.set_delay(2000)
    try:
        pages.copy_(torch.ones(8, 1 << 16), non_blocking=True)
        places = [[host[at].data_ptr() for at in range(8)]]
        runtime.mover().move_pages([pages], list(range(8)), places, True)
    finally:
        sim.set_delay(0)
    assert bool((host == 1).all())


def test_objects_on_the_device_are_not_waited_for(sim: Any) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    made = case("one latent", "sim")
    waits: list[Any] = []
    from lmcache_hpu import runtime

    runtime.mover()._synchronize = waits.append
    run(HpuDeviceOps().multi_layer_block_kv_transfer, made, GATHER)
    assert waits == []


def test_with_the_native_part_off_torch_serves_and_bytes_are_the_same(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_hpu.ops import HpuDeviceOps
    from lmcache_hpu.spec import HpuDeviceSpec

    monkeypatch.setenv("LMCACHE_HPU_NATIVE", "off")
    ops = HpuDeviceOps()
    ops.ensure_native()
    assert ops.binding_report().bound == ()
    assert HpuDeviceSpec().page_mover is None
    mine, theirs = case("K and V as tuples", "cpu"), case("K and V as tuples", "cpu")
    run(ops.multi_layer_block_kv_transfer, mine, GATHER)
    run(torch_ops.multi_layer_block_kv_transfer, theirs, GATHER)
    assert all(
        torch.equal(one, other) for one, other in zip(everything(mine), everything(theirs), strict=True)
    )
