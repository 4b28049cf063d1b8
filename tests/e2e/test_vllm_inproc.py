"""A real vLLM whose cache lives in its own processes, reached through vLLM's wrapper by the connector's bare name.

Cold runs, which find nothing, are the reference of warm ones; ``test_vllm_exact`` shows that they equal a vLLM without
any connector. Each test has prompts of its own seed; the tests of ``warm`` run in order.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import tokens
from e2e.engine import EngineProcess, engine, inproc
from helpers.server import channel_to, wait_for
from lmcache.v1.multiprocess.server.embedded import embedded_address
from lmcache.v1.protocol import messages as m

pytestmark = pytest.mark.vllm

CHUNK, BLOCK = 256, 128
EDGES = sorted({k + d for k in (BLOCK, CHUNK, 3 * BLOCK, 4 * CHUNK) for d in (-1, 0, 1)})


class Warm:
    """An engine and the server inside it."""

    def __init__(self, process: EngineProcess, ident: str) -> None:
        self.process, self._address = process, embedded_address(ident)

    def run(self, prompts: list[list[int]], **kwargs: Any) -> tuple[list[list[int]], list[int]]:
        """Tokens and cached tokens."""
        results = self.process.generate(prompts, **kwargs)
        return [r["tokens"] for r in results], [r["cached"] for r in results]

    def state(self) -> dict[str, Any]:
        with channel_to(self._address) as tool:
            reply, _ = tool.call(m.Status(), 10)
        assert isinstance(reply, m.State)
        return dict(reply.fields)

    def idle(self) -> bool:
        """Whether no lease, no reservation and no request is left."""
        state = self.state()
        l1 = state["l1"]
        held = l1["read_leases"] or l1["write_leases"] or l1["pinned_objects"] or l1["reserved_bytes"]
        return not (held or state["requests"])


def started(
    model: Path, log: Path, *, extra: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Warm]:
    ident = f"test-{uuid.uuid4()}"
    with engine(model, log, inproc(ident, **(extra or {})), **settings) as process:
        yield Warm(process, ident)


@pytest.fixture(scope="module")
def warm(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    # What users of 0.5 write: prefixed, bare, and asking for what happens anyway.
    extra = {"lmcache.chunk_size": CHUNK, "local_cpu": True, "enable_async_loading": True}
    yield from started(model_dir("gqa"), tmp_path_factory.mktemp("inproc") / "log", extra=extra)


@pytest.fixture
def tight(model_dir: Callable[[str], Path], log: Path) -> Iterator[Warm]:
    """Room for three prompts of eight blocks, but not for the ninth block that each comes to need."""
    extra = {"save_decode_cache": True}
    settings = {"num_gpu_blocks_override": 26, "max_model_len": 2048}
    yield from started(model_dir("gqa"), log, extra=extra, **settings)


def hit(length: int) -> int:
    """All whole chunks, but never the last token."""
    return min(length // CHUNK * CHUNK, length - 1)


def test_tokens_and_pages_are_the_same_at_every_block_and_chunk_edge(warm: Warm) -> None:
    warm.process.worker("spy")
    for length in EDGES:
        prompt = tokens(length, length)
        truth, cached = warm.run([prompt])
        assert cached == [0], f"cold, {length} tokens"
        stored = warm.process.worker("spied")["stored"]
        assert len(stored) == length // CHUNK
        assert warm.run([prompt]) == (truth, [hit(length)]), f"warm, {length} tokens"
        assert warm.process.worker("spied")["loaded"] == list(stored.values()), f"pages of {length} tokens"
        if stored:
            assert warm.process.worker("stored_pages", list(stored)) == list(stored.values())
    assert warm.process.worker("transfer_path") == "shared_memory"
    assert warm.idle()


def test_sixteen_requests_at_once_half_of_them_warm(warm: Warm) -> None:
    prompts = [tokens(8000 + i, 300 + 97 * i) for i in range(16)]
    truth, cached = warm.run(prompts, salts=["reference"] * 16)
    assert cached == [0] * 16
    for i in range(0, 16, 2):
        warm.run([prompts[i]])
    assert warm.run(prompts) == (truth, [hit(len(p)) if i % 2 == 0 else 0 for i, p in enumerate(prompts)])


def test_a_salt_finds_only_what_it_stored(warm: Warm) -> None:
    prompt = tokens(8100, 600)
    for salt in (None, "a", "b"):
        assert [warm.run([prompt], salts=[salt])[1] for _ in range(2)] == [[0], [512]], salt


def test_fifty_aborts_leave_no_lease_pin_or_request(warm: Warm) -> None:
    prompts = [tokens(9000 + i, 200 + 400 * i) for i in range(4)]
    warm.run(prompts[::2])
    warm.process.call("abort_storm", prompts, 50, 5, timeout=300)
    wait_for(warm.idle, 5, "leases, pins and requests at zero after the aborts")


def test_failed_loads_are_computed_again_and_stores_go_on_afterwards(warm: Warm) -> None:
    """The failed load leaves noise in its pages, so that nobody gets away with not computing all of them again."""
    prompts = [tokens(9100 + i, 600 + 300 * i) for i in range(3)]
    truth, _ = warm.run(prompts)
    warm.process.worker("fail_loads")
    assert warm.run(prompts)[0] == truth
    warm.process.worker("mend_loads")
    assert warm.run(prompts) == (truth, [hit(len(p)) for p in prompts]), "no noise was stored"
    other = tokens(9200, 700)
    assert [warm.run([other])[1] for _ in range(2)] == [[0], [512]], "the worker stores again"


def test_weights_that_change_forget_what_was_stored(warm: Warm) -> None:
    prompt = tokens(9300, 600)
    assert [warm.run([prompt])[1] for _ in range(2)] == [[0], [512]]
    assert warm.process.call("reset")
    assert warm.run([prompt])[1] == [0]


def test_without_its_server_the_engine_goes_on_uncached_and_without_a_stall(warm: Warm) -> None:
    prompts = [tokens(9400 + i, 600) for i in range(4)]
    results, cold = warm.process.timed(prompts)
    truth = [r["tokens"] for r in results]
    warm.process.worker("end_server")
    assert warm.run(prompts)[0] == truth
    began_again = [warm.process.timed([prompt]) for prompt in prompts]
    assert [results[0]["tokens"] for results, _ in began_again] == truth
    assert [results[0]["cached"] for results, _ in began_again] == [0] * len(prompts)
    assert max(seconds for _, seconds in began_again) < cold + 1.0, (
        "each request costs what it costs uncached"
    )


def test_nothing_of_it_is_left_in_the_engines_process_after_the_end(warm: Warm) -> None:
    left = warm.process.worker("shut_down")
    assert left["threads"] == []
    assert left["mapped"] == []
    assert not any("lmcache" in module for module in left["handlers"] + left["logging"])


@pytest.mark.long
def test_preempted_requests_and_their_generated_tokens(tight: Warm) -> None:
    """Cold and warm under preemption; what was generated is cached, too."""
    prompts = [tokens(100 + i, 1000) for i in range(6)]
    alone = [tight.run([prompt], max_tokens=50, salts=["alone"])[0][0] for prompt in prompts]
    for _ in range(2):
        assert tight.run(prompts, max_tokens=50)[0] == alone
    assert tight.process.call("preemptions") > 0
    turn = prompts[0] + alone[0] + tokens(120, 40)
    results, cached = tight.run([turn])
    assert cached == [4 * CHUNK], "the fourth chunk ends among the generated tokens"
    assert results == tight.run([turn], salts=["cold"])[0]
    assert tight.idle()


@pytest.fixture
def layered(model_dir: Callable[[str], Path], log: Path) -> Iterator[Warm]:
    yield from started(model_dir("gqa"), log, extra={"use_layerwise": True})


def test_layer_by_layer_tokens_are_the_same_and_torn_loads_are_computed_again(layered: Warm) -> None:
    """A load that the engine did not wait for, layer by layer, would count as failed: these hits were waited for."""
    prompts = [tokens(9500 + i, length) for i, length in enumerate((CHUNK + 1, 4 * CHUNK, 5 * CHUNK - 1))]
    truth, _ = layered.run(prompts)
    for _ in range(2):
        assert layered.run(prompts) == (truth, [hit(len(p)) for p in prompts])
    counters = layered.process.worker("counters")
    assert (counters["failed_loads"], counters["dropped_stores"]) == (0, 0)
    assert counters["stored_chunks"] == sum(len(p) // CHUNK for p in prompts)
    assert counters["loaded_chunks"] == 2 * counters["stored_chunks"]
    layered.process.worker("tear_layers")
    assert layered.run(prompts)[0] == truth
    layered.process.worker("mend_layers")
    assert layered.run(prompts) == (truth, [hit(len(p)) for p in prompts])
    other = tokens(9510, 700)
    assert [layered.run([other])[1] for _ in range(2)] == [[0], [512]], "the worker stores again"
    assert layered.idle()
    for mode, refusal in layered.process.worker("layers_with_graphs").items():
        assert ("FULL" in mode) == ("as use_layerwise in kv_connector_extra_config" in refusal), mode
    assert layered.process.worker("shut_down")["threads"] == []


@pytest.mark.long
def test_two_ranks_share_one_cache_layer_by_layer_and_survive_failed_loads(
    model_dir: Callable[[str], Path], log: Path
) -> None:
    ident = f"test-{uuid.uuid4()}"
    transfer = inproc(ident, use_layerwise=True)
    prompts = [tokens(9600 + i, 700 + 400 * i) for i in range(3)]
    with engine(model_dir("gqa"), log, transfer, tensor_parallel_size=2) as process:
        ranks = Warm(process, ident)
        truth, _ = ranks.run(prompts)
        hits = [hit(len(p)) for p in prompts]
        assert ranks.run(prompts) == (truth, hits)
        assert {(s["role"], s["rank"]) for s in ranks.state()["sessions"]} >= {
            ("scheduler", 0), ("worker", 0), ("worker", 1)
        }  # fmt: skip
        process.worker("tear_layers")
        assert ranks.run(prompts)[0] == truth
        process.worker("mend_layers")
        assert ranks.run(prompts) == (truth, hits)
        other = tokens(9610, 700)
        assert [ranks.run([other])[1] for _ in range(2)] == [[0], [512]], "both ranks store again"
        assert ranks.idle()


@pytest.mark.long
def test_several_kv_groups_by_the_modules_path(model_dir: Callable[[str], Path], log: Path) -> None:
    ident = f"test-{uuid.uuid4()}"
    prompts = [tokens(9700 + i, 700 + 300 * i) for i in range(2)]
    with engine(model_dir("hybrid"), log, inproc(ident, by_path=True)) as process:
        groups = Warm(process, ident)
        truth, cached = groups.run(prompts)
        assert cached == [0, 0]
        assert groups.run(prompts) == (truth, [hit(len(p)) for p in prompts])
        assert groups.idle()
