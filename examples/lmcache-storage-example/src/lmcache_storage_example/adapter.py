"""Objects in one file of SQLite. A row has the key, header and payload as one value, and the time of its last use."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from lmcache.errors import StartupError
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Held, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.envelope import EnvelopeError, header_length
from lmcache.v1.storage.l2.options import read_options

_TABLE = "CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, value BLOB NOT NULL, used REAL NOT NULL)"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``{"type": "sqlite", "path": …}``; mistakes become one line each."""

    path: str


def make(options: Mapping[str, Any]) -> StorageAdapter:
    """The adapter; raises ConfigError for a bad option, StartupError if the file cannot be had."""
    path = read_options("sqlite", Options, options).path
    try:
        return SqliteAdapter(path)
    except sqlite3.Error as exc:
        raise StartupError(f"--l2-adapter sqlite: path={path!r}: {exc}") from None


class SqliteAdapter(StorageAdapter):
    """One connection, which calls take in turns."""

    threads = 1

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = threading.Lock()
        self._db = sqlite3.connect(path, timeout=0.1, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(_TABLE)
        self._count()

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._my_turn(call):
            return [not call.over and self._row("1", key) is not None for key in keys]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        with self._my_turn(call):
            answers = [not call.over and self._put(put) for put in objects]
            self._count()
            return answers

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        with self._my_turn(call):
            return [None if call.over else self._get(want) for want in wants]

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._my_turn(call):
            answers = [not call.over and self._remove(key) for key in keys]
            self._count()
            return answers

    def scan(self) -> Iterator[Held]:
        with self._my_turn(Call(60.0)):
            rows = self._db.execute("SELECT key, length(value), used FROM objects").fetchall()
        return (Held(*row) for row in rows)

    def usage(self) -> Usage:
        return self._usage  # as of the last change: nobody may have to wait for it

    def describe(self) -> str:
        return f"sqlite {self._path}"

    def close(self) -> None:
        with self._turn:
            self._db.close()

    # ----

    @contextmanager
    def _my_turn(self, call: Call) -> Iterator[None]:
        """The connection is ours; an error of the engine is told in one line."""
        if not self._turn.acquire(timeout=call.remaining):
            raise AdapterError(f"{self.describe()}: busy until the call was over")
        try:
            yield
        except sqlite3.Error as exc:
            raise AdapterError(f"{self.describe()}: {exc}") from None
        finally:
            self._turn.release()

    def _row(self, what: str, key: bytes) -> Any:
        return self._db.execute(f"SELECT {what} FROM objects WHERE key = ?", (key,)).fetchone()

    def _put(self, put: Put) -> bool:
        value = b"".join((put.header, put.payload))  # SQLite takes a value in one piece
        self._db.execute("REPLACE INTO objects VALUES (?, ?, ?)", (put.key, value, time.time()))
        return True

    def _get(self, want: Want) -> bytes | None:
        row = self._row("value", want.key)
        value = memoryview(row[0]) if row else memoryview(b"")
        size = len(value) - len(want.payload)
        try:
            if size <= 0 or header_length(value[:size]) != size:
                return None  # not there, or not as long as the one that is wanted
        except EnvelopeError:
            return None
        want.payload[:] = value[size:]
        self._db.execute("UPDATE objects SET used = ? WHERE key = ?", (time.time(), want.key))
        return bytes(value[:size])

    def _remove(self, key: bytes) -> bool:
        self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
        return True

    def _count(self) -> None:
        count, size = self._db.execute("SELECT count(*), total(length(value)) FROM objects").fetchone()
        self._usage = Usage(int(size), count, 0)
