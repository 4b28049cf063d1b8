"""Pins and loads of lookups, what a frozen engine does, ranks that share, and callers at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.bad_adapter import BadAdapter  # noqa: E402
from helpers.engine_rig import CHUNK, Rig, kv_of, running, settle  # noqa: E402
from helpers.host_connector import HIDDEN, LAYERS  # noqa: E402
from helpers.tiers import memory  # noqa: E402
from lmcache.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(4 * CHUNK))


def below_only(rig: Rig) -> None:
    assert rig.engine.flush()
    with rig.engine.stack.lock:
        rig.engine.stack.l1.clear()


def crowd_out(rig: Rig) -> None:
    """Store so much that nothing unpinned stays."""
    for start in range(10_000, 10_000 + 1000 * CHUNK, 100 * CHUNK):
        rig.store(list(range(start, start + 100 * CHUNK)))


def test_what_a_lookup_pinned_is_there_until_it_is_given_back() -> None:
    with running(cache_policy="LRU") as rig:
        rig.store(TOKENS)
        assert rig.engine.lookup(TOKENS, pin=True, lookup_id="a") == len(TOKENS)
        assert rig.engine.clear() == 0
        crowd_out(rig)
        assert rig.retrieve(TOKENS, req_id="a") == len(TOKENS)
        rig.engine.lookup_unpin("a")
        rig.engine.lookup_unpin("a")
        crowd_out(rig)
        assert rig.engine.lookup(TOKENS) == 0


def test_a_lookup_without_pin_keeps_nothing() -> None:
    with running(cache_policy="LRU") as rig:
        rig.store(TOKENS)
        assert rig.engine.lookup(TOKENS) == len(TOKENS)
        assert rig.engine.clear() == len(TOKENS)


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_a_lookup_with_pins_promises_no_more_than_it_pins_or_brings(
    tier: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though chunks go between the question and the pins, from L1 or, with a tier, from both."""
    with running([("below", memory())] if tier else ()) as rig:
        rig.store(TOKENS)
        if tier:
            below_only(rig)
        store = rig.engine.chunk_store
        asked = store.found

        def found(chunks: Any, *arguments: Any) -> int:
            answer = asked(chunks, *arguments)
            with rig.engine.stack.lock:
                gone = rig.engine.stack.tiers.delete(
                    [key for row in store.rows(chunks)[kept:] for key, _ in row]
                )
            gone.result(10)
            return answer

        monkeypatch.setattr(store, "found", found)
        assert rig.engine.lookup(TOKENS, pin=True, lookup_id="a") == kept * CHUNK
        assert rig.retrieve(TOKENS, req_id="a") == kept * CHUNK
        assert rig.engine.status()["lookups"] == bool(kept)
        rig.engine.lookup_unpin("a")


@pytest.mark.parametrize("lookup_id", [None, "", 5, ["a"]])
def test_what_is_kept_is_kept_under_an_id_that_finds_it_again(lookup_id: Any) -> None:
    with running() as rig:
        rig.store(TOKENS)
        with pytest.raises(ConfigError, match="the request's id, a text"):
            rig.engine.lookup(TOKENS, pin=True, lookup_id=lookup_id)
        with pytest.raises(ConfigError, match="the request's id, a text"):
            rig.engine.async_lookup_and_prefetch(lookup_id, TOKENS)


def test_pins_that_nobody_gives_back_end_by_themselves() -> None:
    with running(pin_timeout_sec=0.05) as rig:
        rig.store(TOKENS)
        assert rig.engine.lookup(TOKENS, pin=True, lookup_id="lost") == len(TOKENS)
        settle(lambda: rig.engine.status()["lookups"] == 0, "the pin to end")
        assert rig.engine.clear() == len(TOKENS)


def test_pins_that_nobody_gives_back_make_room_for_stores() -> None:
    with running(pin_timeout_sec=0.05) as rig:
        rig.store(TOKENS)
        rig.engine.lookup(TOKENS, pin=True, lookup_id="lost")

        def cleared_after_a_store() -> bool:
            rig.store([9] * CHUNK)
            return rig.engine.clear(TOKENS) == len(TOKENS)

        settle(cleared_after_a_store, "the pin to end")


def test_several_lookups_are_given_back_at_once_and_unknown_ones_do_no_harm() -> None:
    with running() as rig:
        rig.store(TOKENS)
        for name in "ab":
            rig.engine.lookup(TOKENS, pin=True, lookup_id=name)
        rig.engine.lookup_unpin(["a", "b", "never"])
        assert rig.engine.status()["lookups"] == 0


def test_an_id_used_again_replaces_its_older_pins() -> None:
    with running() as rig:
        rig.store(TOKENS)
        for _ in range(3):
            rig.engine.lookup(TOKENS, pin=True, lookup_id="a")
        rig.engine.lookup_unpin("a")
        assert rig.engine.clear() == len(TOKENS)


def test_an_asynchronous_lookup_answers_once_all_is_in_l1_and_keeps_it_there() -> None:
    below = BadAdapter()
    with running([("below", below)], cache_policy="LRU") as rig:
        rig.store(TOKENS)
        below_only(rig)
        rig.engine.async_lookup_and_prefetch("a", TOKENS)
        assert rig.engine.lookup_result("a", 10) == len(TOKENS)
        loads = below.calls.count("load")
        crowd_out(rig)
        assert rig.retrieve(TOKENS, req_id="a") == len(TOKENS)
        assert below.calls.count("load") == loads
        rig.engine.cleanup_memory_objs("a")
        assert rig.engine.lookup_result("a") == 0


def test_a_lookup_that_is_still_loading_says_so_and_can_be_ended() -> None:
    below = BadAdapter()
    with running([("below", below)], lookup_timeout_ms=100) as rig:
        rig.store(TOKENS)
        below_only(rig)
        below.mode = "hangs"
        rig.engine.async_lookup_and_prefetch("a", TOKENS)
        assert rig.engine.lookup_result("a", 0.05) is None
        waiting = threading.Thread(target=rig.engine.lookup_result, args=("a", 60))
        waiting.start()
        rig.engine.lookup_unpin("a")
        waiting.join(10)
        assert not waiting.is_alive()
        below.release()


def test_a_lookup_promises_only_what_comes() -> None:
    below = BadAdapter()
    with running([("below", below)]) as rig:
        rig.store(TOKENS)
        below_only(rig)
        del below.held[sorted(below.held)[0]]
        rig.engine.async_lookup_and_prefetch("a", TOKENS)
        promised = rig.engine.lookup_result("a", 10)
        assert promised is not None
        assert promised < len(TOKENS)
        assert rig.retrieve(TOKENS, req_id="a") == promised
        rig.engine.lookup_unpin("a")


def test_a_frozen_engine_gives_out_what_is_in_l1_and_takes_nothing() -> None:
    below = BadAdapter()
    with running([("below", below)]) as rig:
        rig.store(TOKENS)
        assert rig.engine.flush()
        with rig.engine.stack.lock:
            rig.engine.stack.l1.delete(
                [key for row in rig.engine.chunk_store.rows(_chunks(rig, TOKENS)[2:]) for key, _ in row]
            )
        rig.engine.freeze(True)
        assert rig.engine.is_frozen()
        assert rig.engine.lookup(TOKENS) == 2 * CHUNK
        assert rig.engine.lookup(TOKENS, pin=True, lookup_id="a") == 2 * CHUNK
        assert rig.retrieve(TOKENS, req_id="a") == 2 * CHUNK
        rig.engine.lookup_unpin("a")
        assert rig.retrieve(TOKENS) == 2 * CHUNK
        rig.store([7] * CHUNK)
        assert rig.engine.lookup([7] * CHUNK) == 0
        assert "load" not in below.calls
        rig.engine.freeze(False)
        assert rig.retrieve(TOKENS) == len(TOKENS)


def _chunks(rig: Rig, tokens: list[int]) -> Any:
    return rig.engine.token_database.chunks(tokens, rig.engine.token_database.request(None))


def test_tokens_without_a_slot_are_not_stored_as_if_they_were_there() -> None:
    with running() as rig:
        pages = [torch.zeros(2, len(TOKENS), HIDDEN) for _ in range(LAYERS)]
        slots = torch.arange(len(TOKENS))
        slots[CHUNK + 1] = -1
        for mapping in (slots, [slots, slots]):
            rig.engine.store(
                TOKENS, kvcaches=pages, slot_mapping=mapping if torch.is_tensor(mapping) else slots
            )
            assert rig.engine.lookup(TOKENS) == CHUNK
            assert CHUNK not in [start for start, _ in rig.connector.moved]


def test_callers_at_once_get_right_values_and_leave_nothing(tmp_path: Path) -> None:
    prompts = [[n % 3, n % 2, *range(3 * CHUNK)] for n in range(6)]
    rounds = 15
    with running(None, local_disk=str(tmp_path), max_local_disk_size=1, save_unfull_chunk=True) as rig:

        def work(n: int) -> None:
            for i in range(rounds):
                prompt = prompts[(n + i) % len(prompts)]
                rig.store(prompt)
                if n:  # the first one clears meanwhile
                    rig.engine.lookup(prompt, pin=True, lookup_id=f"{n}")
                    rig.retrieve(prompt, req_id=f"{n}")
                    rig.engine.lookup_unpin(f"{n}")
                elif i % 5 == 4:
                    rig.engine.clear()

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, n) for n in range(4)]:
                done.result(60)


def test_an_acknowledged_store_is_found_by_every_other_thread() -> None:
    with running() as rig, ThreadPoolExecutor(1) as other:
        for n in range(50):
            prompt = [n, *range(CHUNK)]
            rig.store(prompt)
            assert other.submit(rig.engine.lookup, prompt).result(10) == CHUNK


def test_an_engine_that_is_closed_under_its_callers_gives_them_nothing_and_no_error(tmp_path: Path) -> None:
    rig = Rig(None, local_disk=str(tmp_path), max_local_disk_size=1)
    started = threading.Barrier(4, timeout=10)

    def work(n: int) -> None:
        started.wait()
        for i in range(200):
            rig.store([n, i, *TOKENS])
            rig.engine.lookup([n, i, *TOKENS], pin=True, lookup_id=f"{n}")
            rig.retrieve([n, i, *TOKENS], req_id=f"{n}")
            rig.engine.lookup_unpin(f"{n}")

    with ThreadPoolExecutor(3) as pool:
        running_calls = [pool.submit(work, n) for n in range(3)]
        started.wait()
        rig.engine.close(5)
        for call in running_calls:
            call.result(60)
    assert rig.engine.lookup(TOKENS) == 0
    rig.assert_nothing_is_held()


# --- ranks that hold the same


LATENT: dict[str, Any] = {"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK, 1, HIDDEN), "world_size": 2}
ONE_STORES = {"extra_config": {"save_only_first_rank": True}}


def latent_pages(tokens: list[int]) -> list[torch.Tensor]:
    return [layer[:1].clone() for layer in kv_of(tokens)]


def move(rig: Rig, what: str, pages: list[torch.Tensor]) -> Any:
    return getattr(rig.engine, what)(TOKENS, kvcaches=pages, slot_mapping=torch.arange(len(TOKENS)))


def test_the_first_rank_stores_and_the_others_load_the_same_keys_from_a_shared_tier(tmp_path: Path) -> None:
    shared = {"remote_url": f"fs://{tmp_path}", **ONE_STORES}
    for worker in (1, 0):
        with running(None, {**LATENT, "worker_id": worker}, **shared) as rig:
            move(rig, "store", latent_pages(TOKENS))
            assert rig.engine.lookup(TOKENS) == (len(TOKENS) if worker == 0 else 0)
    with running(None, {**LATENT, "worker_id": 1}, **shared) as rig:
        pages = [torch.zeros(1, len(TOKENS), HIDDEN) for _ in range(LAYERS)]
        assert move(rig, "retrieve", pages).all()
        assert all(map(torch.equal, pages, latent_pages(TOKENS)))


class Collective:
    """What an engine's group of two ranks gives: each call waits for both."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.value: Any = None

    def of(self, rank: int) -> tuple[Any, Any]:
        def broadcast_object(value: Any, source: int) -> Any:
            if rank == source:
                self.value = value
            self.barrier.wait()
            found = self.value
            self.barrier.wait()
            return found

        def broadcast(tensor: torch.Tensor, source: int) -> None:
            found = broadcast_object(tensor, source)
            if rank != source:
                tensor.copy_(found)
            self.barrier.wait()

        return broadcast, broadcast_object


def test_the_first_rank_reads_for_all_where_the_engine_has_collectives() -> None:
    group = Collective()
    rigs = []
    for worker in (0, 1):
        rig = Rig.__new__(Rig)
        _start(rig, group, worker)
        rigs.append(rig)
    try:
        for rig in rigs:
            move(rig, "store", latent_pages(TOKENS))
        assert rigs[1].engine.status()["l1"]["objects"] == 0
        with ThreadPoolExecutor(2) as pool:
            pages = [[torch.zeros(1, len(TOKENS), HIDDEN) for _ in range(LAYERS)] for _ in rigs]
            masks = list(
                pool.map(lambda pair: move(pair[0], "retrieve", pair[1]), zip(rigs, pages, strict=True))
            )
        for mask, mine in zip(masks, pages, strict=True):
            assert mask.all()
            assert all(map(torch.equal, mine, latent_pages(TOKENS)))
        for rig in rigs:
            rig.assert_nothing_is_held()
    finally:
        for rig in rigs:
            rig.engine.close()


def _start(rig: Rig, group: Collective, worker: int) -> None:
    from helpers.host_connector import HostConnector, metadata
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig

    rig.config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, max_local_cpu_size=1 / 1024, **ONE_STORES
    )
    rig.about = metadata(CHUNK, **{**LATENT, "worker_id": worker})
    rig.connector = HostConnector(rig.about)
    rig.engine = LMCacheEngine(rig.config, rig.about, rig.connector, *group.of(worker))


@pytest.mark.parametrize("about", [{}, LATENT])
def test_one_rank_for_all_is_refused_where_the_others_could_not_get_it(about: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="save_only_first_rank"):
        Rig(None, about, **ONE_STORES)


def test_a_slow_tier_delays_no_lookup_beyond_its_time() -> None:
    below = BadAdapter()
    with running([("below", below)], lookup_timeout_ms=100) as rig:
        rig.store(TOKENS)
        below_only(rig)
        below.mode = "hangs"
        began = time.monotonic()
        assert rig.engine.lookup(TOKENS) == 0
        assert time.monotonic() - began < 5, "half of what a retrieve may wait"
        below.release()
