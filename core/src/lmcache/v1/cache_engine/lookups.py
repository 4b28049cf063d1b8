"""What lookups keep for the requests that made them: pins and loads, until they are given back or too old."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from lmcache.logging import init_logger
from lmcache.v1.cache_engine.chunks import ChunkStore, Fetch
from lmcache.v1.cache_engine.token_database import Chunk
from lmcache.v1.storage.leases import Entry

__all__ = ["Lookup", "Lookups"]

logger = init_logger(__name__)


@dataclass(slots=True)
class Lookup:
    """What one request found. ``base`` leading chunks were in L1; ``fetch`` brings more."""

    chunks: list[Chunk]
    born: float
    base: int = 0
    fetch: Fetch | None = None
    pins: list[Entry] = field(default_factory=list)
    least: int = 0

    @property
    def done(self) -> bool:
        return self.fetch is None or self.fetch.done

    def tokens(self) -> int:
        """Prefix tokens that are in L1 for the request, once ``done``; 0 below ``least``."""
        found = self.base + (self.fetch.chunks if self.fetch else 0)
        return prefix_tokens(self.chunks, found, self.least)

    def promised(self) -> int:
        """Prefix tokens that are pinned, or may be brought. L1's lock is held."""
        return prefix_tokens(self.chunks, self.base + (self.fetch.most if self.fetch else 0), self.least)


def prefix_tokens(chunks: list[Chunk], found: int, least: int) -> int:
    """Tokens of the first ``found`` chunks; 0 if that is less than is worth a load."""
    tokens = chunks[found - 1].end if found else 0
    return tokens if tokens >= least else 0


class Lookups:
    """By the id that the caller chose. Every method wants L1's lock.

    Args:
        store: Where pins are.
        seconds: After which what nobody gave back is taken back.
    """

    def __init__(self, store: ChunkStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._found: OrderedDict[str, Lookup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, lookup_id: object) -> Lookup | None:
        return self._found.get(lookup_id) if isinstance(lookup_id, str) else None

    def begin(
        self,
        lookup_id: str,
        chunks: list[Chunk],
        account: str,
        least: int,
        seconds: float | None,
        where: set[str] | None,
    ) -> Lookup:
        """Keep what of ``chunks`` is in L1 and load the rest. An older lookup of this id is given back.

        Args:
            account: Whose quota loads count against.
            least: Tokens below which nothing is promised.
            seconds: For loads; None: load nothing.
            where: Places to load from; None: all.
        """
        self.sweep()
        store = self._store
        rows = store.rows(chunks)
        lookup = Lookup(chunks, time.monotonic(), store.prefix(rows), least=least)
        entries = [store.stack.l1.get(key) for row in rows[: lookup.base] for key, _ in row]
        lookup.pins = [entry for entry in entries if entry is not None]
        store.stack.l1.pin_entries(lookup.pins)
        self.release(lookup_id)
        self._found[lookup_id] = lookup
        if seconds is not None and lookup.base < len(chunks):
            lookup.fetch = store.fetch(chunks[lookup.base :], account, seconds, where)
        return lookup

    def release(self, lookup_id: str) -> bool:
        """Give back what it keeps and end what is under way; whether there was anything."""
        lookup = self._found.pop(lookup_id, None)
        if lookup is None:
            return False
        self._store.stack.l1.unpin_entries(lookup.pins)
        if lookup.fetch is not None:
            lookup.fetch.release()
        return True

    def sweep(self) -> None:
        """Take back what is too old. They are in order of age."""
        limit = time.monotonic() - self._seconds
        while self._found:
            lookup_id, lookup = next(iter(self._found.items()))
            if lookup.born > limit:
                return
            logger.warning(
                "lookup %s: not given back within %g s (pin_timeout_sec); its pins are dropped",
                lookup_id,
                self._seconds,
            )
            self.release(lookup_id)

    def clear(self) -> None:
        for lookup_id in list(self._found):
            self.release(lookup_id)
