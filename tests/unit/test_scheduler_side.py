"""What the scheduler side promises: what it looks up, loads and stores, and that it gives everything back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.local import LocalClient, LocalServer
from helpers.mini_engine import FakeRequest, MiniEngine, prompt, scope_of
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.v1.keys import MediaItem, Scope, chunk_hashes
from lmcache.v1.protocol import messages as m

CHUNK = 8
"""Tokens per chunk; a block has 4."""


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(chunk_size=CHUNK)


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
    assert engine.serve("cold", prompt(length)).cached == 0
    assert engine.serve("warm", prompt(length)).cached == cached


@pytest.mark.parametrize("local", range(0, 40, 4))
def test_what_the_engine_holds_itself_is_not_loaded_wherever_that_ends(
    server: LocalServer, local: int
) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(41))
    warm = engine.serve("warm", prompt(41), local=local)
    assert warm.cached == 40 - local
    plan = next(plan for plan in reversed(engine.plans) if plan.loads)
    item = plan.loads[0][0]
    blocks, skip = item.blocks[0], item.skip_blocks[0]
    assert len(blocks) * 4 == 40 - local // CHUNK * CHUNK, "whole chunks"
    assert skip == local % CHUNK // 4, "whose first blocks the engine holds"


def test_a_prompt_that_the_engine_holds_itself_asks_for_no_more(server: LocalServer) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(16))
    engine.client.sent.clear()
    assert engine.serve("warm", prompt(17), local=16).cached == 0
    assert not [message for message in engine.client.sent if isinstance(message, m.Lookup)]


def test_asking_again_is_no_second_lookup_and_no_second_pin(server: LocalServer) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(17))
    engine.client.sent.clear()
    request = FakeRequest("r", prompt(17))
    assert [engine.side.matched_tokens(request, 0) for _ in range(5)] == [16] * 5
    assert len(engine.client.sent) == 1
    assert server.usage["read_leases"] == 1


def test_asking_again_with_other_tokens_computed_looks_up_anew_and_gives_the_old_pins_back(
    server: LocalServer,
) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(33))
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
    engine.serve("cold", prompt(17))
    request = FakeRequest("r", prompt(17))
    assert engine.side.matched_tokens(request, 0) == 16
    engine.side.allocated(request, ([1, 2, 3, 4, 5],), 0)
    assert engine.side.take_plan().loads == []
    assert server.usage["read_leases"] == 0


@pytest.mark.parametrize("when", ["looked up", "allocated", "running", "never seen"])
def test_the_end_of_a_request_gives_everything_back_at_whatever_time(server: LocalServer, when: str) -> None:
    engine = MiniEngine(server, budget=10)
    engine.serve("cold", prompt(33))
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
    request = engine.serve("r", prompt(33))
    assert engine.stored_chunks(request) == 4
    assert not [message for message in engine.client.sent if isinstance(message, m.Lookup)]
    assert engine.serve("again", prompt(33)).cached == 0


def test_an_engine_that_only_loads_stores_nothing(server: LocalServer) -> None:
    reader = MiniEngine(server, name="reader", stores=False)
    assert reader.stored_chunks(reader.serve("cold", prompt(33))) == 0
    MiniEngine(server, name="writer").serve("cold", prompt(33))
    assert reader.serve("warm", prompt(33)).cached == 32


def test_a_request_that_must_not_read_the_cache_still_fills_it(server: LocalServer) -> None:
    engine = MiniEngine(server)
    request = engine.serve("r", prompt(17), skip_reading_prefix_cache=True)
    assert engine.stored_chunks(request) == 2
    assert engine.serve("again", prompt(17), skip_reading_prefix_cache=True).cached == 0
    assert engine.serve("other", prompt(17)).cached == 16


@pytest.mark.parametrize("fields", [{"prompt_token_ids": None}, {"prompt_embeds": object()}])
def test_a_prompt_that_is_not_all_tokens_is_neither_looked_up_nor_stored(
    server: LocalServer, fields: dict[str, Any]
) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(17))
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
    cold = [engine.serve(f"cold {i}", prompt(17), **fields).cached for i, fields in enumerate(variants)]
    warm = [engine.serve(f"warm {i}", prompt(17), **fields).cached for i, fields in enumerate(variants)]
    assert (cold, warm) == ([0] * len(variants), [16] * len(variants))


def test_other_parameters_of_a_request_do_not_separate_prompts(server: LocalServer) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(17), kv_transfer_params={"somebody's": {"else": 1}})
    assert engine.serve("warm", prompt(17)).cached == 16


@pytest.mark.parametrize(("windows", "said"), [([64, CHUNK - 1], 1), ([64, CHUNK], 0), ([], 0)])
def test_chunks_longer_than_a_window_are_said_once_to_miss(
    server: LocalServer, caplog: pytest.LogCaptureFixture, windows: list[int], said: int
) -> None:
    """vLLM frees pages that the window has left; a chunk that is completed after that is not stored."""
    engine = MiniEngine(server, windows=windows)
    for name in ("first", "second"):
        engine.serve(name, prompt(17))
    assert caplog.text.count(f"chunk_size {CHUNK} is longer than this model's window of 7 tokens") == said


def feature(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def planned_hashes(server: LocalServer, request: FakeRequest, **options: Any) -> list[bytes]:
    side = SchedulerSide(LocalClient(server), [4], **options)  # type: ignore[arg-type]
    side.matched_tokens(request, 0)
    side.scheduled(request.request_id, 0, request.num_tokens, (list(range(1, 20)),))
    return [h for item in side.take_plan().stores for h in item.hashes]


def test_media_enter_the_keys_with_their_place_and_full_identifier(server: LocalServer) -> None:
    images = [feature("9f" * 32, 2, 3), feature("9f" * 31 + "9e", 12, 2)]
    request = FakeRequest("r", [5] * 24, mm_features=images)
    media = [MediaItem(2, 3, "9f" * 32), MediaItem(12, 2, "9f" * 31 + "9e")]
    assert planned_hashes(server, request) == chunk_hashes([5] * 24, Scope(chunk_size=CHUNK), media=media)


def test_media_that_come_in_later_enter_the_keys_of_the_chunks_that_they_are_in(server: LocalServer) -> None:
    """A session takes more input while it runs: vLLM lengthens its prompt, and the list of its media in place."""
    images = [feature("9f" * 32, 2, 3)]
    request = FakeRequest("r", [5] * 8, mm_features=images)
    side = SchedulerSide(LocalClient(server), [4])  # type: ignore[arg-type]
    side.matched_tokens(request, 0)
    side.scheduled("r", 0, 8, ([1, 2],))
    images.append(feature("aa" * 32, 10, 3))
    request.prompt_token_ids = [5] * 24
    side.scheduled("r", 8, 16, (list(range(1, 7)),))
    stored = [h for item in side.take_plan().stores for h in item.hashes]
    media = [MediaItem(2, 3, "9f" * 32), MediaItem(10, 3, "aa" * 32)]
    assert stored == chunk_hashes([5] * 24, Scope(chunk_size=CHUNK), media=media)


def test_media_without_a_digest_of_their_content_are_found_by_nobody_else(server: LocalServer) -> None:
    """vLLM counts them where it does without: another process counts from the same number on."""
    request = FakeRequest("r", [5] * 24, mm_features=[feature("renderer0-mm-1-image-0", 10, 3)])
    first, other = (planned_hashes(server, request, media_by_content=False) for _ in range(2))
    assert first[0] == other[0], "what comes before the item"
    assert first[1] != other[1]


def test_an_adapter_that_cannot_be_read_runs_uncached_and_takes_no_other_s_kv(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(lora: Any) -> str:
        if lora is not None:
            raise OSError(13, "Permission denied", "/adapters/a")
        return ""

    engine = MiniEngine(server, lora_identity=unreadable)
    engine.serve("cold", prompt(17))
    stored = server.usage["objects"]
    for name in ("a", "b"):
        assert engine.serve(name, prompt(17), lora_request="broken").cached == 0
    assert server.usage["objects"] == stored
    assert caplog.text.count("run uncached") == 1


# ----------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("budget", [1, 3, 4, 8, 11, 100])
def test_each_chunk_is_stored_once_in_the_step_that_completes_it(server: LocalServer, budget: int) -> None:
    engine = MiniEngine(server, budget=budget)
    request = engine.add(FakeRequest("r", prompt(43)))
    while engine.unfinished:
        engine.step()
        engine.check_store()
        if engine.running:
            assert engine.stored_chunks(request) == request.computed // CHUNK
    stored = engine.planned()
    assert stored == hashes(request)


def test_what_the_server_holds_already_is_not_stored_again(server: LocalServer) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(33))
    engine.plans.clear()
    longer = engine.serve("warm", prompt(60))
    assert longer.cached == 32
    assert engine.planned() == hashes(longer)[4:]


@pytest.mark.parametrize(("save_decode", "chunks"), [(False, 2), (True, 4)])
def test_generated_tokens_are_stored_only_on_request(
    server: LocalServer, save_decode: bool, chunks: int
) -> None:
    engine = MiniEngine(server, save_decode=save_decode)
    request = engine.serve("r", prompt(20), max_tokens=14)
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


def test_a_scheduler_that_runs_ahead_of_its_tokens_stores_a_chunk_once_they_are_known(
    server: LocalServer,
) -> None:
    side = SchedulerSide(LocalClient(server), [4], save_decode=True)  # type: ignore[arg-type]
    request, blocks = FakeRequest("r", prompt(10)), (list(range(1, 9)),)
    side.matched_tokens(request, 0)
    request.outputs = [1, 2, 3, 4, 5]
    side.scheduled("r", 16, 1, blocks)  # the sixteenth token is still being sampled
    assert [item.hashes for item in side.take_plan().stores] == [hashes(request)[:1]]
    request.outputs += [6]
    side.scheduled("r", 17, 1, blocks)
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
    assert engine.stored_chunks(engine.serve("r", prompt(43), kv_transfer_params=params)) == chunks
    assert engine.serve("again", prompt(43), kv_transfer_params=params).cached == CHUNK * chunks


@pytest.mark.parametrize("limit", ["many", "12", -1, 2.5, [], {"a": 1}, float("inf")])
def test_a_limit_that_is_no_number_of_tokens_stores_nothing_and_harms_nobody(
    server: LocalServer, limit: Any
) -> None:
    engine = MiniEngine(server)
    params = {"lmcache.max_offload_tokens": limit}
    assert engine.stored_chunks(engine.serve("r", prompt(43), kv_transfer_params=params)) == 0
    assert engine.stored_chunks(engine.serve("other", prompt(43))) == 5


def test_several_groups_hit_only_where_each_has_the_chunk(server: LocalServer) -> None:
    engine = MiniEngine(server, block_sizes=(4, 2))
    request = engine.serve("cold", prompt(33))
    assert engine.stored_chunks(request) == 4
    second_group = engine.workers[0].context.groups[1].namespace.digest()
    l1 = server.service.l1
    for key in [key for key in l1._index if key == second_group + hashes(request)[2]]:
        l1._evict(l1._index[key])
    assert engine.serve("warm", prompt(33)).cached == 16
    engine.check_store()


def test_after_a_reset_nothing_stored_before_is_found_and_nothing_under_way_is_stored(
    server: LocalServer,
) -> None:
    engine = MiniEngine(server)
    engine.serve("cold", prompt(41))
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
