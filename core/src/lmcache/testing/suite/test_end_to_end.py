"""A real server, a worker with its KV on the device: what was stored comes back, and nothing else moves."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.engine import BLOCK, CHUNK, Engine, Server, running_server
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem

pytestmark = needs("device")

_PER_CHUNK = CHUNK // BLOCK


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


_MODES = ["engine_driven", pytest.param("lmcache_driven", marks=needs("lmcache-driven"))]


@pytest.fixture(scope="module", params=_MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(server: Server, device: Any, mode: str) -> Iterator[Engine]:
    one = Engine(server, device, mode, f"engine-{mode}")
    try:
        one.wait_up()
        yield one
    finally:
        one.close()


_PROMPTS = itertools.count(1)


def _prompt(chunks: int) -> list[int]:
    """Tokens that no other prompt has."""
    base = next(_PROMPTS) << 16
    return [base + i for i in range(chunks * CHUNK)]


def _pages(engine: Engine) -> list[Any]:
    return [tensor.cpu().clone() for tensor in engine.tensors]


def test_the_mode_that_was_asked_for_is_the_one_that_runs(engine: Engine, mode: str) -> None:
    assert engine.context.mode.value == mode
    assert engine.context.path == "device" if mode == "lmcache_driven" else engine.context.path != "down"


def test_a_prompt_s_kv_comes_back_byte_for_byte_and_nothing_else_moves(engine: Engine, dev: Any) -> None:
    held = engine.fill(1)
    source, target = [5, 2, 9, 7, 3, 12], [20, 31, 18, 25, 29, 22]
    tokens = _prompt(3)
    assert engine.store(tokens, source) == 3
    dev.synchronize()
    assert all((now == was).all() for now, was in zip(_pages(engine), held, strict=True)), (
        "a store wrote pages"
    )
    assert engine.load("a", tokens, target, wait_for=3) == 3
    dev.synchronize()
    for now, was in zip(_pages(engine), held, strict=True):
        for block in range(engine.num_blocks):
            origin = source[target.index(block)] if block in target else block
            assert (now[block] == was[origin]).all(), f"block {block} is not right"


def test_blocks_that_the_engine_has_are_not_written(engine: Engine, dev: Any) -> None:
    engine.fill(2)
    tokens = _prompt(2)
    assert engine.store(tokens, [1, 2, 3, 4]) == 2
    before = engine.fill(3)
    assert engine.load("b", tokens, [10, 11, 12, 13], skip=3, wait_for=2) == 2
    dev.synchronize()
    for now, was in zip(_pages(engine), before, strict=True):
        assert all((now[block] == was[block]).all() for block in range(engine.num_blocks) if block != 13)
        assert not (now[13] == was[13]).all()


def test_many_chunks_need_more_than_one_batch(engine: Engine, dev: Any) -> None:
    held = engine.fill(4)
    source = list(range(1, 1 + 7 * _PER_CHUNK))
    target = list(range(31, 31 - 7 * _PER_CHUNK, -1))
    tokens = _prompt(7)
    assert engine.store(tokens, source) == 7
    for tensor in engine.tensors:
        tensor[15:].fill_(0)
    assert engine.load("c", tokens, target, wait_for=7) == 7
    dev.synchronize()
    for now, was in zip(_pages(engine), held, strict=True):
        for origin, block in zip(source, target, strict=True):
            if origin < 15:
                assert (now[block] == was[origin]).all()


def test_work_queued_before_a_store_is_in_what_is_stored(engine: Engine, device: Any, dev: Any) -> None:
    import torch

    engine.fill(5)
    tokens = _prompt(1)
    slow = torch.ones(1 << 22, device=device)
    for value in range(1, 9):
        slow.add_(1)
        for tensor in engine.tensors:
            tensor[6:8].fill_(value)
    assert engine.store(tokens, [6, 7]) == 1
    for tensor in engine.tensors:  # the engine goes on at once; the store must have read before
        tensor[6:8].fill_(99)
    assert engine.load("d", tokens, [16, 17], wait_for=1) == 1
    dev.synchronize()
    assert all((page[16:18] == 8).all() for page in _pages(engine)), "the store read too early or too late"


def test_a_load_is_there_when_the_engine_s_next_work_begins(engine: Engine, dev: Any) -> None:
    held = engine.fill(6)
    tokens = _prompt(1)
    assert engine.store(tokens, [3, 4]) == 1
    assert engine.load("e", tokens, [23, 24], wait_for=1) == 1
    seen = [tensor[23:25].clone() for tensor in engine.tensors]  # queued at once, without waiting
    dev.synchronize()
    assert all((now.cpu() == was[3:5]).all() for now, was in zip(seen, held, strict=True))


def test_two_engines_share_what_one_of_them_stored(
    server: Server, device: Any, dev: Any, mode: str, engine: Engine
) -> None:
    held = engine.fill(7)
    tokens = _prompt(2)
    assert engine.store(tokens, [1, 2, 3, 4]) == 2
    other = Engine(server, device, mode, "the other")
    try:
        other.wait_up()
        assert other.load("f", tokens, [9, 8, 7, 6], wait_for=2) == 2
        dev.synchronize()
        for now, was in zip(_pages(other), held, strict=True):
            assert all((now[9 - i] == was[1 + i]).all() for i in range(4))
    finally:
        other.close()


def test_k_and_v_as_two_tensors_come_back_and_are_never_those_of_another_layout(
    server: Server, device: Any, dev: Any, mode: str
) -> None:
    """Six pages per block of three layers, and of six layers of one tensor: they must not meet."""
    tokens = _prompt(2)
    with ExitStack() as engines:
        one, same, other = (
            engines.enter_context(
                closing(Engine(server, device, mode, name, layers=6 // planes, planes=planes))
            )
            for name, planes in (("pairs", 2), ("as many pairs", 2), ("no pairs", 1))
        )
        for engine in (one, same, other):
            engine.wait_up()
        held, before = one.fill(9), same.fill(10)
        assert one.store(tokens, [4, 2, 7, 1]) == 2
        assert same.load("h", tokens, [9, 3, 8, 5], wait_for=2) == 2
        dev.synchronize()
        for now, was, source in zip(_pages(same), before, held, strict=True):
            for block in range(same.num_blocks):
                origin = {9: 4, 3: 2, 8: 7, 5: 1}.get(block)
                assert (now[block] == (was[block] if origin is None else source[origin])).all(), block
        assert other.load("i", tokens, [9, 3, 8, 5]) == 0


def test_a_dead_server_costs_the_cache_and_nothing_else(device: Any, dev: Any, mode: str) -> None:
    with running_server() as running:
        one = Engine(running, device, mode, "alone", control_timeout=2.0)
        try:
            one.wait_up()
            one.fill(8)
            tokens = _prompt(2)
            assert one.store(tokens, [1, 2, 3, 4]) == 2
            lease, found = one.find("g", tokens, 2)
            running.process.send_signal(signal.SIGKILL)
            running.process.wait(20)
            assert one.store(_prompt(1), [5, 6]) == 0
            before = _pages(one)
            item = LoadItem("g", lease, found.epoch, found.slots[0], [[9, 10, 11, 12]], [0])
            assert one.context.load([item]) == [item], "a load from a dead server did not fail"
            dev.synchronize()
            assert all((now == was).all() for now, was in zip(_pages(one), before, strict=True))
        finally:
            one.close()
