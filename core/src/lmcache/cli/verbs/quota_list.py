"""``lmcache quota list``: every account."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import emit
from lmcache.cli.quotas import as_data, as_table

HELP = "show the limit and use of every account"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print every account that has something, or a limit, by tier."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    with tool_session(args) as session:
        rows = session.ask(m.Quotas(), m.Accounts).rows
    data = {"address": session.address, "accounts": as_data(rows)}
    emit(args.format, data, as_table(rows) if rows else "no account has anything here, or a limit")
    return 0
