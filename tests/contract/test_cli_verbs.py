"""The verbs that ask: of a real server, of a scripted engine, and of what is neither."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.server import (
    RunningServer,
    Worker,
    channel_to,
    hello,
    mapped,
    namespace,
    refused,
    run_cli,
    running_server,
)
from helpers.stubs import StubEngine, stub_engine, stub_server
from lmcache.cli.main import main
from lmcache.integration.vllm.identity import lora_identity
from lmcache.v1.protocol import messages as m

TOKENS = list(range(700))
LIST = ",".join(map(str, TOKENS))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that holds two chunks of model A, and of model B, on two ranks with two groups, one."""
    with running_server() as running:
        with Worker(running.address, [namespace("A")], engine="a") as worker:
            worker.store(TOKENS)
            worker.store(TOKENS, salt="s", tags={"team": "x"})
        for rank, length in ((0, 700), (1, 300)):
            groups = [namespace("B", group=g, groups=2, tp_rank=rank, tp_size=2) for g in (0, 1)]
            with Worker(running.address, groups, engine="b", rank=rank, ranks=2) as worker:
                worker.store(TOKENS[:length])
        half = [namespace("C", tp_rank=0, tp_size=2)]
        with Worker(running.address, half, engine="c", ranks=2) as worker:
            worker.store(TOKENS)
        yield running


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with stub_engine() as stub:
        yield stub


class Command:
    """Runs a verb in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def ok(self, *argv: str) -> str:
        assert main(argv) == 0, self._capsys.readouterr().err
        out, err = self._capsys.readouterr()
        assert err == ""
        return out

    def json(self, *argv: str) -> dict[str, Any]:
        out = self.ok(*argv, "--format", "json")
        assert out.count("\n") == 1
        return dict(json.loads(out))

    def fails(self, *argv: str) -> str:
        assert main(argv) == 1
        out, err = self._capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1, err
        return err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


# ---- ping, describe


def test_ping_says_version_epoch_and_round_trip(server: RunningServer, cli: Command) -> None:
    told = cli.json("ping", "--host", server.address)
    assert set(told) == {"address", "version", "protocol", "epoch", "chunk_size", "round_trip_ms"}
    assert (told["address"], told["chunk_size"], told["protocol"]) == (server.address, 256, m.PROTOCOL)
    assert 0 < told["round_trip_ms"] < 1000
    text = cli.ok("ping", "--host", "127.0.0.1", "--port", str(server.port))
    assert text.startswith(f"{server.address}: lmcache ")
    assert told["epoch"] in text
    assert "round trip" in text


def test_describe_lists_who_is_connected_and_how_but_not_itself(server: RunningServer, cli: Command) -> None:
    with ExitStack() as stack:
        stack.enter_context(Worker(server.address, [namespace("A")], engine="by-frame"))
        stack.enter_context(mapped(server.address, engine="by-memory"))
        hello(stack.enter_context(channel_to(server.address)), client="another tool")
        told = cli.json("describe", "--host", server.address)
        text = cli.ok("describe", "--host", server.address)
    workers = {s["engine"]: (s["rank"], s["path"]) for s in told["sessions"] if s["role"] == "worker"}
    assert workers == {"by-frame": (0, "frames"), "by-memory": (0, "shared_memory")}
    assert [s["client"] for s in told["sessions"] if s["role"] == "tool"] == ["another tool"]
    assert (told["l1"]["policy"], told["chunk_size"], told["shared_memory"]) == ("ARC", 256, True)
    assert told["l1"]["objects"] == 2 + 2 + 2 * (2 + 1) + 2
    rows = [line.split()[:4] for line in text.splitlines()]
    assert ["worker", "by-frame", "0", "frames"] in rows
    assert ["worker", "by-memory", "0", "shared_memory"] in rows
    assert "L1 policy       ARC" in text
    assert "chunk size      256 tokens" in text


def test_describe_says_when_nobody_is_there(cli: Command) -> None:
    with running_server("--shm", "off", "--eviction-policy", "noop") as running:
        text = cli.ok("describe", "--host", running.address)
    assert text.endswith("nobody is connected\n")
    assert "L1 policy       noop" in text
    assert "shared memory   no" in text


def test_a_session_of_a_command_ends_with_it(server: RunningServer, cli: Command) -> None:
    before = server.metrics()["lmcache_mp_sessions"]
    for _ in range(3):
        cli.ok("ping", "--host", server.address)
    assert server.metrics()["lmcache_mp_sessions"] <= before


# ---- query kvcache


def held(told: dict[str, Any]) -> dict[str, int]:
    return {model["model"]: model["tokens"] for model in told["models"]}


def test_a_model_s_tokens_are_the_least_of_its_ranks_and_groups(server: RunningServer, cli: Command) -> None:
    told = cli.json("query", "kvcache", "--host", server.address, "--tokens", LIST)
    assert (told["tokens"], told["chunk_size"], told["complete_chunks"]) == (700, 256, 2)
    assert held(told) == {"A": 512, "B": 256, "C": 0}
    assert {model["model"]: model["complete"] for model in told["models"]} == {
        "A": True,
        "B": True,
        "C": False,
    }
    assert {model["tier"] for model in told["models"]} == {"L1"}
    assert [s["chunks"] for model in told["models"] if model["model"] == "B" for s in model["shares"]] == [
        2,
        2,
        1,
        1,
    ]


def test_the_table_names_model_tier_and_tokens(server: RunningServer, cli: Command) -> None:
    lines = cli.ok("query", "kvcache", "--host", server.address, "--tokens", LIST).splitlines()
    assert lines[0] == f"{server.address}: asked for 700 tokens, 2 complete chunks of 256"
    assert lines[1].split("  ")[0] == "model"
    assert lines[2].split() == ["A", "r1", "float32", "TP", "1,", "PP", "1,", "groups", "1", "L1", "512", "-"]
    assert lines[4].endswith("not all ranks have registered")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (TOKENS[:256], 256),
        (TOKENS[:255], 0),
        ([*TOKENS[:255], 9, *TOKENS[256:]], 0),
        ([*TOKENS[:256], *[9] * 256], 256),
    ],
)
def test_only_the_common_prefix_in_whole_chunks_counts(
    server: RunningServer, cli: Command, tokens: list[int], expected: int, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps(tokens))
    told = cli.json("query", "kvcache", "--host", server.address, "--tokens-file", str(file))
    assert held(told)["A"] == expected


def test_salt_tag_and_adapter_are_part_of_what_is_asked(
    server: RunningServer, cli: Command, tmp_path: Path
) -> None:
    ask = ("query", "kvcache", "--host", server.address, "--tokens", LIST)
    assert held(cli.json(*ask, "--salt", "s"))["A"] == 0
    assert held(cli.json(*ask, "--salt", "s", "--tag", "team=x"))["A"] == 512
    assert held(cli.json(*ask, "--salt", "s", "--tag", "team=y"))["A"] == 0

    class Adapter:
        lora_name, lora_path = "name", str(tmp_path)

    with Worker(server.address, [namespace("D")], engine="d") as worker:
        worker.store(TOKENS[:256], lora=lora_identity(Adapter))
    assert held(cli.json(*ask, "--lora", f"name={tmp_path}"))["D"] == 256
    assert held(cli.json(*ask, "--lora", f"other={tmp_path}"))["D"] == 0
    assert held(cli.json(*ask, "--lora", lora_identity(Adapter)))["D"] == 256


def test_asking_changes_nothing(server: RunningServer, cli: Command) -> None:
    before = server.state()["l1"]
    cli.ok("query", "kvcache", "--host", server.address, "--tokens", LIST)
    assert server.state()["l1"] == before


def test_a_server_without_models_says_so(cli: Command) -> None:
    with running_server() as running:
        text = cli.ok("query", "kvcache", "--host", running.address, "--tokens", "1")
    assert text.splitlines()[1] == "no engine has registered a model with this server since it started"


def test_tokens_may_come_on_standard_input(server: RunningServer) -> None:
    command = ("query", "kvcache", "--host", server.address, "--tokens-file", "-", "--format", "json")
    done = run_cli(*command, stdin=None, input=" ".join(map(str, TOKENS)))
    assert held(json.loads(done.stdout))["A"] == 512


def test_a_text_is_tokenized_by_the_engine(server: RunningServer, cli: Command, engine: StubEngine) -> None:
    engine.set_json("/tokenize", {"count": 700, "tokens": TOKENS})
    ask = ("query", "kvcache", "--host", server.address, "--text", "hi", "--engine-url")
    assert held(cli.json(*ask, f"{engine.url}/v1/"))["A"] == 512
    assert engine.requests[-1][1:2] + engine.requests[-1][3:] == (
        "/tokenize",
        {"model": "stub", "prompt": "hi"},
    )
    assert held(cli.json(*ask, engine.url, "--model", "m"))["A"] == 512
    assert engine.requests[-1][3]["model"] == "m"
    engine.set_json("/tokenize", {"count": 700})
    assert "/tokenize: answers without tokens; is it a vLLM server?" in cli.fails(*ask, engine.url)
    engine.set_json("/v1/models", {"data": [{"id": "m1"}, {"id": "m2"}]})
    assert "serves m1, m2: expected one; name it with --model" in cli.fails(*ask, engine.url)


# ---- what is no server of this protocol


def test_a_server_of_another_protocol_is_named_as_such(cli: Command) -> None:
    text = (
        "client speaks protocol 1..1, this server (lmcache 9.0) 7..9; install matching versions on both sides"
    )
    error = m.encode(m.Error(code="protocol", message=text))
    with stub_server(lambda _: error) as address:
        for verb in (("ping",), ("describe",), ("query", "kvcache", "--tokens", "1")):
            line = cli.fails(*verb, "--host", address)
            assert f"the server at {address} refuses: {text} (protocol)" in line


@pytest.mark.parametrize(
    "reply",
    [m.encode(m.Ok()), b"\xc1", b"", m.encode(m.Pong(epoch="", known=True, chunk_size=1, version=""))],
)
def test_an_answer_of_the_wrong_kind_is_one_line(cli: Command, reply: bytes) -> None:
    with stub_server(lambda _: reply) as address:
        line = cli.fails("ping", "--host", address)
    assert address in line


def test_silence_ends_with_the_time_limit(cli: Command) -> None:
    with stub_server(lambda _: None) as address:
        began = time.monotonic()
        line = cli.fails("ping", "--host", address, "--timeout", "0.3")
    assert f"no cache server answers at {address} within 0.3 s (Hello: no answer" in line
    assert time.monotonic() - began < 10


# ---- query engine


def event(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 900, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 768}},
}
ASK = ("query", "engine", "--prompt", "hi", "--url")


def test_a_completion_is_timed_to_its_first_token_and_its_end(cli: Command, engine: StubEngine) -> None:
    engine.set_events(
        "/v1/completions", event(""), 0.2, event("Hel"), 0.2, ": comment\n\n", event("lo", "stop"), USAGE
    )
    told = cli.json(*ASK, engine.url, "--max-tokens", "7")
    assert 200 <= told["ttft_ms"] < told["total_ms"]
    assert told["total_ms"] >= 400
    assert told | {"ttft_ms": 0, "total_ms": 0} == {
        "url": engine.url, "model": "stub", "ttft_ms": 0, "total_ms": 0, "prompt_tokens": 900,
        "completion_tokens": 2, "cached_tokens": 768, "finish_reason": "stop", "text": "Hello",
    }  # fmt: skip
    body = engine.requests[-1][3]
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("stub", "hi", 7, True)


def test_the_text_shows_what_was_reused(cli: Command, engine: StubEngine) -> None:
    engine.set_events("/v1/completions", event("a\x1b[1mb"), USAGE)
    text = cli.ok(*ASK, engine.url)
    assert "cached tokens        768" in text
    assert "text                 a\\x1b[1mb" in text
    engine.set_events("/v1/completions", event("a"))
    assert "cached tokens        not reported" in cli.ok(*ASK, engine.url)


def test_prompt_file_model_and_key_reach_the_engine(
    cli: Command, engine: StubEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.set_events("/v1/completions", event("x"))
    file = tmp_path / "prompt"
    file.write_text("línea\n", encoding="utf-8")
    monkeypatch.setenv("LMC_TEST_KEY", "secret")
    flags = ("--model", "m", "--api-key-env", "LMC_TEST_KEY")
    cli.ok("query", "engine", "--prompt-file", str(file), "--url", engine.url, *flags)
    ((_, path, headers, body),) = engine.requests
    assert (path, body["model"], body["prompt"]) == ("/v1/completions", "m", "línea\n")
    assert headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            (400, "application/json", ['{"error": {"message": "prompt too\\nlong"}}']),
            "HTTP 400 Bad Request: prompt too long",
        ),
        ((500, "text/html", ["<h1>Oops</h1>"]), "HTTP 500 Internal Server Error: <h1>Oops</h1>"),
        ((200, "application/json", ["{}"]), "answers with application/json: expected text/event-stream"),
        ((200, "text/event-stream", ["data: {]\n\n"]), "expected a JSON object"),
        ((200, "text/event-stream", ["data: " + "[" * 100000 + "\n\n"]), "expected a JSON object"),
        ((200, "text/event-stream", ['data: {"choices": 3}\n\n']), "expected an OpenAI completion event"),
        ((200, "text/event-stream", ['data: {"error": {"message": "dead"}}\n\n']), "/v1/completions: dead"),
        ((200, "text/event-stream", ['data: {"choices": []}\n\n']), "the stream ended before its [DONE]"),
        ((200, "text/event-stream", ["data: [DONE]\n\n"]), "the completion has no text"),
        ((302, "text/html", [""]), "HTTP 302 Found"),
    ],
)
def test_an_engine_s_fault_is_one_line(cli: Command, engine: StubEngine, answer: Any, text: str) -> None:
    engine.answers["/v1/completions"] = answer
    line = cli.fails(*ASK, engine.url)
    assert f"{engine.url}/v1/completions" in line
    assert text in line


def test_an_engine_that_never_ends_is_left_in_time(cli: Command, engine: StubEngine) -> None:
    engine.set_events("/v1/completions", *[chunk for _ in range(15) for chunk in (event("x"), 0.1)])
    began = time.monotonic()
    line = cli.fails(*ASK, engine.url, "--timeout", "0.5")
    assert "no complete answer within 0.5 s" in line
    assert time.monotonic() - began < 1.4
    engine.set_events("/v1/completions", 1.5)
    assert "no complete answer within 0.2 s" in cli.fails(*ASK, engine.url, "--timeout", "0.2")


def test_what_is_no_http_server_is_one_line(server: RunningServer) -> None:
    line = refused(
        run_cli("query", "engine", "--prompt", "a", "--url", f"127.0.0.1:{server.port}", "--timeout", "2"), 1
    )
    assert f"http://127.0.0.1:{server.port}/v1/models: " in line
