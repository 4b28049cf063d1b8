"""Objects to store, buffers that show who wrote where, and checks that hold without pytest, too."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

from lmcache.v1.storage.l2.adapter import Call, Put, StorageAdapter, Want
from lmcache.v1.storage.l2.envelope import ObjectInfo, check, checksum, pack

__all__ = ["Target", "expect", "new_key", "new_object", "read", "same", "write"]

_GUARD = 64
_BLANK = 0xA5


def expect(condition: object, text: str) -> None:
    """Fail with ``text`` unless ``condition`` holds; as an assert, but not to be switched off."""
    if not condition:
        raise AssertionError(text)


def new_key() -> bytes:
    """A key that nobody has used."""
    return os.urandom(64)


def new_object(size: int, key: bytes | None = None, shift: int = 0, account: str = "") -> Put:
    """An object of ``size`` random bytes; its payload begins ``shift`` bytes into a buffer of its own."""
    key = new_key() if key is None else key
    buffer = bytearray(shift) + bytearray(random.randbytes(size)) + bytearray(_GUARD)  # noqa: S311 -- only noise
    payload = memoryview(buffer)[shift : shift + size]
    return Put(key, pack(ObjectInfo(key, size, checksum(payload), account=account)), payload)


def same(found: bytes | None, put: Put) -> bool:
    """Whether the bytes that were loaded are those of ``put``."""
    return found is not None and memoryview(found) == put.payload


class Target(NamedTuple):
    """A buffer to load into, with bytes around it that nobody may write."""

    buffer: bytearray
    want: Want

    @classmethod
    def of(cls, key: bytes, size: int, shift: int = 0) -> Target:
        """For a payload of ``size`` bytes, ``shift`` bytes off the beginning of the buffer and its guard."""
        buffer = bytearray([_BLANK]) * (_GUARD + shift + size + _GUARD)
        start = _GUARD + shift
        return cls(buffer, Want(key, memoryview(buffer)[start : start + size]))

    def untouched_around(self) -> bool:
        """Whether what is before and after the payload is as it was."""
        size = len(self.want.payload)
        start = len(self.buffer) - _GUARD - size
        around = self.buffer[:start] + self.buffer[start + size :]
        return around == bytes([_BLANK]) * len(around)


def write(adapter: StorageAdapter, objects: Sequence[Put], seconds: float) -> None:
    """Store all; fails if one is not accepted."""
    answers = adapter.store(objects, Call(seconds))
    expect(answers == [True] * len(objects), f"store answered {answers}: expected {len(objects)} times True")


def read(adapter: StorageAdapter, key: bytes, size: int, seconds: float, shift: int = 0) -> bytes | None:
    """The payload of an object, verified by its header; None if it is not there. Fails on any byte out of place."""
    target = Target.of(key, size, shift)
    (header,) = adapter.load([target.want], Call(seconds))
    expect(target.untouched_around(), f"load of {size} bytes wrote beside the payload")
    if header is None:
        return None
    expect(isinstance(header, bytes), f"load answered {type(header).__name__}: expected bytes or None")
    check(header, key, target.want.payload)
    return bytes(target.want.payload)
