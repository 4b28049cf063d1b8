"""``lmcache quota set``: limit an account."""

from __future__ import annotations

import argparse
import math

from lmcache.cli.args import number
from lmcache.cli.output import emit, size
from lmcache.cli.quotas import account_of, add_flags, add_tier
from lmcache.errors import ConfigError

HELP = "limit what requests of one cache salt may hold in L1 or in a tier"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--limit-gb", type=number, required=True, help="GiB (required)")
    add_tier(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Set the limit. It belongs to the running server: the next one does not know it."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    if not (math.isfinite(args.limit_gb) and 0 <= args.limit_gb <= 1 << 30):
        raise ConfigError(f"--limit-gb {args.limit_gb:g}: expected a number of GiB from 0 on, e.g. 1.5")
    account, limit = account_of(args), int(args.limit_gb * (1 << 30))
    with tool_session(args) as session:
        session.ask(m.SetQuota(account=account, limit_bytes=limit, tier=args.tier), m.Ok)
    data = {"address": session.address, "account": account, "tier": args.tier, "limit_bytes": limit}
    text = f"{session.address}: account {account or '(no salt)'} limited to {size(limit)} in {args.tier}"
    emit(args.format, data, text)
    return 0
