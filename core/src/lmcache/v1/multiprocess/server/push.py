"""Objects that other servers push into this one's L1: admission, writes in frames, verification, the end.

A push has an internal write lease of L1, under an owner that no message of a client can name. It is published only
after its bytes were hashed here, without the lock, and the hash is the one that the pusher named. A push that its
client writes itself (NIXL) and that does not end by a commit or a certain abort goes to the limbo: its memory stays
taken for :data:`STRAY_SECONDS`, in which what is still on its way arrives. Its client's connection is gone by then.

All methods are called under the server's lock, which the threads here take, too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.server.checks import check_push
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l1 import FULL, L1Cache
from lmcache.v1.storage.l2.envelope import checksum
from lmcache.v1.storage.leases import Reservation, Tombstones
from lmcache.v1.storage.shm_pool import PAGE, PoolView

logger = init_logger(__name__)

Later: TypeAlias = "Callable[[m.Reply], None]"

STRAY_SECONDS = 5.0
"""For which the memory of a direct push stays taken after its client's connection is gone."""
_MAX_WAITING = 64
_LOOK_SECONDS = 0.02
"""Between looks for room, while somebody waits for it."""


@dataclass(slots=True)
class _Push:
    session: str
    lease: int
    """L1's id of it; the client's is the key in the table."""
    items: list[Reservation]
    direct: bool
    nbytes: int = 0
    """Of L1 that it holds, whole pages."""
    sealed: bool = False
    """Committed: nothing is written to it any more."""
    leaves: float = 0.0
    """In limbo: when its memory is free (monotonic)."""

    @property
    def owner(self) -> str:
        return f"push:{self.session}"


@dataclass(slots=True)
class _Waiting:
    msg: p.PushReserve
    deadline: float
    later: Later


class Pushes:
    """The pushes of all peers.

    Args:
        view, l1, lock: the pool, its index, and the server's lock.
        limit_bytes: most bytes of L1 that pushes may hold that are not published yet; 0: half of it.
        published: told, under the lock, the keys of what was published.
    """

    def __init__(
        self,
        epoch: str,
        view: PoolView,
        l1: L1Cache,
        lock: threading.Lock,
        metrics: Metrics,
        limit_bytes: int,
        published: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._epoch, self._view, self._l1, self._lock, self._metrics = epoch, view, l1, lock, metrics
        self._limit = limit_bytes or view.data_bytes // 2
        self._published = published
        self._ids = itertools.count(1)
        self._open: dict[tuple[str, int], _Push] = {}
        self._limbo: list[_Push] = []
        self._reserved = 0
        self._waiting: list[_Waiting] = []
        self._gone = Tombstones()
        self._looking = False
        self._hashing = ThreadPoolExecutor(2, "lmcache-push")
        self._closed = threading.Event()

    # ---- admission

    def reserve(self, msg: p.PushReserve, later: Later) -> m.Reply | None:
        """Room now, or ``later``."""
        check_push(msg)
        place = (msg.session, msg.lease)
        if place in self._gone or place in self._open or self._find_waiting(place) is not None:
            raise Refused("lease_gone", f"lease {msg.lease}: given back before, or in use; take a new id")
        hopeless = sum(map(_rounded, msg.sizes)) > min(self._limit, self._view.data_bytes)
        last = not msg.wait or hopeless or len(self._waiting) >= _MAX_WAITING
        reply = self._admit(msg, last)
        if reply is None:
            self._waiting.append(_Waiting(msg, time.monotonic() + msg.wait, later))
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look_for_room, name="lmcache-push-room", daemon=True).start()
        return reply

    def _admit(self, msg: p.PushReserve, last: bool) -> m.Reply | None:
        """Room for what there is room for; None if that is not everything and it is not the ``last`` try."""
        objects = list(zip(p.split_keys(msg.keys), msg.sizes, strict=True))
        wanted: list[tuple[bytes, int]] = []
        taken = self.reserved_bytes
        for key, size in objects:
            new = 0 if self.holds(key) else _rounded(size)
            if taken + new <= self._limit:
                wanted.append((key, size))
                taken += new
        if len(wanted) < len(objects) and not last:
            return None
        push = _Push(msg.session, next(self._ids), [], msg.direct)
        found = self._l1.reserve(push.owner, push.lease, [wanted], msg.direct, msg.account)[0]
        if not last and (FULL, 0) in found:
            self._l1.abort(push.owner, push.lease)
            return None
        push.items = self._l1.reserved(push.owner, push.lease)
        if push.items:
            push.nbytes = sum(_rounded(item.size) for item in push.items)
            self._reserved += push.nbytes
            self._open[msg.session, msg.lease] = push
        else:
            self._l1.abort(push.owner, push.lease)
            self._gone.add(msg.session, msg.lease)
        slots = dict(zip([key for key, _ in wanted], found, strict=True))
        row = [word for key, _ in objects for word in slots.get(key, (FULL, 0))]
        self._metrics.push_refused.inc(row[::2].count(FULL))
        return m.Reserved(epoch=self._epoch, slots=[row])

    def _look_for_room(self) -> None:
        seen: object = None
        while True:
            answers = []
            with self._lock:
                now = time.monotonic()
                # Only what other requests change makes room: without a change, a look is not worth the evictions.
                changed = seen != (seen := (*self._l1.usage().values(), self.reserved_bytes))
                for waiting in list(self._waiting):
                    late = now >= waiting.deadline or self._closed.is_set()
                    reply = self._admit(waiting.msg, late) if late or changed else None
                    if reply is not None:
                        self._waiting.remove(waiting)
                        answers.append((waiting.later, reply))
                seen = (*self._l1.usage().values(), self.reserved_bytes)
                self._looking = bool(self._waiting)
                goes_on = self._looking
            for later, reply in answers:
                later(reply)
            if not goes_on:
                return
            self._closed.wait(_LOOK_SECONDS)

    def _find_waiting(self, place: tuple[str, int]) -> _Waiting | None:
        return next((w for w in self._waiting if (w.msg.session, w.msg.lease) == place), None)

    # ---- bytes

    def write(self, msg: p.PushWrite, payload: Sequence[memoryview]) -> m.Reply:
        """Bytes that came in a frame."""
        push = self._owned(msg.session, msg.lease)
        if not 0 <= msg.index < len(push.items) or len(payload) != 1:
            raise Refused(
                "bad_request",
                f"write to object {msg.index} with {len(payload)} payload frames: the push has {len(push.items)}",
            )
        item, data = push.items[msg.index], payload[0]
        if msg.offset < 0 or msg.offset + len(data) > item.size:
            raise Refused(
                "bad_request", f"write of {len(data)} bytes at {msg.offset}: the object has {item.size}"
            )
        start = item.offset + msg.offset
        self._view.data[start : start + len(data)] = data
        self._metrics.written_bytes.inc(len(data))
        return m.Ok()

    def commit(self, msg: p.PushCommit, later: Later) -> None:
        """Hash what is to be published, publish it, answer."""
        push = self._owned(msg.session, msg.lease)
        count = len(set(msg.indexes))
        if count != len(msg.indexes) or count != len(msg.checksums):
            raise Refused(
                "bad_request",
                f"commit of {len(msg.indexes)} objects with {len(msg.checksums)} checksums: expected distinct"
                " objects with one checksum each",
            )
        if count and not 0 <= min(msg.indexes) <= max(msg.indexes) < len(push.items):
            raise Refused(
                "bad_request",
                f"commit of objects {min(msg.indexes)} to {max(msg.indexes)}: the push has {len(push.items)}",
            )
        push.sealed = True
        self._hashing.submit(self._verify, push, msg, later)

    def _verify(self, push: _Push, msg: p.PushCommit, later: Later) -> None:
        try:
            reply = self._publish(push, msg, self._matching(push, msg))
        except Exception as exc:  # the pusher waits for an answer, whatever happens to us
            logger.exception("commit of a push failed")
            reply = m.Error(code="internal", message=f"PushCommit: {type(exc).__name__}: {exc}")
        later(reply)

    def _matching(self, push: _Push, msg: p.PushCommit) -> set[int]:
        """Indexes whose bytes are those that the pusher means. If it aborts meanwhile, nothing comes of them."""
        good = set()
        for index, expected in zip(msg.indexes, msg.checksums, strict=True):
            item = push.items[index]
            if checksum(self._view.data[item.offset : item.offset + item.size]) == expected:
                good.add(index)
        return good

    def _publish(self, push: _Push, msg: p.PushCommit, good: set[int]) -> m.Reply:
        with self._lock:
            if self._open.get((msg.session, msg.lease)) is not push:
                return m.Error(
                    code="lease_gone", message=f"push {msg.lease}: given back before it was verified"
                )
            del self._open[msg.session, msg.lease]
            self._reserved -= push.nbytes
            self._gone.add(msg.session, msg.lease)
            before = {i for i in good if self.holds(push.items[i].key)}
            self._metrics.stored_objects.inc(self._l1.commit(push.owner, push.lease, sorted(good)))
            new = [push.items[i] for i in msg.indexes if i in good and i not in before]
            self._metrics.pushed_objects.inc(len(new))
            self._metrics.pushed_bytes.inc(sum(item.size for item in new))
            self._metrics.push_damaged.inc(len(msg.indexes) - len(good))
            self._published([item.key for item in new])
        if len(good) < len(msg.indexes):
            logger.warning("%d pushed objects dropped: their bytes differ", len(msg.indexes) - len(good))
        return p.Pushed(results=[(2 if i in before else 1) if i in good else 0 for i in msg.indexes])

    # ---- ends

    def abort(self, msg: p.PushAbort) -> m.Reply:
        """Give back, also what has not come yet."""
        for lease in msg.leases:
            place = (msg.session, lease)
            self._gone.add(*place)
            if (waiting := self._find_waiting(place)) is not None:
                self._forget(waiting)
            if (push := self._open.pop(place, None)) is not None:
                self._free(push, msg.over)
        return m.Ok()

    def drop(self, session: str) -> None:
        """The session's end."""
        for waiting in [w for w in self._waiting if w.msg.session == session]:
            self._forget(waiting)
        for place in [place for place in self._open if place[0] == session]:
            self._free(self._open.pop(place), over=False)

    def sweep(self) -> None:
        """Free what has been in limbo for long enough."""
        now = time.monotonic()
        for push in [push for push in self._limbo if push.leaves <= now]:
            self._limbo.remove(push)
            self._end(push)

    def _forget(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        text = f"push {waiting.msg.lease}: given back while it waited for room"
        waiting.later(m.Error(code="lease_gone", message=text))

    def _free(self, push: _Push, over: bool) -> None:
        if push.direct and not over:
            push.leaves = time.monotonic() + STRAY_SECONDS
            self._limbo.append(push)
        else:
            self._end(push)

    def _end(self, push: _Push) -> None:
        self._reserved -= push.nbytes
        self._l1.abort(push.owner, push.lease)

    def close(self) -> None:
        """Answer those who wait, and let hashing end."""
        self._closed.set()
        self._hashing.shutdown(wait=True, cancel_futures=True)

    # ---- what there is

    def holds(self, key: bytes) -> bool:
        """Whether L1 has published it."""
        return key in self._l1

    def has_direct(self, session: str = "") -> bool:
        """Whether anything (of a session) may be written by others than this server now. Needs no lock."""
        if not session and self._limbo:
            return True
        return any(push.direct and session in ("", push.session) for push in list(self._open.values()))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of L1 that pushes hold and that are not published. Counted, for there may be many pushes."""
        return self._reserved

    def state(self) -> dict[str, object]:
        """For status."""
        return {
            "open": len(self._open),
            "waiting": len(self._waiting),
            "limbo": len(self._limbo),
            "reserved_bytes": self.reserved_bytes,
            "limit_bytes": self._limit,
        }

    def _owned(self, session: str, lease: int) -> _Push:
        push = self._open.get((session, lease))
        if push is None or push.sealed:
            raise Refused("lease_gone", f"push {lease}: not held (any more)")
        return push


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
