"""What the transformers adapter promises, with real servers: the same tokens as without it, or a miss."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from helpers.models import ANSWER, answer, make_model, prompt  # noqa: E402
from helpers.server import RunningServer, channel_to, dead_port, running_server, wait_for  # noqa: E402
from lmcache.errors import ConfigError, LayoutError  # noqa: E402
from lmcache.integration.transformers import PrefixCache  # noqa: E402
from lmcache.integration.transformers.identity import kv_shape, namespace  # noqa: E402
from lmcache.v1.multiprocess.client import ClientOptions  # noqa: E402
from lmcache.v1.protocol import messages as m  # noqa: E402

pytestmark = pytest.mark.torch

CHUNK = 32
FLAGS = ("--chunk-size", str(CHUNK))
EDGES = [n * CHUNK + d for n in (1, 2, 3) for d in (-1, 0, 1)]


def fill(cache: PrefixCache, model: Any, ids: Any) -> list[int]:
    """Answer ``ids`` uncached and save them; the answer."""
    tokens, past = answer(model, ids)
    assert cache.save(ids, past) == ids.shape[1] // CHUNK * CHUNK
    return tokens


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def cache(server: RunningServer, model: Any) -> Iterator[PrefixCache]:
    with PrefixCache(server.address, model) as opened:
        assert opened.path == "shared_memory"
        yield opened


# ---- the same tokens


@pytest.mark.parametrize("tokens", EDGES)
@pytest.mark.parametrize("shm", ["auto", "off"])
def test_cached_tokens_equal_uncached_tokens(
    server: RunningServer, model: Any, tokens: int, shm: str
) -> None:
    ids, options = prompt(tokens, seed=tokens), ClientOptions(shm=shm)
    with PrefixCache(server.address, model, salt=shm, options=options) as first:
        assert first.path == ("shared_memory" if shm == "auto" else "frames")
        assert first.load(ids) == (None, 0)
        expected, computed = answer(model, ids)
        assert first.save(ids, computed) == tokens // CHUNK * CHUNK
    with PrefixCache(server.address, model, salt=shm, options=options) as second:
        past, reused = second.load(ids)
    assert reused == min(tokens // CHUNK * CHUNK, tokens - 1)
    if reused:
        for stored, made in zip(past.layers, computed.layers, strict=True):
            assert torch.equal(stored.keys, made.keys[:, :, :reused])
            assert torch.equal(stored.values, made.values[:, :, :reused])
    assert answer(model, ids, past, reused)[0] == expected


def test_a_prompt_shares_the_prefix_of_another_with_a_different_tail(cache: PrefixCache, model: Any) -> None:
    shared = prompt(2 * CHUNK + 5, seed=100)
    fill(cache, model, torch.cat([shared, prompt(CHUNK, seed=101)], 1))
    for seed in (102, 103):
        ids = torch.cat([shared, prompt(2 * CHUNK, seed)], 1)
        past, reused = cache.load(ids)
        assert reused == 2 * CHUNK
        assert answer(model, ids, past, reused)[0] == answer(model, ids)[0]


def test_only_what_the_server_lacks_is_stored(cache: PrefixCache, model: Any) -> None:
    ids = prompt(4 * CHUNK, seed=110)
    _, past = answer(model, ids)
    assert cache.save(ids[:, : 2 * CHUNK + 3], past) == 2 * CHUNK
    assert cache.save(ids, past) == 2 * CHUNK
    assert cache.save(ids, past) == 0


def test_generate_gives_the_model_s_own_answer_and_leaves_the_prompt_cached(
    cache: PrefixCache, model: Any
) -> None:
    ids = prompt(2 * CHUNK + 7, seed=120)
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    assert torch.equal(cache.generate(ids, **options), expected)
    assert cache.load(ids)[1] == 2 * CHUNK
    assert torch.equal(cache.generate(ids, **options), expected)


def test_the_answer_depends_on_what_was_loaded(server: RunningServer, model: Any, cache: PrefixCache) -> None:
    ids = prompt(3 * CHUNK + 1, seed=130)
    expected = fill(cache, model, ids)
    with running_server(*FLAGS, l1_gb=0.01) as other, PrefixCache(other.address, model) as victim:
        assert fill(victim, model, ids) == expected
        past, reused = victim.load(ids)
        assert answer(model, ids, past, reused)[0] == expected
        pool = victim._transfer._bound.pool
        assert pool is not None
        noise = torch.randn(pool.data_bytes // 4, generator=torch.Generator().manual_seed(1))
        pool.data[:] = memoryview(noise.numpy()).cast("B")
        past, reused = victim.load(ids)
        assert reused == 3 * CHUNK
        assert answer(model, ids, past, reused)[0] != expected


def test_a_stored_chunk_has_the_declared_order_layer_then_k_and_v_then_head(
    cache: PrefixCache, model: Any
) -> None:
    ids = prompt(CHUNK, seed=140)
    _, past = answer(model, ids)
    assert cache.save(ids, past) == CHUNK
    planes = [t[0, :, :CHUNK].reshape(-1) for layer in past.layers for t in (layer.keys, layer.values)]
    pool = cache._transfer._bound.pool
    assert pool is not None
    assert bytes(pool.data).find(torch.cat(planes).numpy().tobytes()) >= 0


# ---- never a crossed hit


def one_weight_changed() -> Any:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-3
    return model


CROSSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dtype": (lambda: make_model().to(torch.bfloat16), {}),
    "weights": (lambda: make_model(seed=1), {}),
    "one weight": (one_weight_changed, {}),
    "configuration": (lambda: make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {}),
    "revision": (make_model, {"revision": "mine"}),
    "salt": (make_model, {"salt": "tenant"}),
    "tags": (make_model, {"tags": {"k": "v"}}),
}


@pytest.mark.parametrize("what", CROSSED)
def test_nothing_is_shared_across(server: RunningServer, model: Any, cache: PrefixCache, what: str) -> None:
    make, options = CROSSED[what]
    ids = prompt(2 * CHUNK + 1, seed=200 + list(CROSSED).index(what))
    fill(cache, model, ids)
    with PrefixCache(server.address, make_model()) as twin:
        assert twin.load(ids)[1] == 2 * CHUNK
    stranger = make()
    with PrefixCache(server.address, stranger, **options) as other:
        assert other.load(ids) == (None, 0)
        fill(other, stranger, ids)
    with PrefixCache(server.address, make(), **options) as again:
        assert again.load(ids)[1] == 2 * CHUNK


@pytest.mark.parametrize("change", ["in place", "replaced", "training"])
def test_a_model_that_changed_since_runs_uncached(server: RunningServer, change: str) -> None:
    model, ids = make_model(seed=2), prompt(2 * CHUNK, seed=210)
    with PrefixCache(server.address, model, salt=change) as cache:
        fill(cache, model, ids)
        assert cache.load(ids)[1] == 2 * CHUNK - 1
        _, past = answer(model, ids)
        if change == "in place":
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
        elif change == "replaced":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        else:
            model.train()
        assert cache.load(ids) == (None, 0)
        assert cache.save(prompt(2 * CHUNK, seed=211), past) == 0


# ---- the server's absence


def test_without_a_server_everything_runs_uncached(model: Any) -> None:
    ids = prompt(2 * CHUNK, seed=300)
    began = time.monotonic()
    with PrefixCache(f"127.0.0.1:{dead_port()}", model) as cache:
        assert cache.path == "down"
        assert cache.load(ids) == (None, 0)
        expected, past = answer(model, ids)
        assert cache.save(ids, past) == 0
        generated = cache.generate(ids, max_new_tokens=ANSWER, do_sample=False)
        assert generated[0, ids.shape[1] :].tolist() == expected
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_is_a_miss_and_hits_come_back_with_it(model: Any, end: int) -> None:
    ids = prompt(2 * CHUNK + 1, seed=310)
    with running_server(*FLAGS) as server, PrefixCache(server.address, model) as cache:
        expected = fill(cache, model, ids)
        assert cache.load(ids)[1] == 2 * CHUNK
        server.end(end)
        began = time.monotonic()
        assert cache.load(ids) == (None, 0)
        _, past = answer(model, ids)
        assert cache.save(ids, past) == 0
        assert time.monotonic() - began < 5
        with running_server(*FLAGS, "--port", str(server.port)):
            wait_for(lambda: cache.path == "shared_memory", 10, "the session is open again")
            assert cache.load(ids) == (None, 0)
            assert fill(cache, model, ids) == expected
            past, reused = cache.load(ids)
            assert reused == 2 * CHUNK
            assert answer(model, ids, past, reused)[0] == expected


def test_a_server_that_comes_back_with_another_chunk_size_is_used_with_that(model: Any) -> None:
    ids = prompt(4 * CHUNK + 1, seed=320)
    with running_server(*FLAGS) as server, PrefixCache(server.address, model) as cache:
        expected = fill(cache, model, ids)
        server.end()
        with running_server("--chunk-size", str(2 * CHUNK), "--port", str(server.port)):
            transfer = cache._transfer
            wait_for(
                lambda: transfer.groups[0].namespace.chunk_size == 2 * CHUNK, 10, "the new server is seen"
            )
            wait_for(lambda: cache.path == "shared_memory", 10, "the sessions are open again")
            assert cache.save(ids, answer(model, ids)[1]) == 4 * CHUNK
            past, reused = cache.load(ids)
            assert reused == 4 * CHUNK
            assert answer(model, ids, past, reused)[0] == expected


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_a_server_killed_between_lookup_and_load_costs_no_wrong_token(
    model: Any, monkeypatch: pytest.MonkeyPatch, shm: str
) -> None:
    ids = prompt(2 * CHUNK + 1, seed=330)
    options = ClientOptions(shm=shm, control_timeout=0.5)
    with running_server(*FLAGS) as server, PrefixCache(server.address, model, options=options) as cache:
        expected = fill(cache, model, ids)
        load = cache._transfer.load

        def killed_before(*arguments: Any) -> Any:
            server.end(signal.SIGKILL)
            return load(*arguments)

        monkeypatch.setattr(cache._transfer, "load", killed_before)
        past, reused = cache.load(ids)
        assert reused == (2 * CHUNK if shm == "auto" else 0)  # a mapped pool outlives its server
        assert answer(model, ids, past, reused)[0] == expected


def test_leases_and_requests_end_with_each_load(
    server: RunningServer, model: Any, cache: PrefixCache
) -> None:
    ids = prompt(2 * CHUNK + 1, seed=340)
    fill(cache, model, ids)
    for _ in range(3):
        assert cache.load(ids)[1] == 2 * CHUNK
    wait_for(
        lambda: '"read_leases":0' in server.get("/status")[1].replace(" ", ""), what="no read lease is held"
    )
    wait_for(lambda: '"requests":0' in server.get("/status")[1].replace(" ", ""), what="no request is known")


# ---- refusals


def test_a_model_with_a_sliding_window_is_refused_by_its_layer() -> None:
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(
        LayoutError, match="layer 0 caches in DynamicSlidingWindowLayer, expected DynamicLayer"
    ):
        PrefixCache("127.0.0.1:1", transformers.MistralForCausalLM(config))


def test_a_model_that_reads_more_than_the_prompt_s_tokens_is_refused() -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=64, **tiny),
        vision_config=transformers.CLIPVisionConfig(image_size=28, patch_size=14, **tiny),
    )
    with pytest.raises(ConfigError, match=r"reads more than tokens \(a llava\)"):
        PrefixCache("127.0.0.1:1", transformers.LlavaForConditionalGeneration(sees))
    encodes = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ConfigError, match="encodes and decodes, expected a decoder"):
        PrefixCache("127.0.0.1:1", transformers.T5ForConditionalGeneration(encodes))


def test_rotary_angles_that_depend_on_the_prompt_s_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="rope type dynamic"):
        PrefixCache("127.0.0.1:1", make_model(rope_parameters=rope))


def test_quantised_or_absent_weights_need_a_revision_from_the_caller(model: Any) -> None:
    absent = make_model()
    absent.model.norm.weight = torch.nn.Parameter(absent.model.norm.weight.to("meta"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is on the meta device.*revision="):
        namespace(absent, kv_shape(model), "")
    assert namespace(absent, kv_shape(model), "r").revision == "given:r"


@pytest.mark.parametrize("address", ["http://h:1", "h:99999", "h:x"])
def test_an_address_that_is_none_is_refused(model: Any, address: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        PrefixCache(address, model)


def test_several_sequences_are_refused(cache: PrefixCache) -> None:
    ids = torch.zeros((2, CHUNK), dtype=torch.long)
    for use in (cache.load, lambda ids: cache.save(ids, DynamicCache()), cache.generate):
        with pytest.raises(ConfigError, match=r"\[2, 32\]: expected one sequence"):
            use(ids)


def test_beams_embeddings_and_padding_are_refused(cache: PrefixCache) -> None:
    ids = prompt(CHUNK, seed=400)
    with pytest.raises(ConfigError, match="num_beams=4: expected 1"):
        cache.generate(ids, num_beams=4)
    with pytest.raises(ConfigError, match="inputs_embeds: expected tokens"):
        cache.generate(ids, inputs_embeds=torch.zeros(1, CHUNK, 64))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ConfigError, match="attention_mask hides tokens"):
        cache.generate(ids, attention_mask=mask)


def test_a_cache_that_is_not_this_model_s_is_refused(cache: PrefixCache, model: Any) -> None:
    ids = prompt(CHUNK, seed=410)
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(LayoutError, match="StaticCache, expected DynamicCache"):
        cache.save(ids, static)
    shallow = make_model(num_hidden_layers=2)
    with pytest.raises(LayoutError, match="2 layers, expected 3"):
        cache.save(ids, answer(shallow, ids)[1])
    wide = make_model(num_key_value_heads=4)
    with pytest.raises(LayoutError, match="layer 0 of past_key_values is"):
        cache.save(ids, answer(wide, ids)[1])
    half = make_model().to(torch.bfloat16)
    with pytest.raises(LayoutError, match=r"torch\.bfloat16"):
        cache.save(ids, answer(half, ids)[1])


def test_an_empty_cache_and_a_prompt_of_one_token_are_misses(cache: PrefixCache, model: Any) -> None:
    ids = prompt(CHUNK, seed=420)
    assert cache.save(ids, DynamicCache(config=model.config)) == 0
    assert cache.load(ids[:, :1]) == (None, 0)
    assert cache.load([]) == (None, 0)


# ---- tiers below L1


def test_what_was_saved_before_a_restart_is_loaded_from_the_disk_below_and_gives_the_same_tokens(
    model: Any, tmp_path: Path
) -> None:
    adapter = json.dumps({"type": "disk", "path": str(tmp_path / "disk"), "max_gb": 0.1})
    ids = prompt(3 * CHUNK + 1, seed=320)
    with running_server(*FLAGS, "--l2-adapter", adapter) as server:
        with PrefixCache(server.address, model, salt="tenant") as cache:
            expected = fill(cache, model, ids)
        assert server.end() == 0
    with running_server(*FLAGS, "--l2-adapter", adapter) as server:
        with PrefixCache(server.address, model, salt="tenant") as cache:
            past, known = cache.load(ids)
            assert known == 3 * CHUNK
            assert answer(model, ids, past, known)[0] == expected
        with PrefixCache(server.address, model, salt="other") as cache:
            assert cache.load(ids) == (None, 0)


def test_a_slow_tier_delays_a_load_no_longer_than_asked_for(model: Any) -> None:
    slow = json.dumps({"type": "fault", "latency_ms": 3000, "on": ["load"]})
    ids = prompt(3 * CHUNK + 1, seed=321)
    with running_server(*FLAGS, "--l2-adapter", slow) as server:
        with PrefixCache(server.address, model, prefetch_timeout=0.7) as cache:
            fill(cache, model, ids)
            wait_for(lambda: server.state()["l2"][0]["queued_objects"] == 0)
            with channel_to(server.address) as tool:
                tool.call(m.Clear(tiers=["l1"]), 10)
            began = time.monotonic()
            assert cache.load(ids) == (None, 0), "the tier was not waited for to the end: it has them"
            assert time.monotonic() - began >= 0.7
