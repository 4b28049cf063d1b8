"""What ``lmcache demo`` promises."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.server import COMMAND, END_SECONDS, refused, run_cli
from lmcache.cli.main import main
from lmcache.cli.verbs import demo

SHORT = ("--tokens", "600")


@pytest.fixture
def engine_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch and transformers were there."""
    monkeypatch.setattr(demo, "_NEEDS", ())


def fails(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """``lmcache demo --format json`` exits with ``code``; its one line on standard error."""
    assert main(["demo", *SHORT, "--format", "json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("tokens", ["5", "-1", "1000000"])
def test_a_prompt_that_is_too_short_or_too_long_is_one_line(tokens: str) -> None:
    line = refused(run_cli("demo", "--tokens", tokens), 2)
    assert line == f"lmcache demo: --tokens {tokens}: expected 512..32768"


def test_without_an_engine_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_NEEDS", ("no_such_engine",))
    assert fails(capsys, 3).endswith("pip install 'lmcache[transformers]'")


@pytest.mark.usefixtures("engine_installed")
def test_a_server_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_L1_GB_PER_1000_TOKENS", 1e6)
    line = fails(capsys, 3)
    assert line.startswith("lmcache demo: the server did not start: ")
    assert "--l1-size-gb" in line


@pytest.mark.usefixtures("engine_installed")
def test_a_run_that_fails_says_why_in_one_line_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children: list[subprocess.Popen[str]] = []
    child = demo._child

    @contextlib.contextmanager
    def seen(*command: str) -> Iterator[Any]:
        with child(*command) as (process, errors):
            children.append(process)
            yield process, errors

    monkeypatch.setattr(demo, "_child", seen)
    monkeypatch.setattr(demo, "_ENGINE", "lmcache.no_such_engine")
    line = fails(capsys, 1)
    assert line.startswith("lmcache demo: a run failed with exit code 1: ")
    assert "no_such_engine" in line
    assert len(children) == 2
    assert all(process.poll() is not None for process in children)


@pytest.mark.usefixtures("engine_installed")
@pytest.mark.parametrize(("warm", "code", "verdict"), [([1, 2], 0, "yes"), ([1, 3], 1, "no")])
def test_the_exit_code_says_whether_the_tokens_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warm: list[int],
    code: int,
    verdict: str,
) -> None:
    run = {
        "path": "shared_memory", "ttft_s": 2.0, "load_s": 0.1, "save_s": 0.1, "tokens_reused": 512,
        "tokens_stored": 512, "bytes_per_token": 1000, "parameters": 10**7, "answer": [1, 2],
    }  # fmt: skip
    runs = iter([run, run | {"ttft_s": 0.5, "answer": warm}])
    monkeypatch.setattr(demo, "_server", lambda tokens: contextlib.nullcontext("tcp://127.0.0.1:1"))
    monkeypatch.setattr(demo, "_engine", lambda address, tokens: next(runs))
    assert main(["demo", *SHORT]) == code
    assert capsys.readouterr().out.splitlines()[-1] == f"same tokens: {verdict}"


@pytest.mark.torch
@pytest.mark.slow
def test_a_fresh_process_reuses_what_another_stored_and_gives_the_same_tokens() -> None:
    done = run_cli("demo", *SHORT, "--format", "json", timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["same_tokens"] is True
    assert len(set(result["answer_warm"])) > 1
    assert result["tokens_reused"] == 512
    assert result["stored_bytes"] == result["retrieved_bytes"] > 0
    assert result["path"] == "shared_memory"
    assert min(result[k] for k in ("ttft_cold_s", "ttft_warm_s", "store_gb_per_s", "retrieve_gb_per_s")) > 0


@pytest.mark.torch
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_server_behind(signum: int) -> None:
    process = subprocess.Popen([*COMMAND, "demo"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        readable, _, _ = select.select([process.stderr], [], [], 60)
        first = process.stderr.readline() if readable else ""
        process.send_signal(signum)
        out, rest = process.communicate(timeout=END_SECONDS)
    assert (process.returncode, out, rest) == (130, "", ""), first
    port = int(first.partition(";")[0].rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
