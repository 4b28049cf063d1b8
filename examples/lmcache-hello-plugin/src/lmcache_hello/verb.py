"""``lmcache hello``: a verb is an object with HELP, ``add`` and ``run``; a module will do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import lmcache
from lmcache.errors import ConfigError
from lmcache.v1.plugins import hookimpl

HELP = "greet somebody"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--name", default="world", help="whom to greet (world)")


def run(args: argparse.Namespace) -> int:
    """Do it. An error of LMCache's kind becomes one line on standard error and its exit code."""
    if not args.name.strip():
        raise ConfigError(f"--name {args.name!r}: expected a name; leave it out to greet the world")
    print(f"hello {args.name}, from lmcache {lmcache.__version__}")
    return 0


@hookimpl
def lmcache_cli_verbs() -> Mapping[str, Any]:
    """The entry point ``cli.hello`` announces this name."""
    return {"hello": sys.modules[__name__]}
