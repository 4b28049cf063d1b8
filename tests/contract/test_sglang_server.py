"""SGLang's multi-process connector at a real server, driven as SGLang's radix cache drives it."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import Server, channel_to, dead_port, stop_process, wait_for
from lmcache.v1.protocol import messages as m

torch = pytest.importorskip("torch")

from helpers.sglang_engine import MiniSGLang, Slots, mini_sglang, model  # noqa: E402 -- needs torch
from lmcache.integration.sglang.multi_process_adapter import LMCacheMPConnector  # noqa: E402
from lmcache.integration.sglang.sglang_adapter import LoadMetadata, StoreMetadata  # noqa: E402
from lmcache.integration.sglang.utils import lmcache_get_config  # noqa: E402

pytestmark = pytest.mark.torch

CHUNK = 16
RANK = Path(__file__).parents[1] / "helpers" / "sglang_rank.py"
_fresh = itertools.count(1)


def prompt(tokens: int) -> list[int]:
    """Tokens that no other test has."""
    first = next(_fresh) * 1000
    return list(range(first, first + tokens))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--chunk-size", str(CHUNK), l1_gb=0.05) as running:
        yield running
        assert "Traceback" not in running.running.errors()


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    """A server on which a test leaves no pin, no lease and no request."""
    yield server.running.address
    wait_for(server.idle, 10, "everything given back")


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "swa"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_what_one_engine_computed_another_loads_slot_by_slot(
    address: str, tmp_path: Path, kind: str, page: int
) -> None:
    window = 20 if kind == "swa" else None
    tokens = prompt(70)
    with mini_sglang(address, tmp_path, kind, page, window=window) as first:
        assert first.connector.chunk_size == CHUNK
        assert first.connector.path == "shared_memory"
        assert first.run("a", tokens) == 0
    with mini_sglang(address, tmp_path, kind, page, window=window) as second:
        assert second.run("b", tokens) == 64
        assert second.run("c", [*tokens[:40], 7, 7, 7, 7, *tokens[44:]]) == 32


@pytest.mark.parametrize("local", [4, 16, 36, 64, 68])
def test_tokens_that_the_engine_has_itself_are_left_alone(address: str, tmp_path: Path, local: int) -> None:
    tokens = prompt(80)
    with mini_sglang(address, tmp_path) as engine:
        engine.run("a", tokens[:66])
        assert engine.run("b", tokens, local=local) == max(0, 64 - local)
        assert engine.run("c", tokens) == 80


def test_payload_may_travel_in_frames(address: str, tmp_path: Path) -> None:
    tokens = prompt(48)
    with mini_sglang(address, tmp_path, shm='"off"') as engine:
        engine.run("a", tokens)
        assert engine.connector.path == "frames"
        assert engine.run("b", tokens) == 48


def test_salts_and_extra_keys_keep_equal_tokens_apart(address: str, tmp_path: Path) -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("b", "a"),
        ("ab", ""),
        ("", "ab"),
        ('["a", "b"]', ""),
    ]
    tokens = prompt(32)
    with mini_sglang(address, tmp_path) as engine:
        for at, (salt, extra) in enumerate(pairs):
            assert engine.run(f"first-{at}", tokens, salt=salt, extra=extra) == 0
        for at, (salt, extra) in enumerate(pairs):
            assert engine.run(f"again-{at}", tokens, salt=salt, extra=extra) == 32


def test_weights_models_and_layouts_are_never_mixed(address: str, tmp_path: Path) -> None:
    tokens = prompt(32)
    others: list[dict[str, Any]] = [
        {},
        {"model_revision": "r2"},
        {"page": 8},
        {"config": model(quantization="fp8")},
        {"config": model(model_path="tests/other")},
        {"config": model(context_len=8192)},
    ]
    for others_settings in others:
        with mini_sglang(address, tmp_path, **others_settings) as engine:
            assert engine.run("a", tokens) == 0
            assert engine.run("b", tokens) == 32


# ---- aborts: SGLang may drop a request at any state


def _abort_after_lookup(engine: MiniSGLang, tokens: list[int]) -> None:
    engine.connector.submit_lookup("x", tokens, local_hit_tokens=0, cache_salt="")


def _abort_after_poll(engine: MiniSGLang, tokens: list[int]) -> None:
    op = engine.look_up("x", tokens)
    assert op.locks_held
    engine.connector.free_lookup_locks("x", start=op.lock_start, end=op.total_hit_tokens)
    assert not op.locks_held


def _abort_after_partial_release(engine: MiniSGLang, tokens: list[int]) -> None:
    op = engine.look_up("x", tokens)
    engine.free_local(op, 20)
    assert (op.lock_start, op.locks_held) == (16, True)


def _abort_during_load(engine: MiniSGLang, tokens: list[int]) -> None:
    load, slots, usable = engine.load(engine.look_up("x", tokens))
    assert usable
    engine.settle(load)
    assert engine.connector.complete_load(load)
    engine.slots.free(slots)


def _load_not_completed(engine: MiniSGLang, tokens: list[int]) -> None:
    _, slots, _ = engine.load(engine.look_up("x", tokens))
    engine.slots.free(slots)


def _load_into_wrong_slots(engine: MiniSGLang, tokens: list[int]) -> None:
    op = engine.look_up("x", tokens)
    load = engine.connector.submit_load(
        op, torch.arange(1, 1 + op.total_hit_tokens), local_hit_tokens=0, producer_stream=None
    )
    assert not engine.connector.prepare_load_on_stream(load, None)
    assert load.result is False
    assert not engine.connector.complete_load(load)
    engine.connector.free_lookup_locks("x", start=op.lock_start, end=op.total_hit_tokens)


def _abort_during_store(engine: MiniSGLang, tokens: list[int]) -> None:
    slots = engine.slots.alloc(32)
    engine.compute(prompt(32), slots)
    store = engine.submit_store("x", prompt(32), slots)
    engine.settle(store)
    assert engine.connector.complete_store(store)
    engine.slots.free(slots)


STATES = [
    _abort_after_lookup, _abort_after_poll, _abort_after_partial_release, _abort_during_load, _load_not_completed,
    _load_into_wrong_slots, _abort_during_store,
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__.strip("_"))
def test_an_abort_gives_every_pin_back_at_once(
    server: Server, address: str, tmp_path: Path, state: Any
) -> None:
    tokens = prompt(64)
    with mini_sglang(address, tmp_path) as engine:
        engine.run("a", tokens)
        state(engine, tokens)
        engine.connector.finish_request("x")
        wait_for(server.idle, 5, "pins of the aborted request given back")  # while the engine lives on
        assert engine.run("b", tokens) == 64


def test_the_end_of_all_sessions_gives_everything_back(server: Server, address: str, tmp_path: Path) -> None:
    tokens = prompt(64)
    with mini_sglang(address, tmp_path) as engine:
        engine.run("a", tokens)
        for rid in "xyz":
            engine.look_up(rid, tokens)
        engine.connector.end_all_sessions()
        wait_for(server.idle, 5, "all pins given back")
        assert engine.connector.clear()
        assert engine.run("b", tokens) == 0


# ---- the server goes and comes


def test_without_a_server_requests_run_uncached_and_with_one_again_cached(tmp_path: Path) -> None:
    port = dead_port()
    tokens = list(range(1, 71))
    began = time.monotonic()
    with mini_sglang(f"tcp://127.0.0.1:{port}", tmp_path, heartbeat_interval=0.2) as engine:
        for at in range(20):
            assert engine.run(f"alone-{at}", tokens) == 0
        assert time.monotonic() - began < 5.0  # one time-out in all, not one per request
        for life in range(2):
            with Server("--chunk-size", str(CHUNK << life), l1_gb=0.05, port=port) as server:
                wait_for(server.registered, 10, "the engine is in session")
                wait_for(lambda: engine.connector.path != "down", 10, "the worker's session is open")
                at = itertools.count()
                wait_for(lambda life=life, at=at: engine.run(f"{life}-{next(at)}", tokens), 10, "a hit")
                assert engine.run(f"hit-{life}", tokens) == 64
                assert engine.connector.chunk_size == CHUNK << life
                held = engine.look_up("held", tokens)
                server.kill()
            wait_for(lambda: engine.connector.path == "down", 10, "the end of the server is known")
            load, slots, usable = engine.load(held)
            # Reported, not raised; or the pool was still mapped, and what it held is right.
            assert not usable or engine.holds(tokens[:64], slots)
            assert engine.connector.complete_load(load) == usable
            engine.slots.free(slots)
            engine.connector.finish_request("held")
            assert engine.run(f"gone-{life}", tokens) == 0


# ---- tiers, sliding windows, releases before


def test_what_only_a_tier_holds_is_fetched_first(tmp_path: Path) -> None:
    tier = json.dumps({"type": "disk", "path": str(tmp_path / "tier"), "max_gb": 0.05})
    tokens = prompt(64)
    flags = ("--chunk-size", str(CHUNK), "--l2-adapter", tier)
    with Server(*flags, l1_gb=0.05) as server, mini_sglang(server.running.address, tmp_path) as engine:
        engine.run("a", tokens)
        with channel_to(server.running.address) as channel:

            def only_the_tier_holds_it() -> bool:
                """L1 gives up what the tier has written."""
                channel.call(m.Clear(tiers=["l1"]), 5.0)
                return server.state()["l1"]["objects"] == 0

            wait_for(lambda: any((tmp_path / "tier").rglob("*")), 10, "a file of the tier")
            wait_for(only_the_tier_holds_it, 10, "L1 is empty")
        engine.connector.submit_lookup("x", tokens, local_hit_tokens=0, cache_salt="")
        engine.connector.finish_request("x")  # dropped while the server fetches for it
        assert engine.run("b", tokens) == 64
        wait_for(server.idle, 10, "everything given back")


def test_what_a_hit_is_not_wanted_for_is_unpinned_before_the_request_ends(
    server: Server, address: str, tmp_path: Path
) -> None:
    tokens = prompt(64)

    def pinned() -> int:
        return int(server.state()["l1"]["pinned_objects"])

    with mini_sglang(address, tmp_path) as engine:
        engine.run("a", tokens)
        engine.look_up("b", tokens)
        assert pinned() == 4
        engine.connector.free_lookup_locks("b", start=0, end=64)
        wait_for(lambda: not pinned(), 5, "pins given back")
        op = engine.look_up("c", tokens)
        wrong = engine.connector.submit_load(op, torch.arange(1, 65), local_hit_tokens=0)
        assert not engine.connector.prepare_load_on_stream(wrong, None)
        wait_for(lambda: not pinned(), 5, "pins of a failed load given back")
        for rid in "bc":
            engine.connector.finish_request(rid)


def test_chunks_whose_window_is_gone_are_no_hit(server: Server, address: str, tmp_path: Path) -> None:
    tokens = prompt(64)
    before = server.state()["l1"]["objects"]
    with mini_sglang(address, tmp_path, "swa", window=20) as engine:
        slots = engine.slots.alloc(64)
        engine.compute(tokens, slots)
        engine.slots.swa_of[slots[36:40]] = 0  # a page of the third chunk has left the window
        store = engine.submit_store("a", tokens, slots)
        engine.settle(store)
        assert engine.connector.complete_store(store)
        assert server.state()["l1"]["objects"] - before == 6  # nothing of the third chunk, of either group
        engine.connector.finish_request("a")
        engine.slots.free(slots)
        assert engine.run("b", tokens) == 32  # the least of both groups; the rest is stored now
        assert engine.run("c", tokens) == 64


def test_a_store_that_the_server_did_not_take_is_submitted_again(tmp_path: Path) -> None:
    tokens = prompt(32)
    with Server("--chunk-size", str(CHUNK), l1_gb=0.05) as server:
        with mini_sglang(server.running.address, tmp_path, mq_timeout=0.3) as engine:
            slots = engine.slots.alloc(32)
            engine.compute(tokens, slots)
            stop_process(server.pid)
            store = engine.submit_store("a", tokens, slots)
            engine.settle(store)
            assert not engine.connector.complete_store(store)
            assert engine.connector.get_store_start("a", 32) == 0
            assert engine.submit_store("a", tokens, slots) is None  # nobody waits for a server that is away
            server.signal(signal.SIGCONT)
            again = wait_for(lambda: engine.submit_store("a", tokens, slots), 10, "the server is back")
            engine.settle(again)
            assert engine.connector.complete_store(again)
            assert engine.connector.get_store_start("a", 32) == 32
            engine.slots.free(slots)
            assert engine.run("b", tokens) == 32


def test_the_connector_of_releases_before_loads_what_it_stored(address: str, tmp_path: Path) -> None:
    file = tmp_path / "mp.yaml"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    file.write_text(f"mp_host: {host}\nmp_port: {port}\nextra_config: {{lmcache.mp.model_revision: r1}}\n")
    config, tokens = lmcache_get_config(str(file)), prompt(56)
    slots = Slots("mha", 256, 4)
    pool = slots.get_kvcache()
    connector = LMCacheMPConnector(
        sgl_config=model(), tp_size=1, rank=0, page_size=4, host=config.mp_host, port=config.mp_port,
        k_pool=pool.k_buffer, v_pool=pool.v_buffer, tp_group=None,
    )  # fmt: skip
    try:
        assert connector.is_healthy
        assert connector.chunk_size() == CHUNK
        first, second = slots.alloc(56), slots.alloc(28)
        for tensor in (*pool.k_buffer, *pool.v_buffer):
            tensor[first] = torch.rand(56, *tensor.shape[1:])
        assert connector.lookup_kv(tokens, "a") == 0
        connector.store_kv(StoreMetadata(None, tokens, first.to(torch.int32), 0, "a"))
        connector.end_session("a")

        assert connector.lookup_kv(tokens, "b") == 48
        mapping = torch.cat(
            [torch.full((20,), -1), second]
        )  # SGLang has 20 tokens: a chunk, and a page of the next
        meta = LoadMetadata(tokens, mapping, offset=16, prefix_pad=4, request_id="b")
        assert connector.retrieve_kv(meta) == 32
        assert connector.retrieve_kv(meta) == 0  # once per lookup
        for tensor in (*pool.k_buffer, *pool.v_buffer):
            assert torch.equal(tensor[second], tensor[first[20:48]])

        assert connector.lookup_kv(tokens, "c") == connector.lookup_kv(tokens, "c") == 48
        connector.release_pending("c")
        assert connector.lookup_kv(tokens, "d") == 48
        connector.reset()
    finally:
        connector.close()


# ---- several ranks


@pytest.mark.parametrize(
    "kind", ["mha", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mla", "stages"))]
)
def test_ranks_take_the_same_decisions(address: str, tmp_path: Path, kind: str) -> None:
    command = [sys.executable, str(RANK), address, str(tmp_path), kind]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "777000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second  # what each was told
    assert first == {
        "alone": 0,
        "again": 64,
        "uneven": 44,
        "one rank fails": [False, False],
        "after": 64,
        "stored by one that cannot": None,
    }
