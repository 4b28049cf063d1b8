"""``lmcache config show``: what the in-process engine would run with, and who said so."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format
from lmcache.cli.output import emit, table

HELP = "show every setting of the in-process engine, with its source"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--file", metavar="PATH", help="a YAML file (what LMCACHE_CONFIG_FILE names)")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Read file and environment as an engine would; secrets are masked."""
    from lmcache.v1.config import LMCacheEngineConfig, shown

    found = shown(LMCacheEngineConfig.load(args.file))
    rows = [(key, entry["value"], entry["source"]) for key, entry in found.items()]
    emit(args.format, {"settings": found}, table(("KEY", "VALUE", "SOURCE"), rows))
    return 0
