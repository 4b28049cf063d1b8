"""``lmcache server``: the cache server."""

from __future__ import annotations

import argparse

HELP = "run the cache server"


def add(parser: argparse.ArgumentParser) -> None:
    """Flags, with the defaults of :class:`ServerConfig`."""
    from lmcache.v1.multiprocess.server.config import FLAGS

    for name, kind, text in FLAGS:
        parser.add_argument(f"--{name}", type=kind, help=text)


def run(args: argparse.Namespace) -> int:
    from lmcache.v1.multiprocess.server.app import run_server
    from lmcache.v1.multiprocess.server.config import FLAGS, ServerConfig

    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, _, _ in FLAGS}
    config = ServerConfig(**{k: v for k, v in given.items() if v is not None})
    run_server(config, lambda line: print(line, flush=True))
    return 0
