"""What the ``quota`` verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import size, table
from lmcache.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.protocol.messages import Account


L1 = "l1"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name one account, and where the server is."""
    parser.add_argument(
        "salt", nargs="?", metavar="SALT", help="the cache salt of the requests meant; '' for those without"
    )
    parser.add_argument("--account", metavar="ID", help="the account, as lists show it, instead of SALT")
    add_server(parser)
    add_format(parser)


def account_of(args: argparse.Namespace) -> str:
    """The account that is meant.

    Raises:
        ConfigError: if none is, or two.
    """
    from lmcache.v1.keys import account_id

    if (args.salt is None) == (args.account is None):
        raise ConfigError("account: expected exactly one of SALT, --account ID")
    return account_id(args.salt) if args.account is None else str(args.account)


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that says where a limit holds."""
    parser.add_argument(
        "--tier",
        default=L1,
        metavar="NAME",
        help="l1, or a tier of the server's own as `lmcache describe` names it (l1)",
    )


def as_data(rows: Sequence[Account]) -> list[dict[str, object]]:
    """Accounts for programs: of each what it has in L1, and in every tier that knows."""
    found: dict[str, list[Account]] = {}
    for row in rows:
        found.setdefault(row.account, []).append(row)
    data = []
    for account, mine in found.items():
        l1 = next((row for row in mine if row.tier == L1), None)
        tiers = [{"tier": row.tier, **_figures(row)} for row in mine if row is not l1]
        data.append({"account": account, **_figures(l1), "tiers": tiers})
    return data


def _figures(row: Account | None) -> dict[str, object]:
    if row is None:
        return {"limit_bytes": None, "used_bytes": 0, "objects": 0}
    return {"limit_bytes": row.limit_bytes, "used_bytes": row.used_bytes, "objects": row.objects}


def as_table(rows: Sequence[Account]) -> str:
    """Accounts for people."""
    cells = [
        (
            row.account or "(no salt)",
            row.tier,
            "none" if row.limit_bytes is None else size(row.limit_bytes),
            size(row.used_bytes),
            row.objects,
        )
        for row in sorted(rows, key=lambda row: row.account)
    ]
    return table(("account", "tier", "limit", "in use", "objects"), cells)
