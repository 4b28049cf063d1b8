"""Loads and stores layer by layer: the bytes of a load in one go, and nothing that nobody waited for."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.rig import BLOCK, Rig
from helpers.server import wait_for
from lmcache.errors import LMCacheError
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.embedded import EmbeddedServer
from lmcache.v1.multiprocess.transfer_context import layered, pages
from lmcache.v1.multiprocess.transfer_context.engine_driven import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem

CHUNK = 2 * BLOCK
LAYERS = ("first", "middle", "last")
SIZES = (256, 384, 128)
TOKENS = list(range(5 * CHUNK))
A, B = list(range(1, 11)), list(range(20, 30))


class Layered:
    """A rig of one rank whose pages move layer by layer."""

    def __init__(self, server: EmbeddedServer, **settings: Any) -> None:
        self.server = server
        settings = {"page_bytes": SIZES, "layers": LAYERS, "pad": 64} | settings
        self.rig = Rig(server.address, "engine", **settings)
        context = self.rig.workers[0]
        assert isinstance(context, EngineDrivenTransferContext)
        self.context, self.moves = context, LayeredTransfers(context)

    def stores(self, account: str = "") -> list[StoreItem]:
        self.rig.compute(TOKENS, A)
        return [StoreItem(CHUNK, chunk_hashes(TOKENS, Scope(chunk_size=CHUNK)), [A], account)]

    def loads(self, skip: int = 0) -> list[LoadItem]:
        assert self.rig.lookup("r", TOKENS) == 5
        lease, _, found = self.rig._hits["r"]
        return [LoadItem("r", lease, found.epoch, found.slots[0], [B], [skip])]

    def objects(self) -> int:
        l1 = self.server.status()["l1"]
        assert isinstance(l1, dict)
        return int(l1["objects"])

    def nothing_held(self) -> bool:
        l1 = self.server.status()["l1"]
        assert isinstance(l1, dict)
        return not (l1["read_leases"] or l1["write_leases"] or l1["pinned_objects"])


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    config = ServerConfig(l1_size_gb=0.01, chunk_size=CHUNK, l2_flush_seconds=0)
    server = EmbeddedServer(config, f"layered-{uuid.uuid4()}")
    yield server
    server.close()


@pytest.fixture
def make(server: EmbeddedServer) -> Iterator[Callable[..., Layered]]:
    """Rigs, each with a model of its own; after them nothing is held."""
    made: list[Layered] = []

    def one(**settings: Any) -> Layered:
        made.append(Layered(server, model=str(uuid.uuid4()), **settings))
        return made[-1]

    yield one
    for each in made:
        each.rig.end("r")
        wait_for(each.nothing_held, 5, "all leases given back")
        each.moves.close()
        each.rig.close()


def stored(each: Layered) -> None:
    assert each.rig.store(TOKENS, A) == 5


@pytest.mark.parametrize("shm", ["require", "off"], ids=["shared memory", "frames"])
@pytest.mark.parametrize("shown", [LAYERS, LAYERS[:1], ()], ids=["all layers", "one layer", "no layer"])
def test_what_is_stored_by_layer_is_what_is_stored_in_one_go(
    make: Callable[..., Layered], shm: str, shown: tuple[str, ...]
) -> None:
    each = make(shm=shm)
    items = each.stores()
    for name in shown:
        each.moves.save(name, items)
    assert each.moves.end_stores(items, keep=True) == 5
    assert each.rig.fetch("r", TOKENS, B) == 5


@pytest.mark.parametrize("shm", ["require", "off"], ids=["shared memory", "frames"])
def test_what_is_loaded_by_layer_is_what_is_loaded_in_one_go(make: Callable[..., Layered], shm: str) -> None:
    each = make(shm=shm)
    stored(each)
    each.moves.begin_loads(each.loads(skip=3))
    for name in (*LAYERS, "no layer of ours"):
        each.moves.wait(name)
    assert each.moves.end_loads() == []
    assert each.rig.spoilt(B[:3])
    assert each.rig.holds(TOKENS, B[3:], first=3)
    assert each.context.counters.loaded_chunks == 4


def test_a_layer_is_there_once_waited_for_and_the_engine_computes_meanwhile(
    make: Callable[..., Layered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer is held back until the first was used: a wait for all of them would never end."""
    each = make()
    stored(each)
    used, order = threading.Event(), []

    def slow(group: Any, direction: Any, chunks: Any, layers: slice) -> None:
        assert layers.start == 0 or used.wait(10), "nobody used the first layer"
        order.append(layers.start)
        pages.copy_pages(group, direction, chunks, layers)

    monkeypatch.setattr(layered, "copy_pages", slow)
    each.moves.begin_loads(each.loads())
    each.moves.wait("first")
    assert order == [0]
    used.set()
    each.moves.wait("last")
    assert order == [0, 1, 2]
    each.moves.wait("middle")
    assert each.moves.end_loads() == []


def test_a_layer_of_two_tensors_is_stored_and_loaded_by_its_one_name(
    make: Callable[..., Layered], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = make(layers=("first", "first", "last"))
    parts: list[slice] = []

    def seen(group: Any, direction: Any, chunks: Any, layers: slice) -> None:
        parts.append(layers)
        pages.copy_pages(group, direction, chunks, layers)

    monkeypatch.setattr(layered, "copy_pages", seen)
    items = each.stores()
    for name in ("first", "last"):
        each.moves.save(name, items)
    assert each.moves.end_stores(items, keep=True) == 5
    each.moves.begin_loads(each.loads())
    each.moves.wait("first")
    each.moves.wait("last")
    assert each.moves.end_loads() == []
    assert each.rig.holds(TOKENS, B)
    assert parts == [slice(0, 2), slice(2, 3)] * 2


def test_a_load_whose_layers_nobody_waited_for_fails(make: Callable[..., Layered]) -> None:
    each = make()
    stored(each)
    items = each.loads()
    each.moves.begin_loads(items)
    each.moves.wait("first")
    assert each.moves.end_loads() == items
    assert each.context.counters.failed_loads == 1


def test_an_object_that_is_taken_back_meanwhile_fails_its_load(make: Callable[..., Layered]) -> None:
    each = make()
    stored(each)
    items = each.loads()
    each.moves.begin_loads(items)
    pool = each.context.bound.pool
    assert pool is not None
    for name in LAYERS:
        each.moves.wait(name)
    at = items[0].slots[0][2] // 4096  # the second chunk's word
    before, pool.generations[at] = pool.generations[at], 0
    try:
        assert each.moves.end_loads() == items
    finally:
        pool.generations[at] = before


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_layer_that_cannot_be_copied_costs_its_step_only(
    make: Callable[..., Layered], monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    each = make()
    if direction == "load":
        stored(each)

    def failing(group: Any, way: Any, chunks: Any, layers: slice) -> None:
        if layers.start == 1:
            raise LMCacheError("torn")
        pages.copy_pages(group, way, chunks, layers)

    for broken in (True, False):
        monkeypatch.setattr(layered, "copy_pages", failing if broken else pages.copy_pages)
        if direction == "load":
            items = each.loads()
            each.moves.begin_loads(items)
            for name in LAYERS:
                each.moves.wait(name)
            assert each.moves.end_loads() == (items if broken else [])
            each.rig.end("r")
        else:
            wants = each.stores()
            for name in LAYERS:
                each.moves.save(name, wants)
            assert each.moves.end_stores(wants, keep=True) == (0 if broken else 5)
            wait_for(each.nothing_held, 5, "what was reserved is given back")


def test_what_was_computed_from_a_failed_load_is_not_published(make: Callable[..., Layered]) -> None:
    each = make()
    before, items = each.objects(), each.stores()
    for name in LAYERS:
        each.moves.save(name, items)
    assert each.moves.end_stores(items, keep=False) == 0
    assert each.objects() == before
    assert each.moves.end_stores(items, keep=False) == 0, "nor is what no layer was shown of"
    assert each.objects() == before
    assert each.rig.lookup("r", TOKENS) == 0


def test_without_a_server_nothing_is_stored_and_loads_fail(make: Callable[..., Layered]) -> None:
    each = make()
    stored(each)
    items = each.loads()
    stale = [LoadItem("r", items[0].lease, "another epoch", items[0].slots, items[0].blocks, [0])]
    each.moves.begin_loads(stale)
    assert each.moves.end_loads() == stale
    with suppress(LMCacheError):
        each.context.client.close()
    wants = each.stores()
    each.moves.save("first", wants)
    assert each.moves.end_stores(wants, keep=True) == 0


@pytest.mark.parametrize("names", [(), LAYERS[:2], (*LAYERS, "more")])
def test_pages_that_no_layer_is_named_of_are_refused_and_not_left_out(
    make: Callable[..., Layered], names: tuple[str, ...]
) -> None:
    (group,) = make().context.groups
    unnamed = replace(group, namespace=msgspec.structs.replace(group.namespace, layers=names))
    with pytest.raises(LMCacheError, match=rf"{len(names)} names of layers for 3 tensors: expected one each"):
        LayeredTransfers(SimpleNamespace(groups=[unnamed]))  # type: ignore[arg-type]
