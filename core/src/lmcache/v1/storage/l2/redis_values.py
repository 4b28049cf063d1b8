"""How an object's value goes to a Redis server and comes back: at once, or in pieces."""

from __future__ import annotations

from lmcache.v1.storage.l2.adapter import Call, Put, Want
from lmcache.v1.storage.l2.redis_wire import Refused, Wire, packed
from lmcache.v1.storage.l2.remote import header_size, is_whole

__all__ = ["load_pieces", "receive", "send", "store_pieces"]

_PART_SECONDS = 600
"""Life of a value that is being written in pieces; nobody else removes it if its writer dies."""


def send(wire: Wire, name: bytes, put: Put, life: int) -> None:
    """Set the value ``name``, for ``life`` seconds or without end (0). The reply is owed."""
    words = (b"SETEX", name, life) if life else (b"SET", name)
    command = packed(*words, last=len(put.header) + len(put.payload))
    wire.value((command + put.header, put.payload, b"\r\n"))


def receive(wire: Wire, want: Want) -> bytes | Refused | None:
    """Fill the payload from the value that was asked for; its header, or None if it is another object's or none."""
    total = wire.bulk()
    if not isinstance(total, int):
        return total
    header = bytearray(header_size(total, len(want.payload)))
    wire.take(header)
    if header and is_whole(header):
        wire.take(want.payload)
        wire.end()
        return bytes(header)
    wire.skip(total - len(header))
    wire.end()
    return None


def store_pieces(
    wire: Wire, name: bytes, part: bytes, put: Put, call: Call, life: int, piece: int
) -> bytes | Refused | None:
    """Write the value under the name ``part``, which expires, and rename it when it is complete."""
    size = len(put.header) + len(put.payload)
    wire.command(b"SET", part, put.header, b"EX", _PART_SECONDS)
    answer = wire.reply()
    if not isinstance(answer, Refused):
        wire.command(
            b"SETRANGE", part, size - 1, b"\x00"
        )  # room for all, so that it is not moved as it grows
        answer = wire.reply()
    for at in range(0, len(put.payload), piece):
        if isinstance(answer, Refused) or call.over:
            break
        view = put.payload[at : at + piece]
        wire.value((packed(b"SETRANGE", part, len(put.header) + at, last=len(view)), view, b"\r\n"))
        answer = wire.reply()
    if answer != size:
        if not call.over:  # else the part expires
            wire.command(b"UNLINK", part)
            wire.reply()
        return answer if isinstance(answer, Refused) else None
    return _rename(wire, part, name, life)


def _rename(wire: Wire, part: bytes, name: bytes, life: int) -> bytes | Refused | None:
    """In this order: a writer that dies between the two leaves a whole value, which goes in a while."""
    wire.command(b"RENAME", part, name)
    wire.command(*((b"EXPIRE", name, life) if life else (b"PERSIST", name)))
    renamed, lasting = wire.reply(), wire.reply()
    if isinstance(renamed, Refused) or isinstance(lasting, Refused):
        return renamed if isinstance(renamed, Refused) else lasting  # type: ignore[return-value]
    return b"OK"


def load_pieces(wire: Wire, name: bytes, want: Want, call: Call, piece: int) -> bytes | Refused | None:
    """Fill the payload piece by piece. The header, which holds the payload's checksum, must be the same at the end."""
    wire.command(b"STRLEN", name)
    found = wire.reply()
    if isinstance(found, Refused):
        return found
    payload = want.payload
    header = bytearray(header_size(found, len(payload)) if isinstance(found, int) else 0)
    if not header or not _range(wire, name, 0, header) or not is_whole(header):
        return None
    for at in range(0, len(payload), piece):
        if call.over or not _range(wire, name, len(header) + at, payload[at : at + piece]):
            return None
    again = bytearray(len(header))
    return bytes(header) if _range(wire, name, 0, again) and again == header else None


def _range(wire: Wire, name: bytes, start: int, into: bytearray | memoryview) -> bool:
    """Fill ``into`` from the value; False if it is not that long any more."""
    wire.command(b"GETRANGE", name, start, start + len(into) - 1)
    size = wire.bulk()
    if not isinstance(size, int):
        return False
    if size == len(into):
        wire.take(into)
    else:
        wire.skip(size)
    wire.end()
    return size == len(into)
