"""A small paged engine of two ranks with its KV on the simulated device, at a real server.

Device memory is protected, and every kernel, copy and callback is held back for a while in every process, so that
work which is not ordered by streams and events comes out wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from helpers.kit import install_bad_sim
from helpers.server import running_server
from helpers.sim_engine import CHUNK, Nursery, Prompt, SimEngine, prompts
from helpers.wheels import environment

pytest.importorskip("torch")
pytestmark = pytest.mark.sim

DELAY = "400"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMCACHE_SIM_DELAY_US", DELAY)
        patch.setenv("LMCACHE_SIM_PROTECT", "1")
        one = Nursery()
        yield one
        one.close()


@pytest.fixture(scope="module")
def address(nursery: Nursery) -> Iterator[str]:
    with running_server("--chunk-size", str(CHUNK), l1_gb=0.125) as server:
        yield server.address


@pytest.fixture(params=["engine_driven", "lmcache_driven"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(nursery: Nursery, address: str, mode: str, request: pytest.FixtureRequest) -> Iterator[SimEngine]:
    one = SimEngine(nursery, address, mode, request.node.name)
    one.wait_up()
    yield one
    one.close()


def test_what_one_prompt_stored_another_loads(engine: SimEngine, mode: str) -> None:
    first, again = prompts(1, 1)[0], prompts(1, 1)[0]
    first.tokens = again.tokens = list(range(6 * 16))
    again.name = "again"
    engine.run(first)
    engine.wait_stored(first)
    engine.run(again)
    engine.check()
    assert engine.hits >= 3
    assert all(worker.call("state")["mode"] == mode for worker in engine.workers)


def test_auto_is_lmcache_driven_on_this_device(nursery: Nursery, address: str) -> None:
    engine = SimEngine(nursery, address, "auto", "auto")
    engine.wait_up()
    assert [worker.call("state")["mode"] for worker in engine.workers] == ["lmcache_driven"] * 2
    engine.close()


def test_blocks_that_are_given_to_others_at_once_are_stored_as_they_were(engine: SimEngine) -> None:
    """Preemption right behind a store: the pages are written while the server may still read."""
    for seed in range(6):
        tokens = [seed * 1000 + i for i in range(7 * 16)]
        cut, resumed = Prompt(f"cut-{seed}", tokens), Prompt(f"resumed-{seed}", tokens)
        engine.run(cut, preempt=True)
        engine.wait_stored(cut)
        hits = engine.hits
        engine.run(resumed)
        engine.check()
        assert engine.hits == hits + 3
        engine.forget(resumed)


def test_many_prompts_with_shared_heads_and_preemptions_are_right_at_every_step(engine: SimEngine) -> None:
    for number, request in enumerate(prompts(7, 24)):
        preempt = number % 3 == 2
        engine.run(request, preempt)
        engine.check()
        if len(engine.live) > 3:
            engine.forget(engine.live[0])
    assert engine.hits > 0


def test_another_engine_loads_what_the_first_stored_in_the_other_mode(
    engine: SimEngine, nursery: Nursery, address: str, mode: str
) -> None:
    tokens = [len(mode) * 10000 + i for i in range(6 * 16)]
    here = Prompt("here", tokens)
    engine.run(here)
    engine.wait_stored(here)
    other = SimEngine(
        nursery, address, "engine_driven" if mode == "lmcache_driven" else "lmcache_driven", f"not {mode}"
    )
    try:
        other.wait_up()
        other.run(Prompt("there", tokens))
        other.check()
        assert other.hits == 3
    finally:
        other.close()


def test_it_would_be_seen_if_the_server_did_not_wait_for_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same engine on a device that is wrong in just that: what comes back is not what was computed."""
    install_bad_sim(tmp_path)
    fault = {"LMCACHE_SIM_FAULT": "wait_does_nothing", "LMCACHE_DEVICE_BACKEND": "sim-bad"}
    for name, value in {**environment(tmp_path, **fault), "LMCACHE_SIM_DELAY_US": "2000"}.items():
        monkeypatch.setenv(name, value)
    nursery = Nursery()
    try:
        with running_server("--chunk-size", str(CHUNK), l1_gb=0.125) as server:
            with closing(SimEngine(nursery, server.address, "lmcache_driven", "unordered")) as engine:
                engine.wait_up()
                cut, resumed = Prompt("cut", list(range(96))), Prompt("resumed", list(range(96)))
                engine.run(cut, preempt=True)
                engine.wait_stored(cut)
                engine.run(resumed)
                with pytest.raises(AssertionError, match="layer"):
                    engine.check()
    finally:
        nursery.close()
