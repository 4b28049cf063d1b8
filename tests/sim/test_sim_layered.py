"""Layer by layer on the simulated device, beside an engine that computes on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.server import RunningServer, running_server
from lmcache.testing.engine import BLOCK, CHUNK
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.vllm_caches import NAMES, making  # noqa: E402

TOKENS = list(range(4 * CHUNK))
SOURCE = list(range(1, 1 + 4 * CHUNK // BLOCK))
TARGET = [block + 15 for block in SOURCE]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.fixture(params=["sim:0", "sim:1"])
def engine(sim: Any, server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine of K/V tuples that computes on a stream of its own, and what moves its layers."""
    sim.set_device(request.param)  # the engine's thread: others do not follow
    with making(server, request.param, "engine_driven") as make:
        one = make("pairs", request.node.name)
        moves = LayeredTransfers(one.context)
        with sim.stream(sim.Stream()):
            yield one, moves
        moves.close()


def fall_behind() -> None:
    """The engine's stream has 0.3 s of work; what is queued now comes after that."""
    torch.sim.current_stream().sleep(300_000)


def test_what_the_engine_has_queued_of_a_layer_is_in_what_is_stored(engine: Any) -> None:
    one, moves = engine
    salt = f"stored {one.device}"
    items = [StoreItem(CHUNK, chunk_hashes(TOKENS, Scope(chunk_size=CHUNK, salt=salt)), [SOURCE])]
    fall_behind()
    for at, name in enumerate(NAMES):
        for tensor in one.tensors[2 * at : 2 * at + 2]:
            tensor.fill_(1)
        moves.save(name, items)
    assert moves.end_stores(items, keep=True) == 4
    torch.sim.synchronize()
    for tensor in one.tensors:
        tensor.zero_()
    lease, found = look_up(one, salt)
    assert one.context.load([LoadItem("r", lease, found.epoch, found.slots[0], [TARGET], [0])]) == []
    torch.sim.synchronize()
    assert all(bool((tensor.cpu()[TARGET] == 1).all()) for tensor in one.tensors)


def look_up(one: Any, salt: str) -> Any:
    from lmcache.v1.protocol import messages as m
    from lmcache.v1.protocol.channel import expect

    hashes = b"".join(chunk_hashes(TOKENS, Scope(chunk_size=CHUNK, salt=salt)))
    lease = one.scheduler.new_lease()
    asked = m.Lookup(session=one.scheduler.session, request="r", lease=lease, hashes=hashes)
    return lease, expect(m.Found, one.scheduler.call(asked)[0])


def test_what_the_engine_has_queued_that_reads_a_page_reads_it_before_a_load_writes_it(engine: Any) -> None:
    one, moves = engine
    salt = f"loaded {one.device}"
    for tensor in one.tensors:
        tensor.fill_(7)
    items = [StoreItem(CHUNK, chunk_hashes(TOKENS, Scope(chunk_size=CHUNK, salt=salt)), [SOURCE])]
    assert one.context.store(items) == 4
    for tensor in one.tensors:
        tensor.fill_(5)
    lease, found = look_up(one, salt)
    fall_behind()
    read = [tensor.clone() for tensor in one.tensors]  # queued, as a step before is
    moves.begin_loads([LoadItem("r", lease, found.epoch, found.slots[0], [TARGET], [0])])
    for name in NAMES:
        moves.wait(name)
    assert moves.end_loads() == []
    torch.sim.synchronize()
    assert all(bool((seen.cpu() == 5).all()) for seen in read), "a load wrote what a step before still read"
    assert all(bool((tensor.cpu()[TARGET] == 7).all()) for tensor in one.tensors)
