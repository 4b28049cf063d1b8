"""``lmcache demo``: what the cache is worth, on this machine, with a real server and a real engine.

A server, then the transformers engine twice, each time in a fresh process: cold, and warm from what the first
stored. All are children of this process and end with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from lmcache.cli.args import UsageError, add_format, integer
from lmcache.cli.output import duration, emit, pairs
from lmcache.errors import LMCacheError, StartupError

HELP = "run a small model without and with cached KV, and compare"

_ENGINE = "lmcache.integration.transformers.demo_engine"
_NEEDS = ("torch", "transformers")
_CHUNK = 256
_TOKENS = (2 * _CHUNK, 32_768)
_L1_GB_PER_1000_TOKENS = 0.02  # the model keeps 16 KiB per token
_READY_SECONDS = 30.0
_RUN_SECONDS = 600.0
_DRAIN_SECONDS = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--tokens", type=integer, default=4000, help="length of the prompt (4000)")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if both runs gave the same tokens.

    Raises:
        UsageError: for a prompt that is too short to reuse, or too long.
        StartupError: if torch or transformers is not installed, or the server cannot start.
        LMCacheError: if a run fails, or the second finds nothing.
    """
    if not _TOKENS[0] <= args.tokens <= _TOKENS[1]:
        raise UsageError(f"--tokens {args.tokens}: expected {_TOKENS[0]}..{_TOKENS[1]}")
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(f"the demo needs {' and '.join(missing)}, not installed here;"
                           " pip install 'lmcache[transformers]'")  # fmt: skip
    with _termination_as_interrupt():
        with _server(args.tokens) as address:
            _say(args, f"server at {address}; first run, cold …")
            cold = _engine(address, args.tokens)
            _say(args, "second run, a fresh process, warm …")
            warm = _engine(address, args.tokens)
    if not warm["tokens_reused"]:
        raise LMCacheError(
            f"the second run found nothing in the cache (the first stored {cold['tokens_stored']} tokens)"
        )
    result = _compare(args.tokens, cold, warm)
    emit(args.format, result, _text(result))
    return 0 if result["same_tokens"] else 1


def _compare(tokens: int, cold: dict[str, Any], warm: dict[str, Any]) -> dict[str, Any]:
    stored, loaded = (n * cold["bytes_per_token"] for n in (cold["tokens_stored"], warm["tokens_reused"]))
    return {
        "tokens": tokens,
        "parameters": cold["parameters"],
        "path": warm["path"],
        "ttft_cold_s": round(cold["ttft_s"], 4),
        "ttft_warm_s": round(warm["ttft_s"], 4),
        "speed_up": round(cold["ttft_s"] / warm["ttft_s"], 2),
        "tokens_reused": warm["tokens_reused"],
        "stored_bytes": stored,
        "store_gb_per_s": round(stored / cold["save_s"] / 1e9, 3),
        "retrieved_bytes": loaded,
        "retrieve_gb_per_s": round(loaded / warm["load_s"] / 1e9, 3),
        "answer_cold": cold["answer"],
        "answer_warm": warm["answer"],
        "same_tokens": cold["answer"] == warm["answer"],
    }


def _text(result: dict[str, Any]) -> str:
    rows = (
        ("model", f"Llama, {result['parameters'] / 1e6:.0f} million random weights, float32, CPU"),
        ("prompt", f"{result['tokens']} tokens"),
        ("TTFT cold", duration(result["ttft_cold_s"])),
        ("TTFT warm", duration(result["ttft_warm_s"])),
        ("speed-up", f"{result['speed_up']:.1f} x"),
        ("tokens reused", f"{result['tokens_reused']} of {result['tokens']}"),
        ("store", f"{result['stored_bytes'] / 1e6:.1f} MB at {result['store_gb_per_s']:.2f} GB/s"),
        ("retrieve", f"{result['retrieved_bytes'] / 1e6:.1f} MB at {result['retrieve_gb_per_s']:.2f} GB/s"),
        ("path", result["path"].replace("_", " ")),
    )
    return f"{pairs(rows)}\nsame tokens: {'yes' if result['same_tokens'] else 'no'}"


def _say(args: argparse.Namespace, text: str) -> None:
    if args.format == "terminal":
        print(text, file=sys.stderr, flush=True)


# ---- children


@contextmanager
def _server(tokens: int) -> Iterator[str]:
    """A server on free ports; yields its address."""
    size = 0.0625 + tokens / 1000 * _L1_GB_PER_1000_TOKENS
    command = [
        "server",
        "--port",
        "0",
        "--http-port",
        "0",
        "--l1-size-gb",
        f"{size:.4f}",
        "--chunk-size",
        str(_CHUNK),
    ]
    with _child("lmcache.cli.main", *command) as (process, errors):
        line = _first_line(process, _READY_SECONDS)
        address = next((word for word in line.split() if word.startswith("tcp://")), "")
        if not address:
            raise StartupError(f"the server did not start: {_last_line(errors) or 'it says nothing'}")
        yield address


def _engine(address: str, tokens: int) -> dict[str, Any]:
    with _child(_ENGINE, address, str(tokens)) as (process, errors):
        try:
            out, _ = process.communicate(timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise LMCacheError(f"a run did not end within {_RUN_SECONDS:g} s; try fewer --tokens") from None
        if process.returncode:
            raise LMCacheError(f"a run failed with exit code {process.returncode}: {_last_line(errors)}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """``python -m module``, and what it writes to standard error. Ended on the way out, whatever the way."""
    import tempfile

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "TRANSFORMERS_VERBOSITY": "error"},
            start_new_session=True,  # Ctrl-C comes to us alone, and we end the children in order
        )
        try:
            yield process, errors
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DRAIN_SECONDS)
    finally:  # also if a second Ctrl-C cuts the waiting short
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_line(process: subprocess.Popen[str], seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while process.stdout is not None and (left := deadline - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            return process.stdout.readline()
    return ""


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1] if lines else ""


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP are like Ctrl-C, so that they, too, leave nothing behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
