"""A real vLLM, GQA model, float32, greedy: cached tokens equal uncached tokens, stored pages equal the engine's.

``warm`` is the engine under test, on a server of its own, in each way that pages can travel: ``shared_memory`` and
``frames`` by transfer mode auto, which is engine_driven on the CPU, and ``device``, lmcache_driven. ``plain`` is
the same vLLM without any connector. Tests of a module share engines and run in
order; each uses prompts of its own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import tokens
from e2e.engine import EngineProcess, connector, engine
from helpers.server import Server, wait_for

pytestmark = pytest.mark.vllm

CHUNK, BLOCK = 256, 128
EDGES = sorted({k + d for k in (BLOCK, CHUNK, 3 * BLOCK, 4 * CHUNK, 10 * CHUNK) for d in (-1, 0, 1)})


def expected_hit(length: int) -> int:
    """All whole chunks, but never the last token."""
    return min(length // CHUNK * CHUNK, length - 1)


class Reference:
    """Outputs of vLLM without a connector, from an engine that is started once and asked once for each."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._known: dict[str, list[list[int]]] = {}

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        key = repr(prompts)
        if key not in self._known:
            self._known[key] = [r["tokens"] for r in self._process.generate(prompts)]
        return self._known[key]


@pytest.fixture(scope="module")
def reference(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    with engine(model_dir("gqa"), tmp_path_factory.mktemp("plain") / "log") as process:
        yield Reference(process)


@pytest.fixture(
    scope="module", params=["shared_memory", pytest.param("frames", marks=pytest.mark.long), "device"]
)
def setup(
    request: pytest.FixtureRequest,
    reference: Reference,
    model_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, EngineProcess]]:
    extra = {
        "shared_memory": {"lmcache.mp.shm": "require", "lmcache.mp.mp_transfer_mode": "auto"},
        "frames": {"lmcache.mp.shm": "off"},
        "device": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    }[request.param]
    log = tmp_path_factory.mktemp("warm") / "log"
    with (
        Server() as server,
        engine(model_dir("gqa"), log, connector(server.port, **extra)) as process,
    ):
        wait_for(lambda: process.worker("transfer_path") == request.param, 30, "the worker's session")
        process.worker("spy")
        yield server, process


def run(process: EngineProcess, prompts: list[list[int]], **kwargs: Any) -> tuple[list[list[int]], list[int]]:
    results = process.generate(prompts, **kwargs)
    return [r["tokens"] for r in results], [r["cached"] for r in results]


def test_tokens_and_pages_are_the_same_at_every_block_and_chunk_edge(
    setup: tuple[Server, EngineProcess], reference: Reference
) -> None:
    server, warm = setup
    warm.worker("spied")
    for length in EDGES:
        prompt = tokens(length, length)
        truth = reference([prompt])
        assert run(warm, [prompt]) == (truth, [0]), f"cold, {length} tokens"
        stored = warm.worker("spied")["stored"]
        assert len(stored) == length // CHUNK
        assert run(warm, [prompt]) == (truth, [expected_hit(length)]), f"warm, {length} tokens"
        loaded = warm.worker("spied")["loaded"]
        assert loaded == list(stored.values()), f"pages of {length} tokens"
        if warm.worker("transfer_path") == "shared_memory" and stored:
            assert warm.worker("stored_pages", list(stored)) == list(stored.values())
    assert server.idle()


def test_a_shared_prefix_is_reused_under_different_tails(
    setup: tuple[Server, EngineProcess], reference: Reference
) -> None:
    _, warm = setup
    prefix = tokens(7001, 1100)
    run(warm, [prefix])
    prompts = [prefix + tokens(7002 + i, 50 + 300 * i) for i in range(4)]
    for prompt, truth in zip(prompts, reference(prompts), strict=True):
        assert run(warm, [prompt]) == ([truth], [4 * CHUNK])


def test_sixteen_requests_at_once_half_of_them_warm(
    setup: tuple[Server, EngineProcess], reference: Reference
) -> None:
    server, warm = setup
    prompts = [tokens(8000 + i, 300 + 97 * i) for i in range(16)]
    for i in range(0, 16, 2):
        run(warm, [prompts[i]])
    got, cached = run(warm, prompts)
    assert got == reference(prompts)
    assert cached == [expected_hit(len(p)) if i % 2 == 0 else 0 for i, p in enumerate(prompts)]
    assert server.idle()


def test_a_hundred_aborts_leave_no_lease_pin_or_request(setup: tuple[Server, EngineProcess]) -> None:
    server, warm = setup
    prompts = [tokens(9000 + i, 200 + 400 * i) for i in range(8)]
    run(warm, prompts[::2])
    warm.call("abort_storm", prompts, 100, 5, timeout=300)
    wait_for(server.idle, 5, "leases, pins and requests at zero after the aborts")
    assert server.state()["l1"]["reserved_bytes"] == 0


def test_hits_survive_an_engine_restart(
    setup: tuple[Server, EngineProcess], reference: Reference, model_dir: Callable[[str], Path], log: Path
) -> None:
    server, warm = setup
    prompt = tokens(10_000, 1500)
    run(warm, [prompt])
    with engine(model_dir("gqa"), log, connector(server.port)) as second:
        assert run(second, [prompt]) == (reference([prompt]), [expected_hit(1500)])
        # ... also with vLLM's own prefix cache at work, in part and in whole
        longer = prompt + tokens(10_001, 700)
        assert run(second, [longer])[0] == reference([longer])
    wait_for(lambda: len(server.state()["sessions"]) == 2, 10, "the second engine's sessions closed")


def test_a_server_restart_costs_only_the_hits_and_they_come_back(
    setup: tuple[Server, EngineProcess], reference: Reference
) -> None:
    server, warm = setup
    prompt = tokens(11_000, 1300)
    truth = reference([prompt])
    run(warm, [prompt])
    server.kill()
    server.start()
    assert run(warm, [prompt]) == (truth, [0])

    def hit() -> bool:
        got, cached = run(warm, [prompt])
        assert got == truth
        return cached == [expected_hit(1300)]

    wait_for(hit, 30, "hits after the server's return")  # it imports torch first, to map the engine's memory


def test_output_depends_on_the_cached_pages(
    setup: tuple[Server, EngineProcess], reference: Reference
) -> None:
    """The control of all tests above: with other bytes in the pool the tokens differ."""
    _, warm = setup
    if warm.worker("transfer_path") != "shared_memory":
        pytest.skip("pages are spoiled through the mapping; the other parameter does it")
    prompt = tokens(12_000, 2000)
    run(warm, [prompt])
    warm.worker("spoil_pool")
    got, cached = run(warm, [prompt])
    assert cached == [expected_hit(2000)]
    assert got != reference([prompt])
