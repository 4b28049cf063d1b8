"""What every message is."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag_field="op", kw_only=True):
    """Base of all messages."""
