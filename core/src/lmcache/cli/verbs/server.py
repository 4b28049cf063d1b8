"""``lmcache server``: the cache server."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from lmcache.cli.args import UsageError, add_format, integer, number
from lmcache.cli.output import emit

HELP = "run the cache server"

_TYPES = {int: integer, float: number}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, whose defaults are those of ``ServerConfig``."""
    from lmcache.v1.multiprocess.server.config import FLAGS

    for name, kind, text in FLAGS:
        if kind is list:
            parser.add_argument(f"--{name}", action="append", metavar="JSON", help=text)
        else:
            parser.add_argument(f"--{name}", type=_TYPES.get(kind, kind), help=text)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the one thing printed says where, once everything is ready."""
    from lmcache.v1.multiprocess.server.app import run_server
    from lmcache.v1.multiprocess.server.config import FLAGS, ServerConfig

    if args.l1_size_gb is None:
        raise UsageError("--l1-size-gb: missing, expected GiB of shared memory for L1, e.g. --l1-size-gb 10")
    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, _, _ in FLAGS}
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None
    }
    config = ServerConfig(**fields)
    run_server(config, lambda ready: emit(args.format, asdict(ready), str(ready)))
    return 0
