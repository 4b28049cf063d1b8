"""Layer by layer: the number of steps, and that a generator may be left at any of them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.bad_adapter import BadAdapter  # noqa: E402
from helpers.engine_rig import CHUNK, Rig, running  # noqa: E402
from helpers.host_connector import HIDDEN, LAYERS  # noqa: E402
from lmcache.errors import ConfigError, DeviceError  # noqa: E402
from lmcache.v1.gpu_connector.interface import GPUConnectorInterface  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(2 * CHUNK))
STEPS = {"store": LAYERS + 1, "retrieve": LAYERS + 2}
ENDS = ["close", "drop"]


def generator(rig: Rig, what: str, tokens: list[int] = TOKENS) -> Any:
    pages = [torch.zeros(2, len(tokens), HIDDEN) for _ in range(LAYERS)]
    call = rig.engine.store_layer if what == "store" else rig.engine.retrieve_layer
    return call(tokens, kvcaches=pages, slot_mapping=torch.arange(len(tokens)))


def leave(steps: Any, count: int, end: str) -> None:
    """Take ``count`` steps, then close the generator, or let the collector find it: the caller keeps it no more."""
    for _ in range(count):
        next(steps)
    if end == "close":
        steps.close()
    del steps
    gc.collect()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steps", range(STEPS["store"] + 1))
def test_a_store_left_after_any_step_publishes_all_or_nothing_and_holds_nothing(steps: int, end: str) -> None:
    with running(use_layerwise=True) as rig:
        leave(generator(rig, "store"), steps, end)
        assert rig.connector.open == 0
        assert rig.engine.lookup(TOKENS) == (len(TOKENS) if steps == STEPS["store"] else 0)
        rig.assert_nothing_is_held()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steps", range(STEPS["retrieve"] + 1))
@pytest.mark.parametrize("stored", [False, True])
def test_a_retrieve_left_after_any_step_holds_nothing(steps: int, end: str, stored: bool) -> None:
    with running(use_layerwise=True) as rig:
        if stored:
            rig.store(TOKENS)
        leave(generator(rig, "retrieve"), steps, end)
        assert rig.connector.open == 0
        rig.assert_nothing_is_held()
        assert rig.engine.clear() == (len(TOKENS) if stored else 0)


@pytest.mark.parametrize("what", list(STEPS))
def test_a_finished_generator_holds_nothing_though_nobody_runs_it_to_its_end(what: str) -> None:
    with running(use_layerwise=True) as rig:
        rig.store(TOKENS)
        steps = generator(rig, what)
        for _ in range(STEPS[what]):
            next(steps)
        assert rig.connector.open == 0
        rig.assert_nothing_is_held()
        assert next(steps, "end") == "end"


def test_the_steps_are_the_same_where_nothing_is_found_stored_or_wanted() -> None:
    with running(use_layerwise=True) as rig:
        steps = list(generator(rig, "retrieve"))
        assert steps[0] == 0
        assert not steps[-1].any()
        assert len(steps) == STEPS["retrieve"]
        assert len(list(generator(rig, "store", TOKENS[:1]))) == STEPS["store"]
        assert len(list(generator(rig, "retrieve", []))) == STEPS["retrieve"]
        rig.store(TOKENS)
        assert len(list(generator(rig, "store"))) == STEPS["store"]
        rig.engine.close()
        assert len(list(generator(rig, "retrieve"))) == STEPS["retrieve"]
        assert len(list(generator(rig, "store"))) == STEPS["store"]


def test_nothing_is_found_before_all_layers_are_stored() -> None:
    with running(use_layerwise=True) as rig:
        steps = generator(rig, "store")
        for _ in range(LAYERS):
            next(steps)
            assert rig.engine.lookup(TOKENS) == 0
        next(steps)
        assert rig.engine.lookup(TOKENS) == len(TOKENS)


def test_a_chunk_that_lacks_one_layer_is_not_found_and_is_stored_again() -> None:
    with running(use_layerwise=True) as rig:
        rig.store(TOKENS)
        chunk = rig.engine.token_database.chunks(TOKENS, rig.engine.token_database.request(None))[1]
        with rig.engine.stack.lock:
            rig.engine.stack.l1.delete([rig.engine.chunk_store.rows([chunk])[0][1][0]])
        assert rig.engine.lookup(TOKENS) == CHUNK
        assert rig.retrieve(TOKENS) == CHUNK
        rig.store(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


def test_layers_may_come_from_different_places() -> None:
    below = BadAdapter()
    with running([("below", below)], use_layerwise=True) as rig:
        rig.store(TOKENS)
        assert rig.engine.flush()
        keys = [key for row in rig.engine.chunk_store.rows(_chunks(rig)) for key, _ in row]
        with rig.engine.stack.lock:
            rig.engine.stack.l1.delete(keys[::2])
        for key in keys[1::2]:
            del below.held[key]
        assert rig.engine.lookup(TOKENS) == len(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


def _chunks(rig: Rig) -> Any:
    return rig.engine.token_database.chunks(TOKENS, rig.engine.token_database.request(None))


def test_an_engine_and_a_connector_that_work_differently_are_an_error_at_the_start() -> None:
    with running(use_layerwise=True) as rig:
        rig.engine.gpu_connector = type("Whole", (), {"is_layerwise": False, "get_shape": None})()
        with pytest.raises(ConfigError, match="use_layerwise"):
            rig.engine.post_init()
        rig.engine.gpu_connector = rig.connector
    assert GPUConnectorInterface.is_layerwise is False


@pytest.mark.parametrize("what", list(STEPS))
@pytest.mark.parametrize("steps", range(LAYERS + 1))
def test_a_vendors_generator_that_ends_early_publishes_nothing_and_is_named(what: str, steps: int) -> None:
    """Without a check a store would publish memory that nobody wrote, and a load end as a RuntimeError."""
    with running(use_layerwise=True) as rig:
        if what == "retrieve":
            rig.store(TOKENS)

        def short(*_: Any, **__: Any) -> Any:
            for _ in range(steps):
                yield

        call = "batched_from_gpu" if what == "store" else "batched_to_gpu"
        whole = getattr(rig.connector, call)
        setattr(rig.connector, call, short)
        with pytest.raises(
            DeviceError, match=rf"{call}: it ended early: expected a generator of {STEPS[what]} steps"
        ):
            for _ in generator(rig, what):
                pass
        setattr(rig.connector, call, whole)
        rig.assert_nothing_is_held()
        assert rig.engine.lookup(TOKENS) == (len(TOKENS) if what == "retrieve" else 0)


def test_a_vendors_load_may_be_over_with_its_last_layer() -> None:
    with running(use_layerwise=True) as rig:
        rig.store(TOKENS)

        def ends_with_the_last_layer(*_: Any, **__: Any) -> Any:
            for _ in range(LAYERS + 1):
                yield

        rig.connector.batched_to_gpu = ends_with_the_last_layer  # type: ignore[method-assign]
        assert len(list(generator(rig, "retrieve"))) == STEPS["retrieve"]
