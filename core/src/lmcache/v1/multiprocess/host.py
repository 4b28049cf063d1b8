"""Facts about this host that both sides of an attachment need."""

from __future__ import annotations

from pathlib import Path

WANT_FD = b"F"
"""Byte after the session id: send me the pool's descriptor."""
WATCH_ONLY = b"W"
"""Byte after the session id: only watch this connection."""


def boot_id() -> str:
    """The kernel's id of this boot: equal for two processes exactly if they share a host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def socket_name(address: str) -> str:
    """Python's spelling of a Unix socket address: ``@name`` stands for the abstract namespace."""
    return "\0" + address[1:] if address.startswith("@") else address
