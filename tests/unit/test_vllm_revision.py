"""What makes two vLLM engines' KV the same, as far as it can be told without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm import identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def engine(download_dir: Path | None = None, **model: Any) -> Any:
    fields = {
        "model": "org/model", "revision": None, "dtype": "float32", "quantization": None,
        "max_model_len": 4096, "hf_config": SimpleNamespace(), "multimodal_config": None,
    } | model  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        load_config=SimpleNamespace(load_format="auto", download_dir=download_dir and str(download_dir)),
        speculative_config=None,
    )


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub cache that holds a commit of org/model's main."""
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    return tmp_path


@pytest.mark.parametrize(
    "other",
    [
        {"max_model_len": 131072},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_resize": False})},
        {"quantization": "fp8"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_setting_that_changes_kv_separates_engines(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    assert identity._model_extra(engine()) == identity._model_extra(engine())
    assert identity._model_extra(engine()) != identity._model_extra(engine(**other))


def test_a_hub_model_s_revision_is_the_commit_in_the_cache_that_vllm_was_told_to_use(hub: Path) -> None:
    assert identity.model_revision(engine(hub), "") == f"hub:{COMMIT}"
    assert identity.model_revision(engine(hub), "mine") == "given:mine"


def test_a_commit_given_as_revision_needs_no_cache(tmp_path: Path) -> None:
    assert identity.model_revision(engine(tmp_path, revision=COMMIT), "") == f"hub:{COMMIT}"


@pytest.mark.parametrize("model", [{"revision": "v2"}, {"model": "org/other"}])
def test_weights_of_which_nobody_knows_the_revision_are_shared_with_no_other_engine(
    hub: Path, caplog: pytest.LogCaptureFixture, model: dict[str, Any]
) -> None:
    unknown = [identity.model_revision(engine(hub, **model), "") for _ in range(2)]
    assert unknown[0] != unknown[1]
    assert "set lmcache.mp.model_revision" in caplog.text


def test_a_folder_s_revision_follows_its_code_and_what_its_links_lead_to(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("model.safetensors", "config.json", "modeling_own.py"):
        (blobs / name).write_text("one")
        (snapshot / name).symlink_to(blobs / name)

    def revision() -> str:
        return identity.model_revision(engine(model=str(snapshot)), "")

    seen = {revision()}
    for name in ("model.safetensors", "config.json", "modeling_own.py"):
        (blobs / name).write_text("two")
        seen.add(revision())
    assert len(seen) == 4
