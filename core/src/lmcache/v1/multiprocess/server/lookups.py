"""Lookups: what L1 holds, pinned at once, and what the tiers below hold, fetched first.

All methods are called under the server's lock. A lookup that waits for tiers is *pending* under the lease id that its
client chose: nothing is pinned for the client yet, but what the fetch brought stays pinned by the fetch itself until
the client has its pins, so nothing is lost in between. Who never comes back for it loses it after a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.server.devices import Later
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.sessions import Engine, Session
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.tiers import Prefetch, TieredStore

__all__ = ["MAX_WAIT_SECONDS", "Chain", "Lookups"]

MAX_WAIT_SECONDS = 60.0
"""What a client may ask a lookup to wait at most."""
_UNCLAIMED_SECONDS = 10.0
"""After which what was fetched is given up if nobody asks for it."""
_NEVER = float("inf")

Rows = Sequence[Sequence[tuple[bytes, int]]]


@dataclass(frozen=True, slots=True)
class Chain:
    """What a lookup is about: keys by rank and KV group, in chain order, and the size of each column's objects."""

    columns: Mapping[int, Sequence[Sequence[bytes]]]
    sizes: Sequence[int]
    """Of the columns of all ranks, in the order of ``columns``."""

    @classmethod
    def of(cls, engine: Engine, hashes: Sequence[bytes]) -> Chain:
        """The chain of chunks ``hashes`` for all ranks of an engine."""
        sizes = [ns.object_bytes for groups in engine.namespaces.values() for _, ns in groups]
        return cls(engine.columns(hashes), sizes)

    @property
    def flat(self) -> list[Sequence[bytes]]:
        return [column for mine in self.columns.values() for column in mine]

    def held(self, l1: L1Cache) -> int:
        """Leading chunks that L1 holds for every rank and group."""
        return l1.prefix_length(zip(*self.flat, strict=True))

    def rows(self) -> Rows:
        """Per chunk, key and size of every rank's and group's object."""
        return [list(zip(keys, self.sizes, strict=True)) for keys in zip(*self.flat, strict=True)]


@dataclass(slots=True)
class _Pending:
    """A lookup whose fetch is under way, or done and not asked for yet."""

    session: str
    owner: str
    ranks: int
    request: str
    lease: int
    chain: Chain
    prefetch: Prefetch | None = None
    until: float = _NEVER
    """When to answer ``later`` in any case; without one, when to give up. ``time.monotonic``."""
    later: Later | None = None


@dataclass(slots=True)
class _Warming:
    """A fetch for nobody in particular; ``tell`` is called once when it ends or its time is up."""

    last: bytes = b""
    """Key of the last chunk, for a fetch that should not be begun twice."""
    prefetch: Prefetch | None = None
    until: float = _NEVER
    tell: Callable[[], None] | None = None


@dataclass(slots=True)
class Lookups:
    """The lookups of all sessions.

    Args:
        store: L1 and the tiers below it.
        lock: the server's, for ends of fetches.
        fetch_seconds: limit of one fetch.
    """

    store: TieredStore
    lock: threading.Lock
    metrics: Metrics
    epoch: str
    chunk_size: int
    fetch_seconds: float
    _pending: dict[tuple[str, int], _Pending] = field(default_factory=dict)
    _warming: list[_Warming] = field(default_factory=list)
    next_deadline: float = _NEVER
    """When :meth:`expire` has something to do, or earlier; ``time.monotonic``."""

    # ---- for engines

    def lookup(
        self, session: Session, engine: Engine, msg: m.Lookup, hashes: Sequence[bytes], later: Later
    ) -> m.Reply | None:
        """Answer a lookup of ``hashes``, the chain from ``msg.start`` on.

        Raises:
            Refused: if the lease id is another request's.
        """
        found = self._pending.get((session.engine, msg.lease))
        if found is not None:
            if (found.session, found.request) != (session.id, msg.request) or found.later is not None:
                raise Refused("lease_gone", f"lease {msg.lease}: in use by another lookup; take a new id")
            return self._go_on(found, msg.wait, later)
        self._count(len(hashes))
        if not engine.complete:
            return m.Found(epoch=self.epoch, chunks=0)
        chain = Chain.of(engine, hashes)
        pending = _Pending(session.id, session.engine, engine.ranks, msg.request, msg.lease, chain)
        if self.store.names and chain.held(self.store.l1) < len(hashes):
            if msg.wait < 0:
                self._fetch_behind(chain, msg.account)
            else:
                pending.prefetch = self.store.prefetch(
                    chain.rows(), msg.account, self.fetch_seconds, lambda: self._fetched(pending)
                )
        if pending.prefetch is None:
            return self._settle(pending)
        self._pending[pending.owner, pending.lease] = pending
        return self._go_on(pending, msg.wait, later)

    def _count(self, chunks: int) -> None:
        self.metrics.lookups.inc()
        self.metrics.lookup_tokens.inc(chunks * self.chunk_size)

    def _go_on(self, pending: _Pending, wait: float, later: Later) -> m.Reply | None:
        done = pending.prefetch is None or pending.prefetch.done
        if done or not wait >= 0:  # not a number: it does not wait
            return self._settle(pending)
        now = time.monotonic()
        if wait == 0:
            self._set_until(pending, now + self.fetch_seconds + _UNCLAIMED_SECONDS)
            return m.Found(epoch=self.epoch, chunks=0, pending=True)
        self._set_until(pending, now + min(wait, MAX_WAIT_SECONDS))
        pending.later = later
        return None

    def _settle(self, pending: _Pending) -> m.Found:
        """Pin what L1 holds now for the client; the fetch's own pins end after that."""
        self._pending.pop((pending.owner, pending.lease), None)
        l1, chunks = self.store.l1, pending.chain.held(self.store.l1)
        slots: list[list[list[int]]] = []
        if chunks:
            hit = {rank: [column[:chunks] for column in mine] for rank, mine in pending.chain.columns.items()}
            held = l1.pin(pending.owner, pending.lease, pending.session, pending.request, hit)
            self.metrics.hit_tokens.inc(chunks * self.chunk_size)
            slots = [
                [
                    [word for entry in column for word in (entry.offset, entry.generation)]
                    for column in held[rank]
                ]
                for rank in range(pending.ranks)
            ]
        if pending.prefetch is not None:
            pending.prefetch.release()
        return m.Found(epoch=self.epoch, chunks=chunks, slots=slots)

    def _fetched(self, pending: _Pending) -> None:
        """The fetch of a lookup has ended. From any thread, without the lock."""
        with self.lock:
            if self._pending.get((pending.owner, pending.lease)) is pending and pending.later is not None:
                later = pending.later
                later(self._settle(pending))

    # ---- for nobody in particular

    def _fetch_behind(self, chain: Chain, account: str) -> None:
        """Let the next lookup find in L1 what this one, which does not wait, misses."""
        last = chain.flat[0][-1]
        if not any(warming.last == last for warming in self._warming):
            self._warm(chain.rows(), account, self.fetch_seconds, None, last)

    def warm(
        self, namespaces: Mapping[bytes, Namespace], keys: Callable[[bytes], Sequence[bytes]], account: str,
        wait: float, done: Callable[[], None],
    ) -> bool:  # fmt: skip
        """Fetch ``keys(digest)`` of each namespace; ``done`` is called once all ended, or after ``wait`` seconds.

        Returns:
            False if there is nothing to fetch; then ``done`` is not called.
        """
        left = 0

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for digest, ns in namespaces.items():
            rows = [[(key, ns.object_bytes)] for key in keys(digest)]
            left += self._warm(rows, account, wait, one_ended)
        return left > 0

    def _warm(
        self, rows: Rows, account: str, wait: float, tell: Callable[[], None] | None, last: bytes = b""
    ) -> bool:
        warming = _Warming(last=last, tell=tell)

        def ended() -> None:
            with self.lock:
                self._cooled(warming)

        warming.prefetch = self.store.prefetch(rows, account, self.fetch_seconds, ended)
        if warming.prefetch is None:
            return False
        self._warming.append(warming)
        self._set_until(warming, time.monotonic() + wait)
        return True

    def _cooled(self, warming: _Warming) -> None:
        if warming in self._warming:
            self._warming.remove(warming)
            if warming.prefetch is not None:
                warming.prefetch.release()
            self._tell(warming)

    @staticmethod
    def _tell(warming: _Warming) -> None:
        tell, warming.tell, warming.until = warming.tell, None, _NEVER
        if tell is not None:
            tell()

    # ---- ends

    def release(self, owner: str, lease: int) -> None:
        """Give a pending lookup up, whoever still waits for its answer."""
        pending = self._pending.pop((owner, lease), None)
        if pending is None:
            return
        if pending.prefetch is not None:
            pending.prefetch.release()
        if pending.later is not None:
            later, pending.later = pending.later, None
            later(m.Error(code="lease_gone", message=f"lease {lease}: given back while it was looked up"))

    def drop(self, owner: str, request: str | None = None, session: str = "") -> None:
        """Give up the pending lookups of a request of an engine, or of a session."""
        for pending in list(self._pending.values()):
            mine = pending.session == session if session else pending.owner == owner
            if mine and request in (None, pending.request):
                self.release(pending.owner, pending.lease)

    def finish(self) -> None:
        """The server stops: who waits gets what L1 holds, and nothing is fetched any more."""
        for pending in list(self._pending.values()):
            if pending.later is not None:
                later = pending.later
                later(self._settle(pending))
            else:
                self.release(pending.owner, pending.lease)
        for warming in list(self._warming):
            self._cooled(warming)

    # ---- time

    def _set_until(self, item: _Pending | _Warming, until: float) -> None:
        item.until = until
        self.next_deadline = min(self.next_deadline, until)

    def expire(self, now: float) -> None:
        """Answer those who waited long enough; give up what nobody asks for."""
        for pending in [p for p in self._pending.values() if p.until <= now]:
            later, pending.later = pending.later, None
            if later is None:
                self.release(pending.owner, pending.lease)
            else:
                pending.until = now + self.fetch_seconds + _UNCLAIMED_SECONDS
                later(m.Found(epoch=self.epoch, chunks=0, pending=True))
        for warming in [w for w in self._warming if w.until <= now]:
            self._tell(warming)
        items: list[_Pending | _Warming] = [*self._pending.values(), *self._warming]
        self.next_deadline = min((item.until for item in items), default=_NEVER)
