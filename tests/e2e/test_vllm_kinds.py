"""Other models and other pressures on a real vLLM: preemption, prefix caching, latent attention, hybrid groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.conftest import tokens
from e2e.engine import connector, engine
from helpers.server import Server

pytestmark = pytest.mark.vllm

CHUNK = 256


def test_preempted_requests_end_with_the_right_tokens(model_dir: Callable[[str], Path], log: Path) -> None:
    prompts = [tokens(100 + i, 1000) for i in range(6)]
    with engine(model_dir("gqa"), log.with_name("roomy")) as roomy:
        truth = [r["tokens"] for r in roomy.generate(prompts, max_tokens=50)]
    # Room for three prompts of eight blocks each, but not for the ninth block that all of them come to need.
    with (
        Server() as server,
        engine(
            model_dir("gqa"), log, connector(server.port), num_gpu_blocks_override=26, max_model_len=2048
        ) as tight,
    ):
        for _ in range(2):
            got = tight.generate(prompts, max_tokens=50)
            assert [r["tokens"] for r in got] == truth
        assert tight.call("preemptions") > 0
        assert server.idle()


def test_vllms_own_prefix_cache_and_ours_agree(model_dir: Callable[[str], Path], log: Path) -> None:
    prefix = tokens(200, 1000)
    prompts = [prefix + tokens(201 + i, 120 * i + 5) for i in range(4)]
    with engine(model_dir("gqa"), log.with_name("plain")) as plain:
        truth = [r["tokens"] for r in plain.generate(prompts)]
    with Server() as server:
        with engine(model_dir("gqa"), log.with_name("first"), connector(server.port)) as first:
            first.generate([prompts[0]])
        transfer = connector(server.port)
        with engine(model_dir("gqa"), log, transfer, enable_prefix_caching=True) as second:
            for prompt, right in zip(prompts, truth, strict=True):
                (result,) = second.generate([prompt])
                assert result["tokens"] == right
                assert result["cached"] >= 3 * CHUNK
            assert [r["tokens"] for r in second.generate(prompts)] == truth


def test_pages_of_latent_attention_are_stored_and_loaded_byte_for_byte(
    model_dir: Callable[[str], Path], log: Path
) -> None:
    """Pages and hits only: this vLLM's CPU kernel for latent attention gives other tokens when a prefix is reused
    or requests run together, with no connector at all, so tokens prove nothing here."""
    prompt = tokens(300, 1400)
    # The kernel that vLLM takes by itself where the CPU has AMX refuses float32.
    plain = {"attention_backend": "CPU_MLA"}
    with Server() as server, engine(model_dir("mla"), log, connector(server.port), **plain) as process:
        process.worker("spy")
        assert process.generate([prompt])[0]["cached"] == 0
        stored = process.worker("spied")["stored"]
        assert process.generate([prompt])[0]["cached"] == 1280
        assert process.worker("spied")["loaded"] == list(stored.values())
        assert process.worker("stored_pages", list(stored)) == list(stored.values())


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.long)])
def test_a_hybrid_model_hits_on_all_groups_and_survives_failed_loads(
    model_dir: Callable[[str], Path], log: Path, policy: str
) -> None:
    prompt = tokens(400, 2000)
    with Server() as server, engine(model_dir("hybrid"), log, connector(server.port, policy)) as process:
        process.worker("spy")
        (cold,) = process.generate([prompt])
        stored = process.worker("spied")["stored"]
        assert cold["cached"] == 0
        (warm,) = process.generate([prompt])
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 1792)
        loaded = process.worker("spied")["loaded"]
        window = [page for chunk in loaded for page in chunk if not page]
        assert window, "blocks outside the sliding window are not loaded"
        for have, want in zip(loaded, stored.values(), strict=True):
            assert [w if h else "" for h, w in zip(have, want, strict=True)] == have
        process.worker("fail_loads")
        (failed,) = process.generate([prompt])
        if policy == "recompute":
            assert failed["tokens"] == cold["tokens"]
        else:
            assert failed["finish"] == "error"
        fresh = tokens(401, 500)
        assert len(process.generate([fresh])[0]["tokens"]) == 8, "the engine lives"
        assert server.idle()


def test_two_tensor_parallel_ranks_hit_together_and_survive_failed_loads(
    model_dir: Callable[[str], Path], log: Path
) -> None:
    prompt = tokens(500, 1300)
    tailed = prompt[:1024] + tokens(501, 500)
    with (
        Server() as server,
        engine(model_dir("gqa"), log, connector(server.port), tensor_parallel_size=2) as process,
    ):
        (cold,) = process.generate([prompt])
        (warm,) = process.generate([prompt])
        assert (cold["cached"], warm["cached"], warm["tokens"]) == (0, 1280, cold["tokens"])
        (first,) = process.generate([tailed])
        assert first["cached"] == 1024
        workers = [s for s in server.state()["sessions"] if s["role"] == "worker"]
        assert sorted((s["rank"], s["path"]) for s in workers) == [(0, "shared_memory"), (1, "shared_memory")]
        assert server.idle()
        process.worker("fail_loads")
        assert process.generate([prompt])[0]["tokens"] == cold["tokens"]
        assert process.generate([tailed])[0]["tokens"] == first["tokens"]
