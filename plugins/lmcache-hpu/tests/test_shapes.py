"""Graphs are compiled per shape: what reaches the device is of few shapes, however long requests are."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_hpu._native")

from torch.utils._python_dispatch import TorchDispatchMode

from lmcache.testing.blocks import GATHER, SCATTER, BlockTransfer
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform import torch_ops

pytestmark = [pytest.mark.torch, pytest.mark.sim]

LENGTHS = (*range(1, 20), 31, 32, 33, 47, 64, 100, 127, 128, 129, 200, 300)


class Shapes(TorchDispatchMode):
    """Each operation that a graph would have, by its name and the shapes of what it is given on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        if any(t.device.type == "sim" for t in tensors):
            self.seen.add((str(func), *((tuple(t.shape), str(t.dtype), t.device.type) for t in tensors)))
        return func(*args, **(kwargs or {}))


class Graphs(Shapes):
    """What lazy mode would compile: all operations from one mark to the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lmcache_hpu import runtime

        super().__init__()
        self.compiled: set[tuple[Any, ...]] = set()
        self._open: list[Any] = []
        monkeypatch.setattr(runtime, "end_step", self.end)
        runtime.mover.cache_clear()

    def end(self) -> None:
        if self._open:
            self.compiled.add(tuple(self._open))
        self._open.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.clear()
        answer = super().__torch_dispatch__(func, types, args, kwargs)
        self._open += [entry for entry in self.seen if "index" in entry[0]]
        return answer


def moved(sim: Any, lengths: tuple[int, ...]) -> set[tuple[Any, ...]]:
    """Shapes of stores and loads of so many pages each."""
    from lmcache_hpu import runtime

    pages = [torch.zeros(400, 24, device="sim", dtype=torch.bfloat16) for _ in range(3)]
    host = torch.zeros(3, 400, 24, dtype=torch.bfloat16)
    with Shapes() as shapes:
        for count in lengths:
            places = [[host[layer, at].data_ptr() for at in range(count)] for layer in range(3)]
            for to_host in (True, False):
                runtime.mover().move_pages(pages, list(range(count)), places, to_host)
    return shapes.seen


def test_requests_of_any_length_make_no_more_shapes_than_one_of_each_size(sim: Any) -> None:
    from lmcache.v1.platform.fixed_shapes import DEFAULT_SIZES

    few = moved(sim, DEFAULT_SIZES)
    assert moved(sim, LENGTHS) == few
    indexed = {entry for entry in few if entry[0].startswith(("aten.index_select", "aten.index_copy"))}
    assert len(indexed) == 2 * len(DEFAULT_SIZES)


def test_the_setting_decides_how_many_shapes_there_are(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_HPU_BLOCK_SIZES", "16")
    seen = moved(sim, LENGTHS)
    assert {entry[1][0] for entry in seen if "index_select" in entry[0]} == {(400, 24)}
    assert {entry[2][0] for entry in seen if "index_select" in entry[0]} == {(16,)}


def test_the_baseline_makes_a_shape_per_length_so_the_count_can_tell(sim: Any) -> None:
    one, many = (
        ops_shapes(torch_ops.multi_layer_block_kv_transfer, lengths) for lengths in ((8,), (3, 5, 7, 8))
    )
    assert len(many) > len(one)


def test_blocks_between_pages_and_objects_on_the_device_make_few_shapes_too(sim: Any) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    op = HpuDeviceOps().multi_layer_block_kv_transfer
    assert ops_shapes(op, tuple(range(1, 9))) == ops_shapes(op, (8,))


@pytest.mark.parametrize("place", ["sim", "cpu"])
def test_graphs_do_not_follow_the_number_of_blocks_nor_of_objects(
    sim: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nor what the engine has pending: that is compiled by itself."""
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc
    from lmcache_hpu.ops import HpuDeviceOps

    row = kv_format("NL_X_TWO_X_NB_BS_NH_HS")
    pages = [tuple(torch.zeros(200, 4, 2, 8, device="sim") for _ in "kv") for _ in range(2)]
    desc = PageBufferShapeDesc(kv_size=2, nl=2, nb=200, bs=4, nh=2, hs=8, element_size=4)
    graphs, ops = Graphs(monkeypatch), HpuDeviceOps()
    pending, first = torch.zeros(8, device="sim"), torch.zeros(1, dtype=torch.int64, device="sim")
    for count in (1, 5, 8, 16, 17, 32, 40, 64):
        chunks = [torch.zeros(2, 2, 16 * 4, 16, device=place) for _ in range(-(-count // 16))]
        ids = [(7 * at + 3) % 200 for at in range(count)]
        for way in (GATHER, SCATTER):
            with graphs:
                pending.index_fill_(0, first, 1)
                ops.multi_layer_block_kv_transfer(
                    pages, chunks, ids, torch.device("sim"), way, desc, 16 * 4, row.id, 0
                )
    by_engine = {graph for graph in graphs.compiled if any("index_fill" in entry[0] for entry in graph)}
    assert [len(graph) for graph in by_engine] == [1]
    sizes = 1 if place == "sim" else 2  # of batches: an object on the device has fewer blocks than 32
    assert len(graphs.compiled - by_engine) == 2 * sizes


def ops_shapes(op: Any, lengths: tuple[int, ...]) -> set[tuple[Any, ...]]:
    """Shapes of a transfer of scattered blocks, by their number, between pages and one object."""
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc

    row = kv_format("NL_X_TWO_NB_BS_NH_HS")
    pages = [torch.zeros(2, 20, 4, 2, 8, device="sim") for _ in range(2)]
    chunk = torch.zeros(2, 2, 8 * 4, 16, device="sim")
    desc = PageBufferShapeDesc(kv_size=2, nl=2, nb=20, bs=4, nh=2, hs=8, element_size=4)
    with Shapes() as shapes:
        for count in lengths:
            ids = [(7 * at + 3) % 20 for at in range(count)]
            for way in (GATHER, SCATTER):
                op(pages, [chunk], ids, torch.device("sim"), way, desc, 32, row.id, 0)
    return shapes.seen


def test_the_kit_s_own_transfer_goes_the_same_way(sim: Any) -> None:
    """So what the conformance kit shows of bytes is shown of the fixed shapes."""
    from lmcache.v1.platform import fixed_shape_blocks
    from lmcache_hpu.ops import HpuDeviceOps

    took: list[bool] = []
    whole = fixed_shape_blocks.transfer

    def watched(*given: Any) -> bool:
        took.append(whole(*given))
        return took[-1]

    ops = HpuDeviceOps()
    fixed_shape_blocks.transfer = watched
    try:
        for fmt in ops.supported_formats("multi_layer_block_kv_transfer"):
            done = BlockTransfer(
                ops,
                torch.device("sim"),
                kv_format(fmt),
                "tensors",
                [7, 2, 5, 0, 8],
                1,
                GATHER,
                "float16" if kv_format(fmt).mark is None else kv_format(fmt).mark[0],
            )
            done.expect()
            done.run()
            sim.synchronize()
            assert not done.fault()
    finally:
        fixed_shape_blocks.transfer = whole
    assert took
    assert all(took)
