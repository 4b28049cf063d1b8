"""What the scheduler side promises: what it looks up, loads and stores, and that it gives everything back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.local import LocalClient, LocalServer
from helpers.mini_engine import FakeRequest, MiniEngine, scope_of
from lmcache.integration.vllm.scheduler_side import SchedulerSide, StepPlan
from lmcache.v1.keys import MediaItem, Scope, chunk_hashes
from lmcache.v1.protocol import messages as m

CHUNK = 8
"""Tokens per chunk; a block has 4."""


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(chunk_size=CHUNK)


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def served(engine: MiniEngine, name: str, tokens: list[int], **fields: Any) -> FakeRequest:
    """A request that ran to its end."""
    request = engine.add(FakeRequest(name, tokens, **fields))
    engine.run()
    engine.check_store()
    return request


def stores_of(engine: MiniEngine) -> list[list[bytes]]:
    return [item.hashes for plan in engine.plans for item in plan.stores]


def hashes(request: FakeRequest) -> list[bytes]:
    return chunk_hashes(request.all_token_ids, scope_of(request, CHUNK))


# ---------------------------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize(
    ("length", "cached"),
    [(7, 0), (8, 7), (9, 8), (15, 8), (16, 15), (17, 16), (41, 40)],
    ids=lambda value: str(value),
)
def test_a_known_prompt_is_cached_up_to_its_last_chunk_and_leaves_a_token_to_compute(
    server: LocalServer, length: int, cached: int
) -> None:
    engine = MiniEngine(server)
    assert served(engine, "cold", prompt(length)).cached == 0
    assert served(engine, "warm", prompt(length)).cached == cached


@pytest.mark.parametrize("local", range(0, 40, 4))
def test_what_the_engine_holds_itself_is_not_loaded_wherever_that_ends(
    server: LocalServer, local: int
) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(41))
    warm = served(engine, "warm", prompt(41), local=local)
    assert warm.cached == 40 - local
    plan = next(plan for plan in reversed(engine.plans) if plan.loads)
    item = plan.loads[0][0]
    blocks, skip = item.blocks[0], item.skip_blocks[0]
    assert len(blocks) * 4 == 40 - local // CHUNK * CHUNK, "whole chunks"
    assert skip == local % CHUNK // 4, "whose first blocks the engine holds"


def test_a_prompt_that_the_engine_holds_itself_asks_for_no_more(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(16))
    engine.client.sent.clear()
    assert served(engine, "warm", prompt(17), local=16).cached == 0
    assert not [message for message in engine.client.sent if isinstance(message, m.Lookup)]


def test_asking_again_is_no_second_lookup_and_no_second_pin(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(17))
    engine.client.sent.clear()
    request = FakeRequest("r", prompt(17))
    assert [engine.side.matched_tokens(request, 0) for _ in range(5)] == [16] * 5
    assert len(engine.client.sent) == 1
    assert server.usage["read_leases"] == 1


def test_asking_again_with_other_tokens_computed_looks_up_anew_and_gives_the_old_pins_back(
    server: LocalServer,
) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(33))
    request = FakeRequest("r", prompt(33))
    assert [engine.side.matched_tokens(request, computed) for computed in (0, 12, 4)] == [32, 20, 28]
    assert server.usage["read_leases"] == 1
    engine.side.allocated(request, (list(range(1, 10)),), 28)
    ((item, slots),) = engine.side.take_plan().loads
    assert (item.blocks, item.skip_blocks) == ([list(range(1, 9))], [1])
    assert len(slots[0][0]) == 2 * 4
    engine.side.finished("r")
    assert server.left_over() == {}


def test_only_digests_that_the_server_has_not_seen_are_sent(server: LocalServer) -> None:
    engine = MiniEngine(server)
    request = engine.add(FakeRequest("r", prompt(24), max_tokens=20))
    for _ in range(10):
        engine.step()
    engine.preempt(request)
    engine.step()
    known = 0
    for message in engine.client.sent:
        if isinstance(message, m.Lookup):
            assert message.known == known
            known += len(message.hashes) // 32
    assert known == request.num_tokens // CHUNK == 4


def test_a_hit_that_is_not_wanted_is_given_back(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(17))
    request = FakeRequest("r", prompt(17))
    assert engine.side.matched_tokens(request, 0) == 16
    engine.side.allocated(request, ([1, 2, 3, 4, 5],), 0)
    assert engine.side.take_plan().loads == []
    assert server.usage["read_leases"] == 0


@pytest.mark.parametrize("when", ["looked up", "allocated", "running", "never seen"])
def test_the_end_of_a_request_gives_everything_back_at_whatever_time(server: LocalServer, when: str) -> None:
    engine = MiniEngine(server, budget=10)
    served(engine, "cold", prompt(33))
    request = FakeRequest("r", [*prompt(24), *prompt(40, 1000)])
    if when in ("looked up", "allocated"):
        assert engine.side.matched_tokens(request, 0) == 24
    if when == "allocated":
        engine.side.allocated(request, (list(range(1, 18)),), 24)
    if when == "running":
        engine.add(request)
        engine.step()
    engine.finish(request)
    assert server.left_over() == {}
    assert engine.side.tracked_requests == 0


def test_an_engine_that_only_stores_stores_without_looking_up(server: LocalServer) -> None:
    engine = MiniEngine(server, loads=False)
    request = served(engine, "r", prompt(33))
    assert engine.stored_chunks(request) == 4
    assert not [message for message in engine.client.sent if isinstance(message, m.Lookup)]
    assert served(engine, "again", prompt(33)).cached == 0


def test_an_engine_that_only_loads_stores_nothing(server: LocalServer) -> None:
    reader = MiniEngine(server, name="reader", stores=False)
    assert reader.stored_chunks(served(reader, "cold", prompt(33))) == 0
    served(MiniEngine(server, name="writer"), "cold", prompt(33))
    assert served(reader, "warm", prompt(33)).cached == 32


def test_a_request_that_must_not_read_the_cache_still_fills_it(server: LocalServer) -> None:
    engine = MiniEngine(server)
    request = served(engine, "r", prompt(17), skip_reading_prefix_cache=True)
    assert engine.stored_chunks(request) == 2
    assert served(engine, "again", prompt(17), skip_reading_prefix_cache=True).cached == 0
    assert served(engine, "other", prompt(17)).cached == 16


@pytest.mark.parametrize("fields", [{"prompt_token_ids": None}, {"prompt_embeds": object()}])
def test_a_prompt_that_is_not_all_tokens_is_neither_looked_up_nor_stored(
    server: LocalServer, fields: dict[str, Any]
) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(17))
    request = FakeRequest(**({"request_id": "r", "prompt_token_ids": prompt(17)} | fields))
    engine.client.sent.clear()
    assert engine.side.matched_tokens(request, 0) == 0
    engine.side.scheduled("r", 0, 17, ([1, 2, 3, 4, 5],))
    assert (engine.client.sent, engine.side.take_plan().stores) == ([], [])


# ------------------------------------------------------------------------------------------------------ scope


def test_adapter_salt_and_tags_separate_equal_prompts_and_each_finds_its_own(server: LocalServer) -> None:
    engine = MiniEngine(server)
    variants: list[dict[str, Any]] = [
        {},
        {"lora_request": "adapter a"},
        {"lora_request": "adapter b"},
        {"cache_salt": "tenant a"},
        {"cache_salt": "tenant b"},
        {"kv_transfer_params": {"lmcache.tag.team": "a"}},
        {"kv_transfer_params": {"lmcache.tag.team": "b"}},
        {"kv_transfer_params": {"lmcache.tag.unit": "a"}},
    ]
    cold = [served(engine, f"cold {i}", prompt(17), **fields).cached for i, fields in enumerate(variants)]
    warm = [served(engine, f"warm {i}", prompt(17), **fields).cached for i, fields in enumerate(variants)]
    assert (cold, warm) == ([0] * len(variants), [16] * len(variants))


def test_other_parameters_of_a_request_do_not_separate_prompts(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(17), kv_transfer_params={"somebody's": {"else": 1}})
    assert served(engine, "warm", prompt(17)).cached == 16


def feature(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def planned_hashes(server: LocalServer, request: FakeRequest) -> list[bytes]:
    side = SchedulerSide(LocalClient(server), [4])  # type: ignore[arg-type]
    side.matched_tokens(request, 0)
    side.scheduled(request.request_id, 0, request.num_tokens, (list(range(1, 20)),))
    return [h for item in side.take_plan().stores for h in item.hashes]


def test_media_enter_the_keys_with_their_place_and_full_identifier(server: LocalServer) -> None:
    images = [feature("9f" * 32, 2, 3), feature("9f" * 31 + "9e", 12, 2)]
    request = FakeRequest("r", [5] * 24, mm_features=images)
    media = [MediaItem(2, 3, "9f" * 32), MediaItem(12, 2, "9f" * 31 + "9e")]
    assert planned_hashes(server, request) == chunk_hashes([5] * 24, Scope(chunk_size=CHUNK), media=media)


def test_an_adapter_that_cannot_be_read_runs_uncached_and_takes_no_other_s_kv(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(lora: Any) -> str:
        if lora is not None:
            raise OSError(13, "Permission denied", "/adapters/a")
        return ""

    engine = MiniEngine(server, lora_identity=unreadable)
    served(engine, "cold", prompt(17))
    stored = server.usage["objects"]
    for name in ("a", "b"):
        assert served(engine, name, prompt(17), lora_request="broken").cached == 0
    assert server.usage["objects"] == stored
    assert caplog.text.count("run uncached") == 1


# ----------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("budget", [1, 3, 4, 8, 11, 100])
def test_each_chunk_is_stored_once_in_the_step_that_completes_it(server: LocalServer, budget: int) -> None:
    engine = MiniEngine(server, budget=budget)
    request = engine.add(FakeRequest("r", prompt(43)))
    while engine.waiting or engine.running:
        engine.step()
        engine.check_store()
        if engine.running:
            assert engine.stored_chunks(request) == request.computed // CHUNK
    stored = [h for item in stores_of(engine) for h in item]
    assert stored == hashes(request)


def test_what_the_server_holds_already_is_not_stored_again(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(33))
    engine.plans.clear()
    longer = served(engine, "warm", prompt(60))
    assert longer.cached == 32
    assert [h for item in stores_of(engine) for h in item] == hashes(longer)[4:]


@pytest.mark.parametrize(("save_decode", "chunks"), [(False, 2), (True, 4)])
def test_generated_tokens_are_stored_only_on_request(
    server: LocalServer, save_decode: bool, chunks: int
) -> None:
    engine = MiniEngine(server, save_decode=save_decode)
    request = served(engine, "r", prompt(20), max_tokens=14)
    assert request.num_tokens == 33
    assert engine.stored_chunks(request) == chunks


def test_tokens_that_were_only_guessed_are_never_stored(server: LocalServer) -> None:
    side = SchedulerSide(LocalClient(server), [4], save_decode=True)  # type: ignore[arg-type]
    request = FakeRequest("r", prompt(10))
    side.matched_tokens(request, 0)
    request.outputs = [1, 2, 3]
    side.scheduled("r", 10, 9, (list(range(1, 9)),))  # three sampled tokens and six of a draft model
    assert [item.hashes for item in side.take_plan().stores] == [hashes(request)[:1]]
    request.outputs = list(range(8))
    side.scheduled("r", 17, 1, (list(range(1, 9)),))
    assert [item.hashes for item in side.take_plan().stores] == [hashes(request)[1:2]]


@pytest.mark.parametrize(
    ("params", "chunks"),
    [
        ({}, 5),
        ({"lmcache.skip_save": True}, 0),
        ({"lmcache.skip_save": False}, 5),
        ({"lmcache.max_offload_tokens": 17}, 2),
        ({"lmcache.max_offload_tokens": 16}, 2),
        ({"lmcache.max_offload_tokens": 7}, 0),
        ({"lmcache.max_offload_tokens": 0}, 0),
        ({"lmcache.max_offload_tokens": 1000}, 5),
    ],
)
def test_a_request_may_limit_what_of_it_is_stored(
    server: LocalServer, params: dict[str, Any], chunks: int
) -> None:
    engine = MiniEngine(server)
    assert engine.stored_chunks(served(engine, "r", prompt(43), kv_transfer_params=params)) == chunks
    assert served(engine, "again", prompt(43), kv_transfer_params=params).cached == CHUNK * chunks


@pytest.mark.parametrize("limit", ["many", "12", -1, 2.5, [], {"a": 1}, float("inf")])
def test_a_limit_that_is_no_number_of_tokens_stores_nothing_and_harms_nobody(
    server: LocalServer, limit: Any
) -> None:
    engine = MiniEngine(server)
    params = {"lmcache.max_offload_tokens": limit}
    assert engine.stored_chunks(served(engine, "r", prompt(43), kv_transfer_params=params)) == 0
    assert engine.stored_chunks(served(engine, "other", prompt(43))) == 5


def test_several_groups_hit_only_where_each_has_the_chunk(server: LocalServer) -> None:
    engine = MiniEngine(server, block_sizes=(4, 2))
    request = served(engine, "cold", prompt(33))
    assert engine.stored_chunks(request) == 4
    second_group = engine.workers[0].context.groups[1].namespace.digest()
    l1 = server.service.l1
    for key in [key for key in l1._index if key == second_group + hashes(request)[2]]:
        l1._evict(l1._index[key])
    assert served(engine, "warm", prompt(33)).cached == 16
    engine.check_store()


# ------------------------------------------------------------------------------------------ failures of loads


def with_failing_load(server: LocalServer, **settings: Any) -> tuple[MiniEngine, FakeRequest]:
    """An engine in whose last step the load of a request failed."""
    engine = MiniEngine(server, **settings)
    served(engine, "cold", prompt(33))
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
    while engine.waiting or engine.running or engine._loading:
        engine.step()
        engine.check_store()
    assert request.cached == 0
    assert engine.stored_chunks(request) == 60 // CHUNK
    assert served(engine, "again", prompt(60)).cached == 56
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
    served(engine, "cold", prompt(33))
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
    assert sorted(h for item in stores_of(engine) for h in item) == sorted(hashes(request)[:5])
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
    assert served(engine, "r", prompt(33)).cached == 0
    server.answers = True
    assert served(engine, "again", prompt(33)).cached == 0
    assert served(engine, "warm", prompt(33)).cached == 32


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
    served(engine, "cold", prompt(50))
    half_done = engine.add(FakeRequest("half done", prompt(60, 100), max_tokens=3))
    engine.step()
    server.start(chunk_size)
    engine.heartbeat()
    engine.run()
    engine.check_store()
    assert served(engine, "cold again", prompt(50)).cached == 0
    assert served(engine, "warm again", prompt(50)).cached == 50 // chunk_size * chunk_size
    assert half_done not in engine.running
    assert server.left_over() == {}


@pytest.mark.parametrize("chunk_size", [CHUNK, 16, 4])
def test_a_request_that_waits_over_a_restart_is_looked_up_anew(server: LocalServer, chunk_size: int) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(33))
    request = FakeRequest("r", prompt(33))
    assert engine.side.matched_tokens(request, 0) == 32
    server.start(chunk_size)
    engine.heartbeat()
    assert engine.side.matched_tokens(request, 0) == 0, "the old session's pins are no hit"
    served(engine, "cold again", prompt(33))
    assert engine.side.matched_tokens(request, 0) == 32
    engine.side.finished("r")
    assert server.left_over() == {}


def test_what_ends_while_the_server_does_not_answer_is_given_back_when_it_does(server: LocalServer) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(33))
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


def test_after_a_reset_nothing_stored_before_is_found_and_nothing_under_way_is_stored(
    server: LocalServer,
) -> None:
    engine = MiniEngine(server)
    served(engine, "cold", prompt(41))
    waiting = FakeRequest("waiting", prompt(41))
    assert engine.side.matched_tokens(waiting, 0) == 40
    engine.side.forget()
    assert engine.side.matched_tokens(waiting, 0) == 0
    assert engine.side.matched_tokens(FakeRequest("new", prompt(41)), 0) == 0
    engine.side.finished("waiting")
    engine.side.finished("new")
    cold, warm = FakeRequest("cold again", prompt(41)), FakeRequest("warm again", prompt(41))
    for request, cached in ((cold, 0), (warm, 40)):  # under keys that only this engine knows
        engine.add(request)
        engine.run()
        assert request.cached == cached
