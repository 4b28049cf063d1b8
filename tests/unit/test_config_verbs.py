"""``lmcache config show`` and ``check``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache.cli.main import main


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nremote_url: redis://me:hunter2@h:1\n")
    return file


def test_show_names_the_source_of_every_value_and_masks_secrets(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "128")
    assert main(["config", "show", "--file", str(path), "--format", "json"]) == 0
    out = capsys.readouterr().out
    settings = json.loads(out)["settings"]
    assert settings["chunk_size"] == {"value": 128, "source": "LMCACHE_CHUNK_SIZE"}
    assert settings["remote_url"]["source"] == f"file {path}"
    assert settings["local_cpu"] == {"value": True, "source": "default"}
    assert "hunter2" not in out
    assert main(["config", "show", "--file", str(path)]) == 0
    assert "hunter2" not in capsys.readouterr().out


def test_show_reads_the_file_that_the_variable_names(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    assert main(["config", "show", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["chunk_size"]["value"] == 64


def test_check_says_0_for_a_file_that_an_engine_takes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(path), "--format", "json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["settings"] == ["chunk_size", "remote_url"]
    assert "hunter2" not in out


NO_CONFIGURATION = [
    "chunk_sise: 1",
    "chunk_size: x",
    "enable_p2p: true",
    "[",
    "x: " + 5000 * "[",
    "chunk_size: 64\nchunk_size: 128",
    "remote_url: 'redis://[::1'",
    "l2_adapters: [{type: dsk}]",
    "store_location: nowhere",
    "retrieve_locations: [LocalDiskBackend]",
]


@pytest.mark.parametrize("text", NO_CONFIGURATION, ids=[text[:30] for text in NO_CONFIGURATION])
def test_check_says_2_and_one_line_for_a_file_that_it_does_not(
    path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path.write_text(text)
    assert main(["config", "check", str(path)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("lmcache config check: ")
    assert caught.err.count("\n") == 1
