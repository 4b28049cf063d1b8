"""Generators that the collector ends, in a thread that is in the middle of something else."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.engine_rig import CHUNK, Rig, running  # noqa: E402
from helpers.host_connector import HIDDEN, LAYERS  # noqa: E402
from lmcache.v1.memory.turn import OwnerLock  # noqa: E402
from lmcache.v1.memory_management import AdHocMemoryAllocator  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(2 * CHUNK))
SECONDS = 20.0


class Request:
    """What an engine keeps of a request; its generator knows it, and it knows its generator."""

    steps: Any = None


def left_in_a_cycle(rig: Rig, what: str, steps: int) -> None:
    request = Request()
    pages = [torch.zeros(2, len(TOKENS), HIDDEN) for _ in range(LAYERS)]
    request.steps = getattr(rig.engine, what)(
        TOKENS, kvcaches=pages, slot_mapping=torch.arange(len(TOKENS)), request=request
    )
    for _ in range(steps):
        next(request.steps)


def in_time(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for itself"


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("steps", [1, LAYERS])
@pytest.mark.parametrize("what", ["store_layer", "retrieve_layer"])
def test_a_generator_that_is_collected_under_the_engines_lock_gives_all_back(
    no_collector: None, what: str, steps: int, locked: bool
) -> None:
    with running(use_layerwise=True) as rig:
        if what == "retrieve_layer":
            rig.store(TOKENS)
        left_in_a_cycle(rig, what, steps)

        def collect() -> None:
            if locked:
                with rig.engine.stack.lock:
                    gc.collect()
            else:
                gc.collect()

        in_time(collect)
        rig.assert_nothing_is_held()
        rig.store(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("locked", [True, False])
def test_an_object_that_is_collected_before_its_holder_goes_back_once(
    no_collector: None, locked: bool
) -> None:
    """The collector ends the older first, so the object is noted as lost and then given back all the same."""
    allocator = AdHocMemoryAllocator()

    def holding(obj: Any, cycle: list[Any]) -> Any:
        try:
            yield
        finally:
            obj.ref_count_down()

    obj, cycle = allocator.allocate((4, 4), torch.float32), []
    cycle.append(holding(obj, cycle))
    next(cycle[0])
    del obj, cycle

    def collect() -> None:
        if locked:
            with allocator.lock:
                gc.collect()
        else:
            gc.collect()

    in_time(collect)
    assert allocator.live == 0
    assert allocator.memcheck()
    again = allocator.allocate((4, 4), torch.float32)
    again.ref_count_down()
    assert allocator.live == 0


def test_only_the_thread_that_is_in_the_lock_is_inside() -> None:
    lock, seen = OwnerLock(), []
    with lock:
        assert lock.is_inside()
        assert lock.locked()
        assert not lock.acquire(blocking=False)
        assert lock.is_inside(), "as a condition tries it"
        in_time(lambda: seen.append((lock.is_inside(), lock.acquire(blocking=False), lock.is_inside())))
    assert seen == [(False, False, False)]
    assert not lock.is_inside()
    assert lock.acquire(timeout=1)
    lock.release()


def test_a_condition_over_the_lock_waits_and_wakes() -> None:
    lock = OwnerLock()
    changed, ready = threading.Condition(lock), []  # type: ignore[arg-type]

    def wake() -> None:
        with lock:
            ready.append(True)
            changed.notify_all()

    with changed:
        threading.Thread(target=wake, daemon=True).start()
        assert changed.wait_for(lambda: ready, SECONDS)
        assert lock.is_inside()
