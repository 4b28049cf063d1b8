"""``lmcache kvcache unpin``: the end of ``kvcache pin``."""

from __future__ import annotations

import argparse

from lmcache.cli.pinning import add_flags as add
from lmcache.cli.pinning import hold

__all__ = ["HELP", "add", "run"]

HELP = "let a pinned prompt go like any other"


def run(args: argparse.Namespace) -> int:
    """What L1 holds of the prompt may be evicted again."""
    return hold(args, False)
