"""Flags: a parser that fails in one line, types that name what they expect, flags that verbs share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lmcache.cli.output import write
from lmcache.errors import ConfigError

FORMATS = ("terminal", "json")
DEFAULT_HOST = "127.0.0.1"
_MAX_SECONDS = 86400.0


class UsageError(ConfigError):
    """The command line is not one that the program offers."""


class Parser(argparse.ArgumentParser):
    """Like argparse's, but every mistake raises :class:`UsageError`, and flags are never abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, whose words differ from Python to Python."""
        if action.choices is not None and value not in action.choices:
            expected = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r}: expected one of {expected}")

    def print_help(self, file: Any = None) -> None:
        """To standard output, whose faults are then reported like those of any other output."""
        write(self.format_help().rstrip())

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """All of ``argv``; what is not known is named, with what it may have been meant for."""
        known, rest = self.parse_known_args(argv)
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            what = "unknown flag" if word.startswith("-") else "unexpected argument"
            close = self._close_to(word)
            hint = f": did you mean {close[0]}?" if close else ";"
            raise UsageError(f"{what} {word!r}{hint} see {self.prog} --help")
        return known

    def _close_to(self, word: str) -> list[str]:
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not word.startswith("--"):
            return []
        return [flag for flag in flags if flag.startswith(word)] or difflib.get_close_matches(word, flags, 1)


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None


def number(text: str) -> float:
    """A number; ``nan`` and ``inf`` are for the caller to judge."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None


def seconds(text: str) -> float:
    """A time limit."""
    value = number(text)
    if not 0 < value <= _MAX_SECONDS:  # also false for nan
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0, at most {_MAX_SECONDS:g}")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from ``least`` on."""

    def parse(text: str) -> int:
        value = integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return value

    return parse


def pair(text: str) -> tuple[str, str]:
    """``key=value``."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    return key, value


def add_format(parser: argparse.ArgumentParser) -> None:
    """``--format``, which every verb has."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="terminal, or json: one object on standard output (terminal)",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is and how long to wait for it."""
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help=f"the server's host, or tcp://HOST:PORT ({DEFAULT_HOST})"
    )
    parser.add_argument("--port", help="the server's request port (5555)")
    parser.add_argument("--timeout", type=seconds, default=2.0, help="seconds to wait for each answer (2)")
