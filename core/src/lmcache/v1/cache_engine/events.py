"""What routers want to know: which blocks came to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from lmcache.v1.cache_engine.token_database import Chunk

__all__ = ["CacheStoreEvent", "StoreEvents"]

_MOST = 65536


class CacheStoreEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk was stored. ``token_ids`` are exactly its own, ``block_size`` of them."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "cpu"


class StoreEvents:
    """Events since they were last asked for, the newest :data:`_MOST`."""

    def __init__(self) -> None:
        self._events: deque[CacheStoreEvent] = deque(maxlen=_MOST)

    def stored(self, tokens: Sequence[int], chain: Sequence[Chunk], new: Iterable[Chunk]) -> None:
        """``new`` chunks of a request's ``chain`` were stored."""
        before = {chunk.digest: chain[i - 1].digest if i else None for i, chunk in enumerate(chain)}
        for chunk in new:
            self._events.append(
                CacheStoreEvent(
                    block_hashes=[chunk.digest],
                    parent_block_hash=before[chunk.digest],
                    token_ids=list(tokens[chunk.start : chunk.end]),
                    block_size=chunk.tokens,
                )
            )

    def take(self) -> list[CacheStoreEvent]:
        """All of them, once."""
        taken: list[CacheStoreEvent] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken
