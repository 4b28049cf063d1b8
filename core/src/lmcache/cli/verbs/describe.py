"""``lmcache describe``: what a running server is set to, holds, and serves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import duration, emit, pairs, size, table

HELP = "show a running server's settings, its fill and who is connected"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer to a Status message, without the session that asked for it."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    with tool_session(args) as session:
        state: dict[str, Any] = dict(session.ask(m.Status(), m.State).fields)
    mine = {"role": "tool", "client": session.client}
    state["sessions"] = [row for row in state.get("sessions", ()) if row | mine != row]
    data = {"address": session.address, **state}
    emit(args.format, data, _text(data) if args.format != "json" else "")
    return 0


def _text(state: Mapping[str, Any]) -> str:
    """The state for people. A field that another version of the server does not send is shown as ``-``."""
    l1: Mapping[str, Any] = state.get("l1") or {}
    parts = [pairs([*_server(state), *_l1(l1), ("requests", state.get("requests"))])]
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
