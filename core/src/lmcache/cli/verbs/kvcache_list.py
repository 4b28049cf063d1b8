"""``lmcache kvcache list``: what is in L1 or a tier, object by object."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server, at_least
from lmcache.cli.output import emit, size, table
from lmcache.cli.prompt import add_account, read_account

HELP = "list the objects that a running server holds in L1 or a tier"

_PAGE = 1000


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--limit", type=at_least(1), default=100, help="objects to list at most (100)")
    parser.add_argument(
        "--tier", default="l1", metavar="NAME", help="l1, or a tier of this server alone (l1)"
    )
    add_account(parser)
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print objects by key. The list is not of one moment: it is asked for in pages."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    account = read_account(args)
    objects: list[m.Stored] = []
    more = True
    with tool_session(args) as session:
        while more and len(objects) < args.limit:
            page = min(_PAGE, args.limit - len(objects))
            after = objects[-1].key if objects else b""
            request = m.ListObjects(tier=args.tier, after=after, limit=page, account=account)
            reply = session.ask(request, m.Listing)
            objects += reply.objects
            more = reply.more and bool(reply.objects)
    rows = [
        {
            "key": found.key.hex(), "model": found.model, "bytes": found.size, "account": found.account,
            "readers": found.pins, "pinned": found.held,
        }
        for found in objects
    ]  # fmt: skip
    cells = [
        (
            found.key.hex()[-16:],
            found.model,
            size(found.size),
            "not known" if found.account is None else found.account or "(no salt)",
            found.pins,
            "yes" if found.held else "",
        )
        for found in objects
    ]
    text = table(("key ends with", "model", "size", "account", "readers", "pinned"), cells)
    if not objects:
        text = "nothing"
    elif more:
        text += f"\nand more; --limit {args.limit}"
    emit(args.format, {"address": session.address, "tier": args.tier, "objects": rows, "more": more}, text)
    return 0
