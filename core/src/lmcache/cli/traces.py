"""Recorded requests: JSON lines in which ``hash_ids`` names a prompt's blocks, as in Mooncake's traces."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import IO

from lmcache.errors import ConfigError, LMCacheError

_XZ = b"\xfd7zXZ\x00"
_MAX_LINE = 64 << 20


def read_trace(name: str) -> list[list[bytes]]:
    """The requests of a file, plain or xz, in order; each the keys of its blocks. Blank lines are passed over.

    Raises:
        ConfigError: if the file cannot be read. LMCacheError: if a line is no request, or there is none.
    """
    keys: dict[int, bytes] = {}
    requests = []
    for number, line in enumerate(_lines(name), 1):
        if not line.strip():
            continue
        ids = _hash_ids(line, f"{name}:{number}")
        requests.append([keys.setdefault(i, struct.pack(">Q", len(keys))) for i in ids])
    if not any(requests):
        raise LMCacheError(
            f"{name}: no request with blocks: expected JSON lines with hash_ids, one per request"
        )
    return requests


def _hash_ids(line: bytes, where: str) -> list[int]:
    try:
        request = json.loads(line.decode())
    except (ValueError, RecursionError) as exc:
        raise LMCacheError(f"{where}: {exc}: expected one JSON object per line") from None
    if not isinstance(request, dict) or "hash_ids" not in request:
        raise LMCacheError(f'{where}: {_short(request)}: expected an object with "hash_ids"')
    ids = request["hash_ids"]
    if not isinstance(ids, list):
        raise LMCacheError(f"{where}: hash_ids {_short(ids)}: expected a list of whole numbers")
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool):
            raise LMCacheError(f"{where}: hash_ids: {_short(i)}: expected whole numbers only")
    return ids


def _lines(name: str) -> Iterator[bytes]:
    number = 1
    try:
        with open(name, "rb") as plain:
            packed = plain.peek(len(_XZ)).startswith(_XZ)
            with _unpacked(plain, name) if packed else plain as file:
                while line := file.readline(_MAX_LINE):
                    if len(line) == _MAX_LINE:
                        limit = f"{_MAX_LINE >> 20} MiB"
                        raise LMCacheError(
                            f"{name}:{number}: a line of {limit} or more: expected one request"
                        )
                    yield line
                    number += 1
    except OSError as exc:
        raise ConfigError(f"{name}: cannot be read ({exc.strerror}); expected a trace file") from None
    except ValueError:  # a NUL in it
        raise ConfigError(f"{name!r}: expected the name of a trace file") from None
    except _Damaged as exc:
        raise LMCacheError(f"{name}:{number}: {exc}: expected a whole xz file; fetch it again") from None


class _Damaged(Exception):
    """The xz data are not what xz writes."""


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    try:
        import lzma
    except ImportError:
        raise LMCacheError(f"{name}: this Python has no lzma; unpack the file with xz -d first") from None

    class Unpacked(lzma.LZMAFile):
        def readline(self, size: int | None = -1) -> bytes:
            try:
                return super().readline(size)
            except (EOFError, lzma.LZMAError) as exc:
                raise _Damaged(exc) from None

    return Unpacked(file)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
