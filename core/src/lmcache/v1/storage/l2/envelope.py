"""The header of a stored object: what it is, and how to tell that its bytes are the ones that were stored.

``magic (8) | length of the body (u32) | xxh3_64 of the body (u64) | body``, integers little-endian; the body is a
msgpack array of :class:`ObjectInfo`. The same header goes to every storage engine, before the payload.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from lmcache.errors import LMCacheError
from lmcache.v1.keys import Namespace

__all__ = [
    "MAX_HEADER",
    "PREFIX_BYTES",
    "EnvelopeError",
    "ObjectInfo",
    "check",
    "checksum",
    "header_length",
    "pack",
    "unpack",
]

MAGIC = b"LMCKV\x00\x00\x01"
_PREFIX = struct.Struct("<8sIQ")
PREFIX_BYTES = _PREFIX.size
"""Bytes after which :func:`header_length` knows the rest."""
MAX_HEADER = 1 << 20


class EnvelopeError(LMCacheError):
    """Bytes are not the object that they should be. One line that says how."""


class ObjectInfo(msgspec.Struct, array_like=True, frozen=True):
    """What a header says. ``checksum`` is the xxh3_64 of the payload; ``created`` a Unix time in seconds.

    ``account`` is whose quota it counts against (:func:`lmcache.v1.keys.account_id`). ``namespace`` is for people
    and tools; what must agree is in the key.
    """

    key: bytes
    size: int
    checksum: int
    created: int = 0
    account: str = ""
    namespace: Namespace | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ObjectInfo)


def checksum(payload: memoryview | bytes) -> int:
    """xxh3_64 of the payload. Releases the GIL for large ones."""
    return xxhash.xxh3_64_intdigest(payload)


def pack(info: ObjectInfo) -> bytes:
    """The header's bytes."""
    body = _encode(info)
    return _PREFIX.pack(MAGIC, len(body), checksum(body)) + body


def header_length(prefix: bytes | memoryview) -> int:
    """Bytes of the whole header, from its first :data:`PREFIX_BYTES`.

    Raises:
        EnvelopeError: if no header of ours begins so.
    """
    if len(prefix) < PREFIX_BYTES:
        raise EnvelopeError(f"header of {len(prefix)} bytes: expected at least {PREFIX_BYTES}")
    magic, length, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise EnvelopeError(f"header begins with {magic!r}: expected {MAGIC!r}")
    if length + PREFIX_BYTES > MAX_HEADER:
        raise EnvelopeError(f"header of {length + PREFIX_BYTES} bytes: expected at most {MAX_HEADER}")
    return PREFIX_BYTES + int(length)


def unpack(header: bytes | memoryview) -> ObjectInfo:
    """What a header says; bytes after it are not looked at.

    Raises:
        EnvelopeError: if it is none of ours, cut short or damaged.
    """
    end = header_length(header)
    if len(header) < end:
        raise EnvelopeError(f"header of {len(header)} bytes: expected {end}")
    _, _, digest = _PREFIX.unpack_from(header)
    body = memoryview(header)[PREFIX_BYTES:end]
    if checksum(body) != digest:
        raise EnvelopeError("header is damaged: its checksum differs")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as exc:
        raise EnvelopeError(f"header cannot be read: {exc}") from None


def check(header: bytes | memoryview, key: bytes, payload: memoryview) -> ObjectInfo:
    """Whether header and payload are the object ``key`` as it was stored.

    Raises:
        EnvelopeError: if they are not.
    """
    info = unpack(header)
    if info.key != key:
        raise EnvelopeError(f"object {info.key.hex()[:16]}…: expected {key.hex()[:16]}…")
    if info.size != len(payload):
        raise EnvelopeError(f"object of {info.size} bytes: expected {len(payload)}")
    if checksum(payload) != info.checksum:
        raise EnvelopeError("payload is damaged: its checksum differs")
    return info
