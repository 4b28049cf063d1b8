"""``lmcache quota delete``: lift a limit."""

from __future__ import annotations

import argparse

from lmcache.cli.output import emit
from lmcache.cli.quotas import account_of
from lmcache.cli.quotas import add_flags as add

__all__ = ["HELP", "add", "run"]

HELP = "lift one salt's limit"


def run(args: argparse.Namespace) -> int:
    """Lift the limit. Exit code 0 also where there was none."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    account = account_of(args)
    with tool_session(args) as session:
        session.ask(m.SetQuota(account=account, limit_bytes=None), m.Ok)
    data = {"address": session.address, "account": account, "limit_bytes": None}
    emit(args.format, data, f"{session.address}: account {account or '(no salt)'} has no limit")
    return 0
