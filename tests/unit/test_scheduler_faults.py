"""What the scheduler side promises when loads fail, requests are preempted, or the server comes and goes."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.local import LocalClient, LocalServer
from helpers.mini_engine import FakeRequest, MiniEngine, prompt, scope_of
from lmcache.integration.vllm.scheduler_side import SchedulerSide, StepPlan
from lmcache.v1.keys import chunk_hashes
from lmcache.v1.protocol import messages as m

CHUNK = 8
"""Tokens per chunk; a block has 4."""


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(chunk_size=CHUNK)


# ------------------------------------------------------------------------------------------ failures of loads


def with_failing_load(server: LocalServer, **settings: Any) -> tuple[MiniEngine, FakeRequest]:
    """An engine in whose last step the load of a request failed."""
    engine = MiniEngine(server, **settings)
    engine.serve("cold", prompt(33))
    request = engine.add(FakeRequest("warm", prompt(60)))
    engine.mishap = lambda: server.take_back()
    engine.plans.clear()
    assert engine.step().loads
    return engine, request


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks", [(4,), (4, 2)], ids=["one group", "two groups"])
@pytest.mark.parametrize("mapped", [True, False], ids=["shared memory", "frames"])
def test_after_a_failed_load_the_tokens_are_computed_and_the_chunks_stored_again(
    server: LocalServer, lag: int, ranks: int, blocks: tuple[int, ...], mapped: bool
) -> None:
    engine, request = with_failing_load(
        server, lag=lag, ranks=ranks, block_sizes=blocks, mapped=mapped, budget=24
    )
    while engine.unfinished:
        engine.step()
        engine.check_store()
    assert request.cached == 0
    assert engine.stored_chunks(request) == 60 // CHUNK
    assert engine.serve("again", prompt(60)).cached == 56
    assert server.left_over() == {}


@pytest.mark.parametrize("lag", [0, 1])
def test_nothing_of_a_step_whose_load_failed_is_stored(server: LocalServer, lag: int) -> None:
    engine, _ = with_failing_load(server, lag=lag)
    assert engine.plans[0].stores, "the plan named chunks that follow what was to be loaded"
    assert server.usage["objects"] == 0
    engine.run()
    engine.check_store()


def test_a_plan_made_before_the_failure_was_known_is_not_stored_either(server: LocalServer) -> None:
    engine, _ = with_failing_load(server, lag=1, budget=20)
    plan = engine.step()
    assert plan.stores, "this plan was made when the load was thought to be good"
    engine.check_store()
    assert plan.clean_from <= engine.plans[0].step
    engine.run()
    engine.check_store()


def test_with_several_ranks_nothing_is_stored_before_all_have_confirmed_their_loads(
    server: LocalServer,
) -> None:
    engine = MiniEngine(server, ranks=2, lag=1, budget=16)
    engine.serve("cold", prompt(33))
    engine.plans.clear()
    engine.add(FakeRequest("other", prompt(80, 500)))
    request = engine.add(FakeRequest("warm", prompt(33, 0) + prompt(60, 900)))
    for _ in range(20):
        engine.step()
    loads = [plan.step for plan in engine.plans if plan.loads]
    assert loads
    confirmed_in = loads[0] + 2  # planned, done, and then known
    for plan in engine.plans:
        assert not (plan.stores and loads[0] <= plan.step < confirmed_in), plan.step
    engine.check_store()
    assert engine.stored_chunks(request) == 93 // CHUNK, "what was put off is stored later"


def test_a_confirmation_of_an_older_load_does_not_stand_for_a_newer_one() -> None:
    side = SchedulerSide(LocalClient(LocalServer(chunk_size=CHUNK)), [4], ranks=2)  # type: ignore[arg-type]
    request = FakeRequest("r", prompt(40))
    side.matched_tokens(request, 0)

    def plan_with_load() -> StepPlan:
        side._plan.loads.append((None, []))  # type: ignore[arg-type]
        return side.take_plan()

    first, second = plan_with_load(), plan_with_load()

    def stores() -> int:
        side.scheduled("r", 0, 40, (list(range(1, 11)),))
        return len(side.take_plan().stores)

    side.confirmed(first.step)
    assert stores() == 0
    side.confirmed(second.step)
    assert stores() == 1


def test_a_request_that_failed_as_a_whole_is_not_looked_up_again(server: LocalServer) -> None:
    engine, request = with_failing_load(server, block_sizes=(4, 2))
    engine.client.sent.clear()
    engine.run()
    assert not [message for message in engine.client.sent if isinstance(message, m.Lookup)]
    assert request.cached == 0


def test_one_request_s_failed_load_does_not_touch_another_s(server: LocalServer) -> None:
    engine, _ = with_failing_load(server)
    bystander = engine.add(FakeRequest("bystander", prompt(40, 5000)))
    engine.run()
    assert engine.stored_chunks(bystander) == 5


# ------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("mapped", [True, False], ids=["shared memory", "frames"])
def test_a_preempted_request_resumes_under_its_id_from_what_was_stored(
    server: LocalServer, mapped: bool
) -> None:
    engine = MiniEngine(server, budget=12, mapped=mapped)
    request = engine.add(FakeRequest("r", prompt(43), max_tokens=6))
    for _ in range(3):
        engine.step()
    assert request.computed == 36
    engine.preempt(request)
    engine.step()
    assert request.cached == 32
    engine.preempt(request)
    engine.run()
    assert request.cached == 32 + 40
    engine.check_store()
    assert sorted(engine.planned()) == sorted(
        chunk_hashes(request.all_token_ids, scope_of(request, CHUNK))[:5]
    )
    assert server.left_over() == {}


def test_a_request_preempted_after_its_chunks_were_evicted_stores_them_again(server: LocalServer) -> None:
    engine = MiniEngine(server)
    request = engine.add(FakeRequest("r", prompt(24), max_tokens=20))
    for _ in range(5):
        engine.step()
    engine.preempt(request)
    server.service.l1.clear()
    engine.run()
    assert request.cached == 0
    assert engine.stored_chunks(request) == 3


# ------------------------------------------------------------------------------- a server that comes and goes


def test_without_a_server_requests_run_uncached_and_nothing_is_raised(server: LocalServer) -> None:
    engine = MiniEngine(server)
    server.answers = False
    assert engine.serve("r", prompt(33)).cached == 0
    server.answers = True
    assert engine.serve("again", prompt(33)).cached == 0
    assert engine.serve("warm", prompt(33)).cached == 32


def test_a_server_never_seen_costs_nothing_but_the_cache(server: LocalServer) -> None:
    server.answers = False
    client: Any = LocalClient(server)
    side = SchedulerSide(client, [4])
    request = FakeRequest("r", prompt(33))
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, (list(range(1, 10)),), 0)
    side.scheduled("r", 0, 33, (list(range(1, 10)),))
    assert side.take_plan().stores == []
    side.finished("r")
    assert client.sent == []


@pytest.mark.parametrize("chunk_size", [CHUNK, 16, 4])
def test_a_server_that_was_restarted_gets_new_lookups_in_its_own_chunk_size(
    server: LocalServer, chunk_size: int
) -> None:
    engine = MiniEngine(server, budget=12)
    engine.serve("cold", prompt(50))
    half_done = engine.add(FakeRequest("half done", prompt(60, 100), max_tokens=3))
    engine.step()
    server.start(chunk_size)
    engine.heartbeat()
    engine.run()
    engine.check_store()
    assert engine.serve("cold again", prompt(50)).cached == 0
    assert engine.serve("warm again", prompt(50)).cached == 50 // chunk_size * chunk_size
    assert half_done not in engine.running
    assert server.left_over() == {}


@pytest.mark.parametrize("chunk_size", [CHUNK, 16, 4])
def test_a_request_that_waits_over_a_restart_is_looked_up_anew(server: LocalServer, chunk_size: int) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(33))
    request = FakeRequest("r", prompt(33))
    assert engine.side.matched_tokens(request, 0) == 32
    server.start(chunk_size)
    engine.heartbeat()
    assert engine.side.matched_tokens(request, 0) == 0, "the old session's pins are no hit"
    engine.serve("cold again", prompt(33))
    assert engine.side.matched_tokens(request, 0) == 32
    engine.side.finished("r")
    assert server.left_over() == {}


def test_what_ends_while_the_server_does_not_answer_is_given_back_when_it_does(server: LocalServer) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(33))
    first, second = (FakeRequest(name, prompt(33)) for name in ("first", "second"))
    assert engine.side.matched_tokens(first, 0) == 32
    server.answers = False
    assert engine.side.matched_tokens(second, 0) == 0
    engine.side.finished("first")
    engine.side.finished("second")
    assert server.left_over()
    server.answers = True
    engine.heartbeat()
    assert server.left_over() == {}


@pytest.mark.parametrize("loads", [True, False])
def test_a_request_that_cannot_be_hashed_runs_uncached_and_ends_nobody_else(
    server: LocalServer, loads: bool
) -> None:
    """Whether it is hashed when it is looked up or, where nothing is looked up, when it would be stored."""
    engine = MiniEngine(server, loads=loads)
    odd = FakeRequest("odd", [-1] * 17)
    assert engine.side.matched_tokens(odd, 0) == 0
    engine.side.scheduled("odd", 0, 17, (list(range(1, 6)),))
    engine.side.scheduled("odd", 17, 1, (list(range(1, 6)),))
    assert engine.side.take_plan().stores == []
    engine.side.finished("odd")
    engine.serve("even", prompt(17))
    assert server.usage["objects"] == 2
