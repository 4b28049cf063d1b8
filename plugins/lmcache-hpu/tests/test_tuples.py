"""An engine whose layers are K/V tuples, beside a real server, with the plugin serving its device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_hpu._native")

from hpu_on_sim import distribution
from test_shapes import Shapes

from helpers.devices import sim_served_by
from helpers.server import RunningServer, running_server
from helpers.vllm_caches import (
    MOVED,
    NAMES,
    SOURCE,
    TARGET,
    TUPLES,
    Make,
    check_comes_back,
    check_no_crossing,
    making,
)
from lmcache.testing.engine import BLOCK, CHUNK
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem
from lmcache_hpu import runtime

pytestmark = [pytest.mark.torch, pytest.mark.sim]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.fixture
def served(sim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The simulated device is the plugin's in this process; the pages that its mover was given, by call."""
    with sim_served_by("hpu-on-sim", tmp_path, distribution(tmp_path)):
        mover, calls = runtime.mover(), []
        whole = mover.move_pages

        def seen(pages: Any, *given: Any) -> None:
            calls.append(len(pages))
            whole(pages, *given)

        monkeypatch.setattr(mover, "move_pages", seen)
        yield calls


@pytest.fixture
def make(served: Any, server: RunningServer) -> Iterator[Make]:
    """Auto: what the plugin says is its mode."""
    with making(server, "sim", "auto") as one:
        yield one


@pytest.mark.parametrize("form", TUPLES)
def test_tuples_come_back_through_the_fixed_shapes_and_nothing_else_moves(
    make: Make, served: list[int], form: str
) -> None:
    check_comes_back(make, form, 1000 + 100 * TUPLES.index(form))
    assert served == [4, 4], "K and V of two layers, stored and loaded"
    assert make(form, "a third").context.mode.value == "engine_driven"


def test_no_layout_is_given_what_another_stored(make: Make) -> None:
    check_no_crossing(make, 2000)


def test_layer_by_layer_k_and_v_move_together(make: Make, served: list[int], sim: Any) -> None:
    one, tokens = make("slots", "by layer"), [3000, *range(1, 3 * CHUNK)]
    moves = LayeredTransfers(one.context)
    one.randomize(3)
    held = one.blocks()
    items = [StoreItem(CHUNK, chunk_hashes(tokens, Scope(chunk_size=CHUNK)), [SOURCE])]
    with sim.stream(sim.Stream()):
        for name in NAMES:
            moves.save(name, items)
        assert moves.end_stores(items, keep=True) == 3
        lease, found = one.find("r", tokens)
        moves.begin_loads([LoadItem("r", lease, found.epoch, found.slots[0], [TARGET], [0])])
        for name in NAMES:
            moves.wait(name)
        assert moves.end_loads() == []
    moves.close()
    assert served == [2, 2, 2, 2]
    assert one.differences(held, held, MOVED) == []


def test_a_cache_of_tuples_compiles_no_more_shapes_than_batches_have_sizes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.mover(), "sizes", (2, 4, 16))
    engine = make("slots", "shapes")

    def moved(lengths: range | tuple[int, ...], first: int) -> set[tuple[Any, ...]]:
        with Shapes() as shapes:
            for chunks in lengths:
                tokens = [first + chunks, *range(1, chunks * CHUNK)]
                blocks = list(range(1, 1 + chunks * CHUNK // BLOCK))
                assert engine.store(tokens, blocks) == chunks
                assert engine.load("r", tokens, blocks[::-1], wait_for=chunks) == chunks
        return shapes.seen

    few = moved((1, 2, 8), 5000)
    assert moved(range(1, 16), 6000) == few
    indexed = [entry for entry in few if entry[0].startswith(("aten.index_select", "aten.index_copy"))]
    assert len(indexed) == 2 * 3, indexed
