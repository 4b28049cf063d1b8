"""Objects that other servers read from this one's L1: pinned for a bounded time, sent in frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.server.checks import joined_keys
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.l2.envelope import checksum
from lmcache.v1.storage.leases import Entry
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)

Later: TypeAlias = "Callable[[m.Reply], None]"

MAX_SECONDS = 60.0
"""For which a pull pins at most."""
_MAX_OPEN = 1024
"""Pulls at once. Each may name thousands of objects, and many may pin the same."""


@dataclass(slots=True)
class _Pull:
    entries: list[Entry | None]
    deadline: float
    nbytes: int


class Pulls:
    """The pulls of all peers; called under the server's lock.

    Args:
        view, l1, lock: the pool, its index, and the server's lock.
        limit_bytes: most bytes of L1 that pulls may pin; 0: half of it.
    """

    def __init__(
        self, view: PoolView, l1: L1Cache, lock: threading.Lock, metrics: Metrics, limit_bytes: int
    ) -> None:
        self._view, self._l1, self._lock, self._metrics = view, l1, lock, metrics
        self._limit = limit_bytes or view.data_bytes // 2
        self._open: dict[tuple[str, int], _Pull] = {}
        self._pinned = 0
        self._hashing = ThreadPoolExecutor(2, "lmcache-pull")

    def find(self, msg: p.PeerFind) -> m.Reply:
        """What is there."""
        return p.PeerFound(held=[key in self._l1 for key in joined_keys(msg.keys)])

    def open(self, msg: p.PullOpen, later: Later) -> m.Reply | None:
        """Pin, hash without the lock, answer. Beyond the limits nothing is there."""
        keys = joined_keys(msg.keys)
        if not 0 < msg.seconds <= MAX_SECONDS:
            raise Refused("bad_request", f"pull for {msg.seconds} s: expected 0 to {MAX_SECONDS:g}")
        owner = _owner(msg.session)
        there = [key for key in keys if key in self._l1]
        if self._l1.is_used_up(owner, msg.lease):
            raise Refused("lease_gone", f"lease {msg.lease}: given back before, or in use; take a new id")
        held = self._l1.pin(owner, msg.lease, owner, "", {0: [there]})[0][0]
        pinned = sum(entry.size for entry in held)
        if not held or pinned > self._limit - self._pinned or len(self._open) >= _MAX_OPEN:
            self._l1.release(owner, msg.lease)
            return p.Pulled(sizes=[-1] * len(keys), checksums=[0] * len(keys))
        self._pinned += pinned
        by_key = {entry.key: entry for entry in held}
        entries = [by_key.get(key) for key in keys]
        self._open[msg.session, msg.lease] = _Pull(entries, time.monotonic() + msg.seconds, pinned)
        self._hashing.submit(self._answer, entries, later)
        return None

    def _answer(self, entries: Sequence[Entry | None], later: Later) -> None:
        # The pins may be gone before this is done: then the sums are wrong, and nobody takes the bytes for right.
        data = self._view.data
        sums = [checksum(data[e.offset : e.offset + e.size]) if e is not None else 0 for e in entries]
        later(p.Pulled(sizes=[-1 if e is None else e.size for e in entries], checksums=sums))

    def read(self, msg: p.PullRead) -> tuple[m.Reply, Sequence[memoryview]]:
        """A piece of an object."""
        pull = self._open.get((msg.session, msg.lease))
        entry = pull.entries[msg.index] if pull and 0 <= msg.index < len(pull.entries) else None
        if entry is None:
            raise Refused("lease_gone", f"pull {msg.lease}: object {msg.index} is not pinned (any more)")
        if not (
            msg.offset >= 0 and 1 <= msg.length <= m.PIECE_BYTES and msg.offset + msg.length <= entry.size
        ):
            raise Refused(
                "bad_request", f"read of {msg.length} bytes at {msg.offset}: the object has {entry.size}"
            )
        start = entry.offset + msg.offset
        self._metrics.read_bytes.inc(msg.length)
        return m.Ok(), (self._view.data[start : start + msg.length],)

    def close(self, msg: p.PullClose) -> m.Reply:
        """Unpin, also what has not come yet."""
        for lease in msg.leases:
            self._close(msg.session, lease)
        return m.Ok()

    def drop(self, session: str) -> None:
        """The session's end."""
        for _, lease in [place for place in self._open if place[0] == session]:
            self._close(session, lease)

    def sweep(self) -> None:
        """Unpin what was pinned for long enough."""
        now = time.monotonic()
        for place in [place for place, pull in self._open.items() if pull.deadline <= now]:
            self._close(*place)

    def shut(self) -> None:
        """Let hashing end."""
        self._hashing.shutdown(wait=True, cancel_futures=True)

    @property
    def count(self) -> int:
        return len(self._open)

    def _close(self, session: str, lease: int) -> None:
        if (pull := self._open.pop((session, lease), None)) is not None:
            self._pinned -= pull.nbytes
        self._l1.release(_owner(session), lease)


def _owner(session: str) -> str:
    return f"pull:{session}"
