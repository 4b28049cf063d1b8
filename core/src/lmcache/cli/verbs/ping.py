"""``lmcache ping``: is the server there, and how far away?"""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import clean, duration, emit

HELP = "time a round trip to a running server"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if the request loop of a server of this protocol answers."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    with tool_session(args) as session:
        pong, took = session.timed(m.Ping(session=session.welcome.session), m.Pong)
        data = {
            "address": session.address,
            "version": pong.version,
            "protocol": session.welcome.protocol,
            "epoch": pong.epoch,
            "chunk_size": pong.chunk_size,
            "round_trip_ms": round(took * 1e3, 3),
        }
    text = f"{session.address}: lmcache {pong.version}, epoch {pong.epoch}, round trip {duration(took)}"
    emit(args.format, data, clean(text))
    return 0
