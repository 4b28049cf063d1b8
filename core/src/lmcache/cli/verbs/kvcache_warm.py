"""``lmcache kvcache warm``: fetch a prompt into L1 before anybody asks for it."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server, seconds
from lmcache.cli.output import emit
from lmcache.cli.prompt import add_prompt, read_prompt

HELP = "fetch a prompt from the tiers below into L1"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_prompt(parser)
    parser.add_argument("--wait", type=seconds, default=10.0, help="seconds to wait for it at most (10)")
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print, like ``query kvcache``, what is held once the fetch has ended or the wait is over."""
    from lmcache.cli.connect import tool_session
    from lmcache.cli.holdings import report
    from lmcache.v1.keys import account_id
    from lmcache.v1.protocol import messages as m

    prompt = read_prompt(args)
    with tool_session(args) as session:
        hashes = prompt.hashes(session.welcome.chunk_size)
        warm = m.Warm(hashes=b"".join(hashes), account=account_id(prompt.salt), wait=args.wait)
        found = session.ask(warm, m.Holdings, args.wait)
    data, text = report(session, len(prompt.tokens), len(hashes), found)
    emit(args.format, data, text)
    return 0
