"""``lmcache query engine``: one completion, timed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from lmcache.cli.args import add_format, at_least, seconds
from lmcache.cli.engine_http import Engine
from lmcache.cli.output import clean, duration, emit, pairs
from lmcache.errors import ConfigError, LMCacheError

HELP = "time one completion of an OpenAI-compatible engine"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the engine (http://127.0.0.1:8000)")
    parser.add_argument("--model", help="the model to ask (the one that it serves)")
    parser.add_argument("--prompt", help="the prompt")
    parser.add_argument("--prompt-file", metavar="FILE", help="a file with the prompt")
    parser.add_argument("--max-tokens", type=at_least(1), default=16, help="tokens to generate at most (16)")
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds for the whole completion (60)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Stream one greedy completion; print when its first token came, when it ended, and what it cost."""
    prompt = _prompt(args)
    engine = Engine(args.url, args.timeout, key_variable=args.api_key_env)
    model = args.model or engine.model()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found = _complete(engine, body)
    data = {"url": engine.url, "model": model, **found}
    emit(args.format, data, _text(data))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if (args.prompt is None) == (args.prompt_file is None):
        raise ConfigError("prompt: expected exactly one of --prompt, --prompt-file")
    if args.prompt is not None:
        return str(args.prompt)
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--prompt-file {args.prompt_file}: cannot be read ({exc.strerror})") from None
    except ValueError:
        raise ConfigError(f"--prompt-file {args.prompt_file}: expected UTF-8 text") from None


def _complete(engine: Engine, body: dict[str, object]) -> dict[str, object]:
    text, finish, first = "", None, None
    usage = _Usage()
    began = time.perf_counter()
    for raw in engine.events("/v1/completions", body):
        try:
            event = msgspec.convert(raw, _Event)
        except msgspec.ValidationError as exc:
            raise LMCacheError(
                f"{engine.url}/v1/completions: {exc}: expected an OpenAI completion event"
            ) from None
        usage = event.usage or usage
        for choice in event.choices:
            if choice.text and first is None:
                first = time.perf_counter() - began
            text += choice.text or ""
            finish = choice.finish_reason or finish
    total = time.perf_counter() - began
    if first is None:
        raise LMCacheError(
            f"{engine.url}/v1/completions: the completion has no text (finish reason: {finish})"
        )
    return {
        "ttft_ms": round(first * 1e3, 3),
        "total_ms": round(total * 1e3, 3),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens,
        "finish_reason": finish,
        "text": text,
    }


def _text(data: dict[str, Any]) -> str:
    cached = data["cached_tokens"]
    return pairs(
        [
            ("engine", f"{data['url']}, model {data['model']}"),
            ("time to first token", duration(data["ttft_ms"] / 1e3)),
            ("total time", duration(data["total_ms"] / 1e3)),
            ("prompt tokens", data["prompt_tokens"]),
            (
                "cached tokens",
                "not reported (vLLM: --enable-prompt-tokens-details)" if cached is None else cached,
            ),
            ("generated tokens", data["completion_tokens"]),
            ("finish reason", data["finish_reason"]),
            ("text", clean(data["text"])),
        ]
    )
