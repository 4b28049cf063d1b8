"""``lmcache version``."""

from __future__ import annotations

import argparse
import platform

from lmcache.cli.args import add_format
from lmcache.cli.output import emit

HELP = "print the version"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print the version of the package, the protocols that it speaks, and the Python that runs it."""
    import lmcache
    from lmcache.v1.protocol.messages import PROTOCOL, PROTOCOL_MIN

    version, python = lmcache.__version__, platform.python_version()
    data = {"version": version, "protocol_min": PROTOCOL_MIN, "protocol_max": PROTOCOL, "python": python}
    emit(args.format, data, f"lmcache {version}, protocol {PROTOCOL_MIN}..{PROTOCOL}, Python {python}")
    return 0
