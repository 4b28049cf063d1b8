"""What tells one model, one set of weights, one adapter from another; and which models are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.integration.vllm import identity
from lmcache.integration.vllm.identity import (
    attention_windows,
    check_supported,
    lora_identity,
    media_by_content,
    model_revision,
)
from lmcache.v1.utils.weights import folder_state, weights_fingerprint

LARGE = 3 << 20
"""Bytes of a weights file too large to be read in full."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (LARGE // 256))
    (folder / "README.md").write_text("a model")
    return folder


def keep_time(path: Path, data: bytes) -> None:
    """Write, but leave the modification time as it was."""
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# ---------------------------------------------------------------------------------------------------- weights


def test_the_same_files_give_the_same_fingerprint(model: Path) -> None:
    assert weights_fingerprint(model) == weights_fingerprint(str(model))
    assert len(weights_fingerprint(model)) == 64


@pytest.mark.parametrize("where", [0, LARGE // 2, LARGE - 1])
def test_new_bytes_in_a_weights_file_give_another_fingerprint(model: Path, where: int) -> None:
    path = model / "model.safetensors"
    before, data = weights_fingerprint(model), bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert weights_fingerprint(model) != before


def test_new_bytes_under_the_old_time_are_found_at_either_end(model: Path) -> None:
    path, before = model / "model.safetensors", weights_fingerprint(model)
    for where in (0, LARGE - 1):
        data = bytearray(path.read_bytes())
        data[where] ^= 1
        keep_time(path, bytes(data))
        assert weights_fingerprint(model) != before
        before = weights_fingerprint(model)


def test_configuration_counts_and_so_do_names_and_folders(model: Path) -> None:
    seen = {weights_fingerprint(model)}
    keep_time(model / "config.json", b'{"layers": 3}')
    seen.add(weights_fingerprint(model))
    (model / "model.safetensors").rename(model / "other.safetensors")
    seen.add(weights_fingerprint(model))
    (model / "part").mkdir()
    (model / "other.safetensors").rename(model / "part" / "other.safetensors")
    seen.add(weights_fingerprint(model))
    assert len(seen) == 4


def test_what_the_weights_do_not_depend_on_does_not_count(model: Path) -> None:
    before = weights_fingerprint(model), folder_state(model)
    (model / "README.md").write_text("the same model, described better")
    (model / ".cache").mkdir()
    (model / ".cache" / "x.json").write_text("{}")
    os.utime(model / "config.json", ns=(1, 1))
    assert weights_fingerprint(model) == before[0]
    (model / "model.safetensors").touch()
    assert folder_state(model) != before[1]


def test_one_file_of_weights_is_a_model_too(model: Path) -> None:
    path = model / "model.safetensors"
    assert weights_fingerprint(path) == weights_fingerprint(path)
    assert weights_fingerprint(path) != weights_fingerprint(model)


def test_a_folder_that_is_not_there_has_no_fingerprint(model: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        weights_fingerprint(model / "missing")


def config(model: str, revision: str | None = None) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(model=model, revision=revision))


def test_a_local_model_s_revision_is_its_content(model: Path) -> None:
    before = model_revision(config(str(model)), "")
    assert before == f"local:{weights_fingerprint(model)}"
    (model / "model.safetensors").write_bytes(b"other weights")
    assert model_revision(config(str(model)), "") != before


def test_what_the_user_says_of_the_revision_counts(model: Path) -> None:
    assert model_revision(config(str(model)), "mine") == "given:mine"


# --------------------------------------------------------------------------------------------------- adapters


@dataclass
class Adapter:
    """The attributes of vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "adapter"
    lora_int_id: int = 1
    load_inplace: bool = False


@pytest.fixture
def adapter(model: Path, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setattr(identity, "_adapters", {})
    return Adapter(str(model))


def test_without_an_adapter_the_identity_is_empty() -> None:
    assert lora_identity(None) == ""


def test_an_adapter_is_known_by_name_path_and_content(adapter: Adapter, tmp_path: Path) -> None:
    first = lora_identity(adapter)
    assert first
    assert lora_identity(Adapter(adapter.lora_path, lora_int_id=7)) == first, (
        "the engine's number means nothing"
    )
    assert lora_identity(Adapter(adapter.lora_path, "other")) != first
    moved = tmp_path / "moved"
    Path(adapter.lora_path).rename(moved)
    assert lora_identity(Adapter(str(moved))) != first
    (moved / "model.safetensors").write_bytes(b"trained further")
    assert lora_identity(Adapter(str(moved), lora_int_id=2)) not in (first, lora_identity(None))


def test_an_adapter_is_read_once_and_not_for_every_request(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lora_identity(adapter)
    monkeypatch.delattr(identity, "weights_fingerprint")
    assert lora_identity(adapter) == first


def test_an_adapter_whose_files_changed_under_a_running_engine_is_neither_the_old_nor_the_new(
    adapter: Adapter,
) -> None:
    first = lora_identity(adapter)
    weights = Path(adapter.lora_path, "model.safetensors")
    weights.write_bytes(b"trained further")
    for _ in range(2):
        with pytest.raises(OSError, match="changed since it was loaded"):
            lora_identity(adapter)
    reloaded = Adapter(adapter.lora_path, load_inplace=True)
    assert lora_identity(reloaded) not in ("", first)
    assert lora_identity(Adapter(adapter.lora_path, lora_int_id=2)) == lora_identity(reloaded)


def test_an_adapter_of_the_hub_is_known_by_its_commit(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--org--adapter" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("1")
    first = lora_identity(Adapter("org/adapter"))
    (refs / "main").write_text("2")
    assert lora_identity(Adapter("org/adapter", lora_int_id=2)) != first


# --------------------------------------------------------------------------------------------- refused models


@dataclass
class FullAttentionSpec:
    tokens_per_state: int = 1


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: list[str] = field(default_factory=lambda: ["layer.0"])
    is_eagle_group: bool = False


def check(*groups: Group, **parallel: int) -> None:
    check_supported(
        SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(pooler_config=None)
        ),
        SimpleNamespace(kv_cache_groups=list(groups)),
    )


def test_attention_with_pages_of_tokens_is_supported() -> None:
    check(Group(FullAttentionSpec()), Group(SlidingWindowSpec()), Group(MLAAttentionSpec()))
    check(Group(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": MLAAttentionSpec()})))
    check(Group(FullAttentionSpec()), decode_context_parallel_size=1)


@pytest.mark.parametrize(
    ("groups", "parallel", "named"),
    [
        ([Group(MambaSpec())], {}, "MambaSpec"),
        ([Group(FullAttentionSpec()), Group(MambaSpec(), ["mixer.3"])], {}, "mixer.3"),
        ([Group(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": MambaSpec()}))], {}, "MambaSpec"),
        ([Group(FullAttentionSpec(tokens_per_state=4))], {}, "FullAttentionSpec"),
        ([Group(FullAttentionSpec(), is_eagle_group=True)], {}, "draft model"),
        ([Group(FullAttentionSpec())], {"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        (
            [Group(FullAttentionSpec())],
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size=2",
        ),
    ],
)
def test_what_would_be_cached_wrongly_is_refused_by_name(
    groups: list[Group], parallel: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check(*groups, **parallel)
    assert "\n" not in str(refused.value)


def test_windows_are_those_whose_pages_the_engine_frees() -> None:
    groups = []
    for kind, window in [(FullAttentionSpec, 64), (SlidingWindowSpec, 48), (SlidingWindowSpec, None)]:
        groups.append(Group(kind()))
        groups[-1].kv_cache_spec.sliding_window = window
    groups.append(Group(SlidingWindowSpec()))
    groups[-1].kv_cache_spec.attention_chunk_size = 32
    assert attention_windows(SimpleNamespace(kv_cache_groups=groups)) == [48, 32]


@pytest.mark.parametrize(
    ("sequence", "token", "supported", "named"),
    [("LAST", None, True, ""), ("MEAN", None, False, "MEAN"), ("LAST", "STEP", False, "LAST, STEP")],
)
def test_a_model_whose_pooling_needs_every_token_is_refused(
    sequence: str, token: str | None, supported: bool, named: str
) -> None:
    """vLLM itself gives it no prefix: a mean over the rest is wrong, and ends the engine."""
    pooler = SimpleNamespace(seq_pooling_type=sequence, tok_pooling_type=token)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(pooler_config=pooler, is_prefix_caching_supported=supported),
    )
    groups = SimpleNamespace(kv_cache_groups=[Group(FullAttentionSpec())])
    if supported:
        check_supported(config, groups)
        return
    with pytest.raises(ConfigError, match=f"pooling {named}:") as refused:
        check_supported(config, groups)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("media", "prefixes", "by_content"),
    [(None, False, True), (4, False, True), (0, True, True), (0, False, False)],
)
def test_media_are_named_by_content_where_vllm_keeps_them_or_caches_prefixes(
    media: float | None, prefixes: bool, by_content: bool
) -> None:
    settings = None if media is None else SimpleNamespace(mm_processor_cache_gb=media)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=settings),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )
    assert media_by_content(config) is by_content
