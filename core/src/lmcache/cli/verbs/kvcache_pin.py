"""``lmcache kvcache pin``: keep a prompt in L1."""

from __future__ import annotations

import argparse

from lmcache.cli.pinning import add_flags as add
from lmcache.cli.pinning import hold

__all__ = ["HELP", "add", "run"]

HELP = "keep a prompt in L1 until it is unpinned or the server ends"


def run(args: argparse.Namespace) -> int:
    """What L1 holds of the prompt, for every model that is known, is not evicted any more."""
    return hold(args, True)
