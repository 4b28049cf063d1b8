"""Where a verb's tokens come from: a list, a file, or a text and something that tokenizes it."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from lmcache.errors import ConfigError, LMCacheError, StartupError

_MAX_TOKEN = (1 << 32) - 1
_SOURCES = ("tokens", "tokens_file", "text")


def add_token_source(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--tokens", metavar="1,2,3", help="token ids")
    parser.add_argument(
        "--tokens-file",
        metavar="FILE",
        help="file of token ids: a JSON list, or numbers apart; - is standard input",
    )
    parser.add_argument("--text", help="a prompt, to be tokenized with --tokenizer or --engine-url")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or a model's folder with one (needs the package tokenizers)",
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="a running vLLM that tokenizes the text as it does prompts"
    )
    parser.add_argument("--model", help="the model to ask of --engine-url (the one that it serves)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key of --engine-url"
    )


def read_tokens(args: argparse.Namespace) -> list[int]:
    """The token ids that the flags name.

    Raises:
        ConfigError: if they name none, several sources, or something that is no token id.
        StartupError: if the package for it is missing.
        LMCacheError: if the text cannot be tokenized.
    """
    given = [name for name in _SOURCES if getattr(args, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none"
        raise ConfigError(f"prompt given by {found}: expected exactly one of --tokens, --tokens-file, --text")
    if args.text is not None:
        return _tokenize(args)
    if (args.tokenizer, args.engine_url) != (None, None):
        raise ConfigError("--tokenizer and --engine-url: expected with --text only")
    if args.tokens is not None:
        return parse_tokens(args.tokens, "--tokens")
    return parse_tokens(_read(args.tokens_file), f"--tokens-file {args.tokens_file}")


def parse_tokens(text: str, source: str) -> list[int]:
    """Token ids from a JSON list, or from numbers with blanks or commas between them.

    Raises:
        ConfigError: if there is none, or one is no whole number within 0..2**32-1.
    """
    items: Iterable[object]
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{source}: {exc}: expected a JSON list of token ids") from None
    else:
        items = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    tokens = [_token(item, source) for item in items if item != ""]
    if not tokens:
        raise ConfigError(f"{source}: expected at least one token id, found none")
    return tokens


def _token(item: object, source: str) -> int:
    if isinstance(item, str) and item.isascii() and item.isdigit() and len(item) <= len(str(_MAX_TOKEN)):
        item = int(item)
    if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _MAX_TOKEN:
        raise ConfigError(
            f"{source}: {str(item)[:40]!r}: expected token ids, whole numbers within 0..{_MAX_TOKEN}"
        )
    return item


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--tokens-file {name}: cannot be read ({exc.strerror})") from None
    except ValueError:  # not UTF-8, or a name with a NUL
        raise ConfigError(f"--tokens-file {name}: expected a text file") from None


def _tokenize(args: argparse.Namespace) -> list[int]:
    if (args.tokenizer is None) == (args.engine_url is None):
        raise ConfigError("--text: expected with exactly one of --tokenizer PATH, --engine-url URL")
    if not _is_text(args.text):
        raise ConfigError("--text: expected UTF-8")
    if args.tokenizer is not None:
        return _with_tokenizer(args.text, args.tokenizer)
    from lmcache.cli.engine_http import Engine

    engine = Engine(args.engine_url, args.timeout, "--engine-url", args.api_key_env)
    answer = engine.json("POST", "/tokenize", {"model": args.model or engine.model(), "prompt": args.text})
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise LMCacheError(f"{engine.url}/tokenize: answers without tokens; is it a vLLM server?")
    return [_token(token, f"{engine.url}/tokenize") for token in tokens]


def _with_tokenizer(text: str, name: str) -> list[int]:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise StartupError("--tokenizer: needs the package tokenizers; pip install tokenizers") from None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except OSError as exc:
        raise ConfigError(f"--tokenizer {path}: cannot be read ({exc.strerror})") from None
    except Exception as exc:  # the package raises plain Exception
        raise ConfigError(f"--tokenizer {path}: {exc}: expected a tokenizer.json") from None
    return [int(token) for token in tokenizer.encode(text).ids]


def _is_text(text: str) -> bool:
    """False for what the command line held that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
