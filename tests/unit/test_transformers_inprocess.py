"""What the in-process transformers cache promises: the same tokens as without it, whole and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from helpers.models import ANSWER, answer, make_model, prompt  # noqa: E402
from lmcache.errors import ConfigError, LayoutError  # noqa: E402
from lmcache.integration.transformers import InProcessCache  # noqa: E402
from lmcache.integration.transformers.paged import PagedLayer  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector.pages import PagedLayers  # noqa: E402
from lmcache.v1.platform.ops_types import TransferDirection  # noqa: E402

pytestmark = pytest.mark.torch

CHUNK = 16
EDGES = [n * CHUNK + d for n in (1, 2, 3) for d in (-1, 0, 1)]
LAYERS = 3
BOTH = pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])


def config(layerwise: bool, **changes: Any) -> LMCacheEngineConfig:
    values = {"chunk_size": CHUNK, "max_local_cpu_size": 4 / 1024, "use_layerwise": layerwise, **changes}
    return LMCacheEngineConfig.from_dict(values)


def on_disk(folder: Path) -> dict[str, Any]:
    return {"local_disk": str(folder), "max_local_disk_size": 1}


@contextmanager
def opened(
    model: Any, layerwise: bool, options: dict[str, Any] | None = None, **changes: Any
) -> Iterator[InProcessCache]:
    """A cache that holds nothing of L1 by the time it is closed."""
    with InProcessCache(config(layerwise, **changes), model, **(options or {})) as cache:
        yield cache
        assert cache.engine.flush()
        status = cache.engine.status()
        assert (status["live_objects"], status["lookups"]) == (0, 0)
        assert status["l1"]["reserved_bytes"] == 0
        assert status["l1"]["pinned_objects"] == 0


def ask(cache: InProcessCache, model: Any, ids: Any, **options: Any) -> tuple[list[int], int, Any]:
    """Answer, tokens reused, and the KV of all."""
    with cache.request(ids, **options) as (past, reused):
        tokens, _ = answer(model, ids, past, reused)
    return tokens, reused, past


def known(cache: InProcessCache, ids: Any) -> int:
    with cache.request(ids, save=False) as (_, reused):
        return reused


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the same tokens


@BOTH
@pytest.mark.parametrize("unfull", [False, True])
def test_cached_tokens_equal_uncached_tokens_around_edges_of_chunks(
    model: Any, layerwise: bool, unfull: bool
) -> None:
    with opened(model, layerwise, save_unfull_chunk=unfull) as cache:
        for tokens in EDGES:
            ids = prompt(tokens, seed=tokens)
            expected, computed = answer(model, ids)
            assert ask(cache, model, ids)[:2] == (expected, 0)
            again, reused, past = ask(cache, model, ids)
            kept = tokens if unfull else tokens // CHUNK * CHUNK
            assert reused == min(kept, tokens - 1)
            assert again == expected
            for stored, made in zip(past.layers, computed.layers, strict=True):
                assert torch.equal(stored.keys[:, :, :reused], made.keys[:, :, :reused])
                assert torch.equal(stored.values[:, :, :reused], made.values[:, :, :reused])


@BOTH
def test_another_engine_on_the_same_folder_goes_on_after_a_restart(
    model: Any, layerwise: bool, tmp_path: Path
) -> None:
    ids = prompt(3 * CHUNK + 5, seed=1)
    with opened(model, layerwise, **on_disk(tmp_path)) as first:
        expected = ask(first, model, ids)[0]
    with opened(make_model(), layerwise, **on_disk(tmp_path)) as second:
        assert ask(second, model, ids)[:2] == (expected, 3 * CHUNK)
        longer = torch.cat([ids[:, : 2 * CHUNK], prompt(2 * CHUNK, seed=2)], 1)
        assert ask(second, model, longer)[:2] == (answer(model, longer)[0], 2 * CHUNK)
    with opened(model, layerwise, **on_disk(tmp_path)) as third:
        assert ask(third, model, longer)[1] == 4 * CHUNK - 1


@BOTH
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_models_and_attentions_give_the_same_tokens(layerwise: bool, attention: str) -> None:
    torch.manual_seed(3)
    tiny = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3}
    configs = [
        transformers.GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
        transformers.Qwen3Config(**tiny, **more),
    ]
    for made in configs:
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()
        ids = prompt(2 * CHUNK + 3, seed=3)
        with opened(model, layerwise) as cache:
            expected = answer(model, ids)[0]
            assert [ask(cache, model, ids)[:2] for _ in range(2)] == [(expected, 0), (expected, 2 * CHUNK)]


@BOTH
def test_generate_gives_the_model_s_own_answer(model: Any, layerwise: bool) -> None:
    ids = prompt(2 * CHUNK + 7, seed=4)
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    with opened(model, layerwise) as cache:
        assert torch.equal(cache.generate(ids, **options), expected)
        assert known(cache, ids) == 2 * CHUNK
        assert torch.equal(cache.generate(ids, **options), expected)
        with torch.inference_mode():
            assert ask(cache, model, ids)[0] == expected[0, ids.shape[1] :].tolist()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), layerwise=st.booleans(), unfull=st.booleans())
def test_a_prompt_may_come_in_pieces_and_outgrow_its_room(
    model: Any, data: st.DataObject, layerwise: bool, unfull: bool
) -> None:
    tokens = data.draw(st.integers(2, 3 * CHUNK), "tokens")
    room = data.draw(st.integers(0, 4), "room")
    ids = prompt(tokens, seed=1000 + tokens)
    expected, computed = answer(model, ids)
    with opened(model, layerwise, save_unfull_chunk=unfull) as cache:
        for _ in range(2):
            with cache.request(ids, new_tokens=room) as (past, reused), torch.no_grad():
                cuts = data.draw(st.lists(st.integers(reused, tokens - 1), max_size=2), "cuts")
                edges = sorted({reused, *cuts})
                for start, end in pairwise(edges):
                    model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
                assert answer(model, ids, past, edges[-1])[0] == expected
            for stored, made in zip(past.layers, computed.layers, strict=True):
                assert torch.allclose(stored.keys, made.keys, atol=1e-4)
        assert known(cache, ids) == min(tokens if unfull else tokens // CHUNK * CHUNK, tokens - 1)


@BOTH
def test_an_answer_that_was_saved_is_known_to_the_next_turn(model: Any, layerwise: bool) -> None:
    ids = prompt(CHUNK - 2, seed=5)
    with opened(model, layerwise) as cache:
        tokens, _, past = ask(cache, model, ids)
        every = torch.cat([ids, torch.tensor([tokens])], 1)
        cache.save(every, past)
        turn = torch.cat([every, prompt(3, seed=6)], 1)
        assert ask(cache, model, turn)[:2] == (answer(model, turn)[0], CHUNK)


@BOTH
def test_a_cache_is_whole_after_a_block_that_ran_nothing(model: Any, layerwise: bool) -> None:
    ids = prompt(2 * CHUNK + 1, seed=7)
    with opened(model, layerwise) as cache:
        expected = ask(cache, model, ids)[0]
        with cache.request(ids) as (past, reused):
            pass
        assert answer(model, ids, past, reused)[0] == expected


# ---- layer by layer


def test_a_layer_is_loaded_while_the_one_before_is_used_and_stored_when_it_is_done(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    move, update = PagedLayers.move_layer, PagedLayer.update

    def moved(self: Any, layer: int, obj: Any, slots: Any, way: Any, major: bool) -> None:
        seen.append(f"{'load' if way is TransferDirection.H2D else 'store'} {layer}")
        move(self, layer, obj, slots, way, major)

    def updated(self: Any, *states: Any, **more: Any) -> Any:
        found = update(self, *states, **more)
        seen.append(f"use {self._index}")
        return found

    monkeypatch.setattr(PagedLayers, "move_layer", moved)
    monkeypatch.setattr(PagedLayer, "update", updated)
    ids = prompt(CHUNK + 1, seed=8)
    with opened(model, True) as cache, torch.no_grad():
        with cache.request(ids) as (past, _):
            model(input_ids=ids, past_key_values=past)
            assert seen == ["store 0", "use 0", "store 1", "use 1", "store 2", "use 2"]
            assert cache.engine.status()["stored_tokens"] == 0
            model(input_ids=ids[:, :1], past_key_values=past)
            assert cache.engine.status()["stored_tokens"] == CHUNK  # with the next step
        seen.clear()
        with cache.request(ids) as (past, reused):
            model(input_ids=ids[:, reused:], past_key_values=past)
            assert cache.engine.status()["live_objects"] == 0  # the last layer waits for the load's end
        assert seen == ["load 0", "load 1", "use 0", "load 2", "use 1", "use 2"]


# ---- what goes wrong


class Stop(Exception):
    pass


@pytest.mark.parametrize(("layerwise", "at"), [(False, 1), *((True, layer) for layer in range(LAYERS))])
@pytest.mark.parametrize("kept", [0, 2])
def test_an_exception_between_layers_stores_nothing_and_holds_nothing(
    model: Any, layerwise: bool, at: int, kept: int
) -> None:
    ids = prompt(3 * CHUNK, seed=9)

    def stop(*_: Any) -> None:
        raise Stop

    with opened(model, layerwise) as cache:
        if kept:
            ask(cache, model, ids[:, : kept * CHUNK])
        given: list[Any] = []

        def use() -> None:
            with cache.request(ids) as (past, reused):
                given.extend([past, reused])
                answer(model, ids, past, reused)

        hook = model.model.layers[at].mlp.register_forward_hook(stop)
        with pytest.raises(Stop):
            use()
        hook.remove()
        past, reused = given
        assert reused == kept * CHUNK
        assert past.get_seq_length() == 0
        status = cache.engine.status()
        assert (status["live_objects"], status["l1"]["reserved_bytes"]) == (0, 0)
        assert known(cache, ids) == kept * CHUNK
        expected = answer(model, ids)[0]
        assert answer(model, ids, past)[0] == expected
        assert ask(cache, model, ids)[:2] == (expected, kept * CHUNK)


@BOTH
def test_what_some_layers_lack_is_not_stored(model: Any, layerwise: bool) -> None:
    ids = prompt(2 * CHUNK, seed=14)

    def stop(*_: Any) -> None:
        raise Stop

    with opened(model, layerwise) as cache:
        ask(cache, model, ids[:, :CHUNK])
        hook = model.model.layers[1].mlp.register_forward_hook(stop)
        with cache.request(ids) as (past, reused):
            with pytest.raises(Stop):
                answer(model, ids, past, reused)
        hook.remove()
        assert known(cache, ids) == CHUNK
        assert ask(cache, model, ids)[:2] == (answer(model, ids)[0], CHUNK)


@BOTH
def test_more_than_a_prompt_and_its_room_may_come_at_once(model: Any, layerwise: bool) -> None:
    ids = prompt(3 * CHUNK, seed=15)
    with opened(model, layerwise) as cache:
        with cache.request(ids[:, :CHUNK], new_tokens=0) as (past, _):
            assert answer(model, ids, past)[0] == answer(model, ids)[0]
        assert known(cache, ids) == CHUNK


@pytest.mark.parametrize("way", ["H2D", "D2H"])
def test_a_connector_that_fails_between_layers_holds_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    ids, move = prompt(2 * CHUNK + 1, seed=10), PagedLayers.move_layer

    def fails(self: Any, layer: int, obj: Any, slots: Any, which: Any, major: bool) -> None:
        if layer == 1 and which.name == way:
            raise Stop
        move(self, layer, obj, slots, which, major)

    with opened(model, True) as cache:
        expected = ask(cache, model, ids[:, :CHUNK])[0] and answer(model, ids)[0]
        with monkeypatch.context() as patch:
            patch.setattr(PagedLayers, "move_layer", fails)
            with pytest.raises(Stop):
                ask(cache, model, ids)
        assert ask(cache, model, ids)[:2] == (expected, CHUNK)


@BOTH
@pytest.mark.parametrize("kept", [0, CHUNK])
def test_a_prompt_that_was_cut_and_written_over_is_not_stored(model: Any, layerwise: bool, kept: int) -> None:
    ids, other = prompt(2 * CHUNK, seed=11), prompt(2 * CHUNK, seed=12)
    with opened(model, layerwise) as cache, torch.no_grad():
        with cache.request(ids) as (past, _):
            model(input_ids=ids[:, :-1], past_key_values=past)
            past.crop(kept - (2 * CHUNK - 1))
            assert past.get_seq_length() == kept
            model(input_ids=other[:, kept:], past_key_values=past)
        assert known(cache, ids) == 0
        assert ask(cache, model, ids)[0] == answer(model, ids)[0]


@BOTH
def test_no_room_in_memory_is_a_miss(model: Any, layerwise: bool) -> None:
    wide = make_model(head_dim=128, num_key_value_heads=4)
    ids = prompt(8 * CHUNK + 1, seed=13)
    with opened(wide, layerwise, max_local_cpu_size=1 / 1024) as cache:
        expected = answer(wide, ids)[0]
        first = ask(cache, wide, ids)[:2]
        tokens, reused, _ = ask(cache, wide, ids)
        assert first == (expected, 0)
        assert tokens == expected
        assert 0 < reused < 8 * CHUNK
        assert cache.engine.status()["no_room_chunks"] > 0


# ---- never a crossed hit


def eager() -> Any:
    model = make_model()
    model.set_attn_implementation("eager")
    return model


CROSSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dtype": (lambda: make_model().to(torch.bfloat16), {}, {}),
    "weights": (lambda: make_model(seed=1), {}, {}),
    "configuration": (lambda: make_model(rms_norm_eps=1e-3), {}, {}),
    "attention": (eager, {}, {}),
    "revision": (make_model, {"revision": "mine"}, {}),
    "configured revision": (make_model, {}, {"extra_config": {"model_revision": "mine"}}),
    "salt": (make_model, {"salt": "tenant"}, {}),
    "tags": (make_model, {"tags": {"k": "v"}}, {}),
}


@pytest.mark.parametrize("what", CROSSED)
def test_nothing_is_shared_across(model: Any, what: str, tmp_path: Path) -> None:
    make, options, changes = CROSSED[what]
    layerwise = list(CROSSED).index(what) % 2 == 0
    ids, disk = prompt(2 * CHUNK + 1, seed=20), on_disk(tmp_path)
    with opened(model, layerwise, **disk) as cache:
        ask(cache, model, ids)
    stranger = make()
    with opened(stranger, layerwise, options, **disk, **changes) as other:
        assert ask(other, stranger, ids)[1] == 0
    with opened(make(), layerwise, options, **disk, **changes) as again:
        assert known(again, ids) == 2 * CHUNK
    with opened(make_model(), layerwise, **disk) as twin:
        assert known(twin, ids) == 2 * CHUNK


@BOTH
@pytest.mark.parametrize("change", ["in place", "training"])
def test_a_model_that_changed_since_runs_uncached(layerwise: bool, change: str) -> None:
    model, ids = make_model(seed=2), prompt(2 * CHUNK, seed=21)
    with opened(model, layerwise) as cache:
        ask(cache, model, ids)
        assert known(cache, ids) == 2 * CHUNK - 1
        stored = cache.engine.status()["stored_tokens"]
        if change == "training":
            model.train()
        else:
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
        assert ask(cache, model, ids)[1] == 0
        assert ask(cache, model, prompt(2 * CHUNK, seed=22))[1] == 0
        assert cache.engine.status()["stored_tokens"] == stored


@BOTH
def test_weights_that_change_within_a_request_are_not_stored(layerwise: bool) -> None:
    model, ids = make_model(seed=3), prompt(2 * CHUNK, seed=23)
    with opened(model, layerwise) as cache:
        with cache.request(ids) as (past, _), torch.no_grad():
            model.lm_head.weight.mul_(2)
            model(input_ids=ids, past_key_values=past)
        cache.save(ids, past)
        assert cache.engine.status()["stored_tokens"] == 0


# ---- refusals


def test_settings_that_cannot_be_served_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="use_gpu_connector_v3=True: expected it off"):
        InProcessCache(config(False, extra_config={"use_gpu_connector_v3": True}), model)
    vouched = config(False, extra_config={"model_revision": "one"})
    with pytest.raises(ConfigError, match=r"revision='two': extra_config model_revision is 'one'"):
        InProcessCache(vouched, model, revision="two")


def test_a_model_with_a_sliding_window_is_refused() -> None:
    sliding = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(LayoutError, match="layer 0 caches in DynamicSlidingWindowLayer"):
        InProcessCache(config(False), transformers.MistralForCausalLM(sliding))


def test_what_is_not_one_sequence_without_gradients_is_refused(model: Any) -> None:
    ids = prompt(CHUNK, seed=30)
    with opened(model, False) as cache:
        with pytest.raises(ConfigError, match=r"\[2, 16\]: expected one sequence"):
            cache.generate(torch.cat([ids, ids]))
        with pytest.raises(ConfigError, match="num_beams=4: expected 1"):
            cache.generate(ids, num_beams=4)
        with pytest.raises(LayoutError, match="expected one sequence in this cache"), torch.no_grad():
            with cache.request(ids) as (past, _):
                model(input_ids=torch.cat([ids, ids]), past_key_values=past)
        with pytest.raises(ConfigError, match=r"K needs gradients.*torch\.no_grad"):
            with cache.request(ids) as (past, _):
                model(input_ids=ids, past_key_values=past)


def test_a_second_request_and_a_foreign_cache_are_refused(model: Any) -> None:
    ids = prompt(CHUNK, seed=31)
    with opened(model, True) as cache:
        with cache.request(ids) as (past, _):
            for use in (lambda: cache.generate(ids), lambda: cache.save(ids, past)):
                with pytest.raises(ConfigError, match="a request is under way: expected one at a time"):
                    use()
        with pytest.raises(
            LayoutError, match="layer 0 of DynamicCache is DynamicLayer, expected a cache that"
        ):
            cache.save(ids, DynamicCache(config=model.config))


def test_a_closed_cache_and_a_prompt_of_one_token_are_misses(model: Any) -> None:
    ids = prompt(2 * CHUNK, seed=32)
    for layerwise in (False, True):
        with opened(model, layerwise, save_unfull_chunk=True) as cache:
            expected = ask(cache, model, ids)[0]
            assert [ask(cache, model, ids[:, :1])[1] for _ in range(2)] == [0, 0]
        assert ask(cache, model, ids)[:2] == (expected, 0)
