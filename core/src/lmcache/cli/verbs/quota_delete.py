"""``lmcache quota delete``: lift a limit."""

from __future__ import annotations

import argparse

from lmcache.cli.output import emit
from lmcache.cli.quotas import account_of, add_flags, add_tier

HELP = "lift one salt's limit"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_tier(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Lift the limit. Exit code 0 also where there was none."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    account = account_of(args)
    with tool_session(args) as session:
        session.ask(m.SetQuota(account=account, limit_bytes=None, tier=args.tier), m.Ok)
    data = {"address": session.address, "account": account, "tier": args.tier, "limit_bytes": None}
    text = f"{session.address}: account {account or '(no salt)'} has no limit in {args.tier}"
    emit(args.format, data, text)
    return 0
