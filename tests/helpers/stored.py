"""Objects for storage adapters: made, stored, loaded and verified as a tier does it."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

from lmcache.v1.storage.l2 import envelope
from lmcache.v1.storage.l2.adapter import Call, Put, StorageAdapter, Want

NOISE = hashlib.shake_256(b"noise").digest(1 << 18) * 16
"""Bytes of which no two short runs at different places below 256 KiB are equal."""


def memory(size: int) -> memoryview:
    """Page-aligned memory, as L1's is."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def key_of(number: int) -> bytes:
    return hashlib.sha512(b"%d" % number).digest()


def payload_of(number: int, size: int) -> memoryview:
    """Bytes that belong to this number and size only."""
    made = memory(size)
    begin = number * 61 % (1 << 17)
    made[:] = NOISE[begin : begin + size]
    head = hashlib.sha512(b"%d of %d" % (number, size)).digest()[:size]
    made[: len(head)] = head
    return made


def put_of(number: int, size: int, account: str = "") -> Put:
    payload = payload_of(number, size)
    info = envelope.ObjectInfo(key_of(number), size, envelope.checksum(payload), account=account)
    return Put(info.key, envelope.pack(info), payload)


def call(seconds: float = 30.0) -> Call:
    return Call(seconds)


def store(adapter: StorageAdapter, number: int, size: int) -> bool:
    return adapter.store([put_of(number, size)], call())[0]


def load(adapter: StorageAdapter, number: int, size: int) -> bytes | None:
    """The payload, verified by its header; None for a miss.

    Raises:
        EnvelopeError: if they do not belong together.
    """
    into = memory(size)
    header = adapter.load([Want(key_of(number), into)], call())[0]
    if header is None:
        return None
    envelope.check(header, key_of(number), into)
    return bytes(into)


def is_right(adapter: StorageAdapter, number: int, size: int) -> bool:
    return load(adapter, number, size) == bytes(payload_of(number, size))


def objects_below(path: Path) -> list[Path]:
    """The objects' files, wherever they are."""
    return [Path(at, name) for at, _, names in os.walk(path) for name in names if name.endswith(".kv")]


def temps_below(path: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(path) for name in names if name.endswith(".tmp")]


def blocks_below(path: Path) -> int:
    """Bytes on the disk, as ``du`` counts those of objects and of unfinished files."""
    return sum(f.lstat().st_blocks * 512 for f in objects_below(path) + temps_below(path))


def the_file(path: Path, number: int) -> Path:
    """The file of an object that is there."""
    [found] = [f for f in objects_below(path) if f.name == f"{key_of(number).hex()}.kv"]
    return found


def disk(path: Path, **options: Any) -> StorageAdapter:
    from lmcache.v1.storage.l2.registry import build

    return build({"type": "disk", "path": str(path), "max_gb": 0.25, **options})


def shared_fs(path: Path, **options: Any) -> StorageAdapter:
    from lmcache.v1.storage.l2.registry import build

    return build({"type": "shared_fs", "path": str(path), **options})


def spec(path: Path, **options: Any) -> StorageAdapter:
    """The adapter that the JSON in a file asks for; its ``environment`` is set in this process, for good."""
    from lmcache.v1.storage.l2.registry import build, parse

    asked = parse(path.read_text())
    os.environ.update(asked.pop("environment", {}))
    return build({**asked, **options})
