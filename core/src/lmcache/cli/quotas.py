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


def as_data(row: Account) -> dict[str, object]:
    """One account for programs."""
    return {
        "account": row.account, "limit_bytes": row.limit_bytes, "used_bytes": row.used_bytes,
        "objects": row.objects,
    }  # fmt: skip


def as_table(rows: Sequence[Account]) -> str:
    """Accounts for people."""
    cells = [
        (
            row.account or "(no salt)",
            "none" if row.limit_bytes is None else size(row.limit_bytes),
            size(row.used_bytes),
            row.objects,
        )
        for row in rows
    ]
    return table(("account", "limit", "in use", "objects"), cells)
