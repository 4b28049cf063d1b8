"""``lmcache kvcache clear``: drop what is held."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server, seconds
from lmcache.cli.output import emit
from lmcache.cli.prompt import add_account, read_account

HELP = "drop what a running server holds"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--tier",
        action="append",
        metavar="NAME",
        help="l1, or a tier as `lmcache describe` names it; may be repeated (l1 and all tiers)",
    )
    parser.add_argument("--wait", type=seconds, default=30.0, help="seconds to wait for slow tiers (30)")
    parser.add_argument("--force", action="store_true", help="pinned objects, too")
    add_account(parser)
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Drop everything that the flags name but what is being read; print how many objects that were."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    account = read_account(args)
    with tool_session(args) as session:
        request = m.Clear(tiers=args.tier, account=account, force=args.force)
        done = session.ask(request, m.Ok, args.wait)
    data = {"address": session.address, "account": account, "dropped": done.count, "tiers": done.counts}
    parts = ", ".join(f"{tier} {'not known' if n < 0 else n}" for tier, n in done.counts.items())
    emit(args.format, data, f"{session.address}: {done.count} objects dropped ({parts})")
    return 0
