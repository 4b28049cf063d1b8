"""``lmcache quota get``: one account."""

from __future__ import annotations

import argparse

from lmcache.cli.output import emit
from lmcache.cli.quotas import account_of, as_data, as_table
from lmcache.cli.quotas import add_flags as add

__all__ = ["HELP", "add", "run"]

HELP = "show one salt's limits and use"


def run(args: argparse.Namespace) -> int:
    """Print the limits, if there are any, and what is in use, by tier."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    account = account_of(args)
    with tool_session(args) as session:
        rows = session.ask(m.Quotas(), m.Accounts).rows
    none = m.Account(account=account, used_bytes=0, objects=0, limit_bytes=None)
    mine = [row for row in rows if row.account == account] or [none]
    emit(args.format, {"address": session.address, **as_data(mine)[0]}, as_table(mine))
    return 0
