"""The leader's lookups: asked once per request for all ranks, answered without making the scheduler wait."""

from __future__ import annotations

from typing import Any

import msgspec

from lmcache.errors import LMCacheError
from lmcache.integration.sglang.identity import split_cache_salt
from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLookupOperation, Pinned
from lmcache.logging import init_logger
from lmcache.v1.keys import Scope, account_id, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect

__all__ = ["PENDING", "Leader", "known_to_all"]

logger = init_logger(__name__)

PENDING = -1


class Leader:
    """Asks the server for one engine. Nothing here raises for what the server or the network does.

    Args:
        client: a session of role "scheduler".
        groups: KV groups of each rank.
        prefetch_timeout: seconds that a request may wait for what the server fetches from tiers below L1.
    """

    def __init__(self, client: CacheClient, groups: int, prefetch_timeout: float) -> None:
        self.client = client
        self._groups = groups
        self._prefetch_timeout = prefetch_timeout
        self._asked: set[str] = set()
        """Requests of which the server may hold something."""

    @property
    def chunk_size(self) -> int:
        """The server's; 0 while it is away."""
        return self.client.welcome.chunk_size if self.client.up and self.client.welcome is not None else 0

    def ask(self, operation: LMCacheLookupOperation) -> int:
        """Send a lookup; the chunk size that it was asked with, 0 if it was not."""
        size = self.chunk_size
        if not size:
            return 0
        try:
            salt, extra = split_cache_salt(operation.cache_salt)
            scope = Scope(chunk_size=size, salt=salt, lora=extra)
            hashes = chunk_hashes(operation.token_ids, scope)
            if hashes:
                operation.lease = self.client.new_lease()
                operation.message = m.Lookup(
                    session=self.client.session, request=operation.request_id, lease=operation.lease,
                    hashes=b"".join(hashes), wait=self._prefetch_timeout, account=account_id(salt),
                )  # fmt: skip
                self._asked.add(operation.request_id)
                operation.call = self.client.begin(operation.message)
        except (LMCacheError, ValueError, OverflowError) as exc:
            logger.debug("request %s: runs uncached: %s", operation.request_id, exc)
            return 0
        return size

    def poll(self, operation: LMCacheLookupOperation, chunk_size: int) -> tuple[int, bytes]:
        """Chunks found, or :data:`PENDING`; and what the ranks need to load them, for :func:`known_to_all`."""
        call = operation.call
        if call is None:
            return 0, b""
        if operation.message.session != self.client.session:  # the server that was asked is no more
            operation.call = None
            return 0, b""
        if not call.ready():
            return PENDING, b""
        operation.call = None
        try:
            found = expect(m.Found, call.result()[0])
            if found.pending:  # out of patience: whatever L1 holds by now
                message = operation.message
                known = len(message.hashes) // 32 + message.known
                operation.message = msgspec.structs.replace(message, hashes=b"", known=known, wait=-1.0)
                operation.call = self.client.begin(operation.message)
                return PENDING, b""
            self._check(found, len(operation.token_ids) // chunk_size)
        except LMCacheError as exc:
            logger.debug("request %s: runs uncached: %s", operation.request_id, exc)
            return 0, b""
        data = (operation.lease, found.epoch, chunk_size, found.slots)
        return found.chunks, msgspec.msgpack.encode(data) if found.chunks else b""

    def _check(self, found: m.Found, asked: int) -> None:
        if not 0 <= found.chunks <= asked:
            raise LMCacheError(f"lookup of {asked} chunks: the server answers that {found.chunks} are held")
        sizes = {len(slots) for rank in found.slots for slots in rank}
        if found.chunks and (sizes != {2 * found.chunks} or {len(r) for r in found.slots} != {self._groups}):
            raise LMCacheError(
                f"lookup: expected the slots of {found.chunks} chunks for {self._groups} groups"
            )

    def release(self, operation: LMCacheLookupOperation) -> None:
        """Give all ranks' pins of a lookup back. Harmless if they are not held any more."""
        if operation.lease:
            self.client.post(m.Release(session=self.client.session, leases=[operation.lease]))

    def end(self, request_id: str) -> None:
        """Give back whatever the server holds for a request, an unanswered lookup's included."""
        if request_id in self._asked:
            self._asked.discard(request_id)
            self.client.post(m.EndRequest(session=self.client.session, requests=[request_id]))

    @property
    def asked(self) -> list[str]:
        return list(self._asked)

    def clear(self) -> bool:
        """Drop everything that the server holds, of whichever engine; whether it did."""
        try:
            expect(m.Ok, self.client.call(m.Clear())[0])
        except LMCacheError as exc:
            logger.warning("the cache was not cleared: %s", exc)
            return False
        return True


def known_to_all(data: bytes, rank: int) -> Pinned | None:
    """One rank's part of what :meth:`Leader.poll` gave; None for nothing."""
    if not data:
        return None
    lease, epoch, chunk_size, slots = msgspec.msgpack.decode(data, type=tuple[int, str, int, list[Any]])
    return Pinned(lease, epoch, chunk_size, slots[rank])
