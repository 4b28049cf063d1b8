"""Chunks in and out of L1, and from below: what every way of storing and retrieving is made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.cache_engine.identity import ChunkObjects
from lmcache.v1.cache_engine.pool import PoolObjects
from lmcache.v1.cache_engine.stack import StorageStack
from lmcache.v1.cache_engine.token_database import Chunk
from lmcache.v1.config import L1_NAME
from lmcache.v1.memory.objects import MemoryObj
from lmcache.v1.storage.leases import Entry

__all__ = ["ChunkStore", "Held", "give_back"]

logger = init_logger(__name__)


class Held(NamedTuple):
    """A chunk and its objects, one reference each."""

    chunk: Chunk
    objs: list[MemoryObj]


def give_back(held: Iterable[Held]) -> None:
    """One reference of each object. L1's lock must not be held."""
    for _, objs in held:
        for obj in objs:
            obj.ref_count_down()


class ChunkStore:
    """Rows of objects by chunk. Methods take L1's lock themselves and do no I/O under it."""

    def __init__(
        self,
        stack: StorageStack,
        shapes: ChunkObjects,
        reads_from: set[str] | None = None,
        writes_to: set[str] | None = None,
    ) -> None:
        """
        Args:
            reads_from, writes_to: Names of tiers; None: all. L1 is written to in any case: it is where all passes.
        """
        self.stack = stack
        self.shapes = shapes
        self._reads_from = reads_from
        self._writes_to = writes_to
        self.stored_tokens = 0
        self.pool = PoolObjects(stack.l1, stack.view, stack.lock)
        self.no_room = 0
        """Chunks that were not stored for want of memory."""

    def rows(self, chunks: Sequence[Chunk]) -> list[list[tuple[bytes, int]]]:
        return self.shapes.rows(chunks)

    # --- storing ------------------------------------------------------------------------------------------

    def reserve(self, chunks: Sequence[Chunk], account: str, left_out: Container[int] = ()) -> list[Held]:
        """Memory for the chunks that are not in L1, in order, up to the first for which there is no room.

        Args:
            left_out: Places in ``chunks`` of those that are not wanted.
        """
        rows = self.rows(chunks)
        found: list[Held] = []
        with self.stack.lock:
            self.pool.reclaim()
            self.stack.l1.touch([[key for row in rows for key, _ in row]])
            for depth, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
                if depth in left_out or all(key in self.stack.l1 for key, _ in row):
                    continue
                objs = self.pool.new(row, self.shapes.layout(chunk.tokens), account, depth)
                if objs is None:
                    self.no_room += len(chunks) - depth
                    return found
                found.append(Held(chunk, objs))
        return found

    def commit(self, held: Sequence[Held]) -> list[Chunk]:
        """Publish what was written and begin to write it behind; the chunks that nobody else stored meanwhile. Waits
        for tiers that are to have it before anybody is told."""
        keys = [key for row in self.rows([chunk for chunk, _ in held]) for key, _ in row]
        new: list[Chunk] = []
        with self.stack.lock:
            # The last chunk of a prefix is the first to go, so it comes first.
            for chunk, objs in reversed(held):
                published = [self.pool.publish(obj) for obj in objs]
                if any(published):
                    new.insert(0, chunk)
            self.stack.tiers.published(keys, self._writes_to)
            written = self.stack.tiers.written(keys)
            self.stored_tokens += sum(chunk.tokens for chunk in new)
        if written is not None:
            written.result()  # at the latest after a time of its own
        return new

    # --- reading ------------------------------------------------------------------------------------------

    def prefix(self, rows: Sequence[Sequence[tuple[bytes, int]]]) -> int:
        """Leading rows that are in L1. The lock is held."""
        return self.stack.l1.prefix_length([key for key, _ in row] for row in rows)

    def read(self, chunks: Sequence[Chunk]) -> list[Held]:
        """The prefix that is in L1, held, and marked as just used."""
        with self.stack.lock:
            self.pool.reclaim()
            return self._read(chunks)

    def _read(self, chunks: Sequence[Chunk]) -> list[Held]:
        rows = self.rows(chunks)
        found: list[Held] = []
        for chunk, row in zip(chunks, rows, strict=True):
            entries = self._entries(row)
            if entries is None:
                break
            layout = self.shapes.layout(chunk.tokens)
            found.append(Held(chunk, [self.pool.read(entry, layout) for entry in entries]))
        self.stack.l1.touch([[key for row in rows[: len(found)] for key, _ in row]])
        return found

    def _entries(self, row: Sequence[tuple[bytes, int]]) -> list[Entry] | None:
        """A chunk's objects in L1; None: one is not there, or is of another size."""
        entries: list[Entry] = []
        for key, size in row:
            entry = self.stack.l1.get(key)
            if entry is None or entry.size != size:
                return None
            entries.append(entry)
        return entries

    def read_through(self, chunks: Sequence[Chunk], account: str, seconds: float) -> list[Held]:
        """The longest prefix to be had within ``seconds``, from L1 and below."""
        until = time.monotonic() + seconds
        found = self.read(chunks)
        rest = chunks[len(found) :]
        if not rest:
            return found
        with self.stack.lock:
            fetch = self.fetch(rest, account, seconds)
        if fetch is None:
            return found
        fetch.wait(until - time.monotonic())
        with self.stack.lock:
            found += self._read(rest)
            fetch.release()
        return found

    def fetch(
        self, chunks: Sequence[Chunk], account: str, seconds: float, where: set[str] | None = None
    ) -> Fetch | None:
        """Load from below what is not in L1; None: nothing below could help. The lock is held."""
        done = threading.Event()
        tiers = self._reads_from if where is None else where
        found = self.stack.tiers.prefetch(self.rows(chunks), account, max(0.0, seconds), done.set, tiers)
        return None if found is None else Fetch(found, done)

    # --- asking and dropping ------------------------------------------------------------------------------

    def found(self, chunks: Sequence[Chunk], seconds: float, where: set[str] | None) -> int:
        """Leading chunks that are in L1 or, as far as tiers say within ``seconds``, below."""
        rows = [[key for key, _ in row] for row in self.rows(chunks)]
        places = self._reads_from if where is None else where
        with self.stack.lock:
            self.pool.reclaim()
            here = set()
            if places is None or L1_NAME in places:
                here = {key for row in rows for key in row if key in self.stack.l1}
        missing = [key for row in rows for key in row if key not in here]
        if missing and self.stack.tiers.names:
            has = self.stack.tiers.holds(missing, seconds, places)
            here.update(key for key, found in zip(missing, has, strict=True) if found)
        return next((i for i, row in enumerate(rows) if not here.issuperset(row)), len(rows))

    def clear(self, chunks: Sequence[Chunk] | None, where: set[str] | None, seconds: float) -> int:
        """Drop these chunks, or everything of ours, from L1 and below; tokens of what went."""
        tiers = self.stack.tiers
        with self.stack.lock:
            self.pool.reclaim()
            before = self._listed(chunks, where)
            if chunks is None:
                below = tiers.clear(None if where is None else sorted(where))
            else:
                keys = [key for row in self.rows(chunks) for key, _ in row]
                below = tiers.delete(keys, None if where is None else sorted(where))
        try:
            below.result(seconds)
        except FutureTimeout:
            logger.warning("clear: tiers did not answer within %g s; they go on", seconds)
        with self.stack.lock:
            after = self._listed(chunks, where)
        return self._tokens(chunks, {key: before[place, key] for place, key in before.keys() - after.keys()})

    def _listed(self, chunks: Sequence[Chunk] | None, where: set[str] | None) -> dict[tuple[str, bytes], int]:
        """What places say that they hold, of these chunks or of everything of ours: place and key, and bytes. The lock
        is held."""
        tiers, l1 = self.stack.tiers, self.stack.l1
        below = [name for name in tiers.names if where is None or name in where]
        found: dict[tuple[str, bytes], int] = {}
        if chunks is None:
            for name in below:
                found.update(
                    ((name, k), item.size) for k, item in tiers.objects(name) or () if self.shapes.is_ours(k)
                )
            in_l1 = ((entry.key, entry.size) for entry in l1.entries() if self.shapes.is_ours(entry.key))
        else:
            mine = [pair for row in self.rows(chunks) for pair in row]
            found.update(((name, k), size) for name in below for k, size in mine if tiers.known(name, k))
            in_l1 = ((k, size) for k, size in mine if k in l1)
        if where is None or L1_NAME in where:
            found.update(((L1_NAME, k), size) for k, size in in_l1)
        return found

    def _tokens(self, chunks: Sequence[Chunk] | None, gone: Mapping[bytes, int]) -> int:
        """Tokens of the chunks that have one of these objects."""
        if chunks is None:
            return sum(map(self.shapes.tokens_of, gone.values())) // self.shapes.per_chunk
        rows = zip(chunks, self.rows(chunks), strict=True)
        return sum(chunk.tokens for chunk, row in rows if any(key in gone for key, _ in row))


class Fetch:
    """A load from below that is under way. What it brought stays in L1 until :meth:`release`."""

    def __init__(self, prefetch: Any, done: threading.Event) -> None:
        self._prefetch = prefetch
        self._done = done

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def chunks(self) -> int:
        """Leading chunks that are in L1 for it."""
        return int(self._prefetch.chunks)

    @property
    def most(self) -> int:
        """Leading chunks that it may bring. L1's lock is held."""
        return int(self._prefetch.most)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so long."""
        return self._done.wait(max(0.0, seconds))

    def release(self) -> None:
        """L1's lock is held. Harmless if it was called. Whoever waits goes on."""
        self._prefetch.release()
        self._done.set()
