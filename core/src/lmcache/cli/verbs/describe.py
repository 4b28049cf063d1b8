"""``lmcache describe``: what a running server is set to, holds, and serves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import duration, emit, pairs, size, table
from lmcache.cli.quotas import L1
from lmcache.errors import ConfigError

HELP = "show a running server's settings, its fill and who is connected"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "part", nargs="?", metavar="kvcache", help="only what is held: L1, tiers, accounts (all)"
    )
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer to a Status message, without the session that asked for it."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    if args.part not in (None, "kvcache"):
        raise ConfigError(f"describe {args.part}: expected nothing, or kvcache")
    with tool_session(args) as session:
        state: dict[str, Any] = dict(session.ask(m.Status(), m.State).fields)
    mine = {"role": "tool", "client": session.client}
    state["sessions"] = [row for row in state.get("sessions", ()) if row | mine != row]
    data = {"address": session.address, **state}
    if args.part:
        data = {name: data.get(name) for name in ("address", "epoch", "chunk_size", "l1", "l2", "accounts")}
    text = ""
    if args.format != "json":
        text = _held(data) if args.part else _text(data)
    emit(args.format, data, text)
    return 0


def _text(state: Mapping[str, Any]) -> str:
    """The state for people. A field that another version of the server does not send is shown as ``-``."""
    l1: Mapping[str, Any] = state.get("l1") or {}
    parts = [pairs([*_server(state), *_l1(l1), ("requests", state.get("requests"))]), *_tiers(state)]
    sessions = [
        (
            s.get("role"),
            s.get("engine"),
            s.get("rank"),
            s.get("path"),
            f"{s.get('silent_seconds', 0):.1f} s ago",
            s.get("client"),
        )
        for s in state["sessions"]
    ]
    if sessions:
        parts.append(table(("role", "engine", "rank", "transfer path", "heard", "client"), sessions))
    else:
        parts.append("nobody is connected")
    return "\n\n".join(parts)


def _held(state: Mapping[str, Any]) -> str:
    return "\n\n".join([pairs(_l1(state.get("l1") or {})), *_tiers(state), *_accounts(state)])


def _tiers(state: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            tier.get("name"),
            tier.get("type"),
            tier.get("state"),
            tier.get("objects"),
            _bytes(tier.get("used_bytes")),
            _bytes(tier.get("capacity_bytes")) if tier.get("capacity_bytes") else "no limit",
            _bytes(tier.get("queued_bytes")),
            tier.get("where"),
        )
        for tier in state.get("l2") or ()
    ]
    heads = ("tier", "type", "state", "objects", "in use", "capacity", "to be written", "where")
    return [table(heads, rows)] if rows else []


def _accounts(state: Mapping[str, Any]) -> list[str]:
    found = [(L1, row) for row in state.get("accounts") or ()]
    found += [
        (str(tier.get("name")), row) for tier in state.get("l2") or () for row in tier.get("accounts") or ()
    ]
    rows = [
        (
            row.get("account") or "(no salt)",
            tier,
            "none" if row.get("limit_bytes") is None else size(int(row["limit_bytes"])),
            size(int(row.get("used_bytes") or 0)),
        )
        for tier, row in found
    ]
    return [table(("account", "tier", "limit", "in use"), rows)] if rows else []


def _bytes(value: object) -> str | None:
    return size(value) if isinstance(value, int) and value >= 0 else None


def _server(state: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [
        ("server", f"{state['address']} (lmcache {state.get('version')}, pid {state.get('pid')})"),
        ("epoch", state.get("epoch")),
        ("up for", duration(float(state.get("uptime_seconds") or 0))),
        ("protocol", "..".join(map(str, state.get("protocol") or ()))),
        ("chunk size", f"{state.get('chunk_size')} tokens"),
        ("transfer modes", ", ".join(state.get("transfer_modes") or ())),
        ("shared memory", state.get("shared_memory")),
    ]


def _l1(l1: Mapping[str, Any]) -> list[tuple[str, object]]:
    used, capacity = int(l1.get("used_bytes") or 0), int(l1.get("capacity_bytes") or 0)
    share = f" ({100 * used / capacity:.1f} %)" if capacity else ""
    totals = ("stored", "evicted", "duplicates", "aborted", "dropped_full")
    return [
        ("L1 in use", f"{size(used)} of {size(capacity)}{share}"),
        ("L1 policy", l1.get("policy")),
        ("L1 objects", f"{l1.get('objects')}, {l1.get('pinned_objects')} of them pinned"),
        ("L1 leases", f"{l1.get('read_leases')} for reading, {l1.get('write_leases')} for writing"),
        ("L1 so far", ", ".join(f"{l1.get(name)} {name.replace('_', ' ')}" for name in totals)),
    ]
