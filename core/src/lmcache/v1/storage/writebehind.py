"""Write-behind: what was published in L1 is written to the tiers below, first chunks first.

A write pins its object, so what waits for a tier is bounded in bytes; beyond that, and when a tier is down, a write is
dropped and counted: the object is still in L1, and is computed again when it is needed after that. Nothing is tried
twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.l2 import envelope
from lmcache.v1.storage.l2.adapter import Call, Put
from lmcache.v1.storage.l2.clock import Clock
from lmcache.v1.storage.l2.removals import Removal
from lmcache.v1.storage.l2.tier import Tier
from lmcache.v1.storage.l2.workers import Job
from lmcache.v1.storage.leases import Entry
from lmcache.v1.storage.shm_pool import PoolView

__all__ = ["WriteBehind", "Written"]


class Written:
    """What several sync tiers have yet to get. ``future`` has True once they all have it, False if one gave up."""

    def __init__(self) -> None:
        self.future: Future[bool] = Future()
        self.left = 0
        self.failed = False

    def resolve(self, result: bool) -> None:
        """Set the result, unless it is set. Without the lock: it calls back."""
        with suppress(InvalidStateError):
            self.future.set_result(result)


@dataclass(eq=False, slots=True)
class _Object:
    """A published object on its way down, for all tiers that are to get it."""

    entry: Entry
    left: int
    """Tiers that do not have it yet."""
    complete: bool = True
    """No tier gave up on it."""
    header: bytes = b""


@dataclass(eq=False, slots=True)
class _Lane:
    """One tier's part. Every field is guarded by the store's lock."""

    tier: Tier
    waiting: deque[_Object] = field(default_factory=deque)
    pending: dict[bytes, _Object] = field(default_factory=dict)
    """Waiting or under way."""
    pinned_bytes: int = 0
    """Of what waits, is under way, or hangs."""
    jobs: int = 0
    """Queued, not begun."""
    watchers: dict[bytes, list[Written]] = field(default_factory=dict)
    undo: dict[bytes, _Object] = field(default_factory=dict)
    """Under way, but deleted meanwhile: to be deleted there, too, once it is written."""

    @property
    def blocked(self) -> bool:
        """Whether the first of what waits has to go on waiting, and the rest with it, in order: it was published after
        one of its key that is still to be deleted, and would go with that."""
        if not self.waiting:
            return False
        entry = self.waiting[0].entry
        return entry.key in self.undo or self.tier.removals.cover(entry.key, entry.account)

    def lacks(self, entry: Entry) -> bool:
        """Whether an object is to be written, and is not on its way yet."""
        coming = self.pending.get(entry.key)
        if coming is not None:
            return self.undo.get(entry.key) is coming
        return self.tier.needs(entry.key, entry.account)


class WriteBehind:
    """Writes to every tier.

    Args:
        lock: the store's.
        queue_bytes: what writes of one tier may pin.
        demote: whether what all tiers have becomes the first to leave L1.
        namespace_of: a namespace by its digest, for the header; people like to know.
    """

    def __init__(
        self,
        l1: L1Cache,
        view: PoolView,
        tiers: Sequence[Tier],
        lock: threading.Lock,
        clock: Clock,
        queue_bytes: int,
        demote: bool,
        namespace_of: Callable[[bytes], Namespace | None],
    ) -> None:
        self._l1 = l1
        self._view = view
        self._lock = lock
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._demote = demote
        self._namespace_of = namespace_of
        self._lanes = {tier.name: _Lane(tier) for tier in tiers}
        self._idle = threading.Condition(lock)
        for lane in self._lanes.values():
            lane.tier.on_removed = partial(self._go_on, lane)

    # ---- with the lock held

    def queue(self, keys: Iterable[bytes], tiers: Iterable[Tier]) -> None:
        """Write what L1 has of ``keys`` to those of ``tiers`` that do not have it."""
        entries = [entry for key in dict.fromkeys(keys) if (entry := self._l1.get(key)) is not None]
        entries.sort(key=lambda entry: entry.depth)
        lanes = [self._lanes[tier.name] for tier in tiers if tier.writes]
        for entry in entries:
            takers = [lane for lane in lanes if lane.lacks(entry)]
            item = _Object(entry, len(takers))
            if self._demote and not takers and not any(entry.key in lane.pending for lane in lanes):
                self._l1.demote([entry.key])
            for lane in takers:
                if (
                    not lane.tier.workers.usable("write")
                    or lane.pinned_bytes + entry.size > self._queue_bytes
                ):
                    lane.tier.count(dropped=1)
                    item.complete = False
                    continue
                self._l1.pin_entries([entry])
                lane.pinned_bytes += entry.size
                lane.pending[entry.key] = item
                lane.waiting.append(item)
        for lane in lanes:
            self._kick(lane)

    def watch(self, keys: Iterable[bytes], seconds: float) -> Future[bool] | None:
        """What has the end of the writes of ``keys`` to sync tiers, at the latest after ``seconds``; None if there
        are none."""
        written = Written()
        for lane in self._lanes.values():
            if lane.tier.sync:
                for key in keys:
                    if key in lane.pending:
                        lane.watchers.setdefault(key, []).append(written)
                        written.left += 1
        if not written.left:
            return None
        alarm = self._clock.after(seconds, lambda: written.resolve(False))
        written.future.add_done_callback(lambda _: alarm.cancel())
        return written.future

    def forget(self, removal: Removal, tiers: Iterable[Tier]) -> None:
        """Take back writes. Those under way are undone once they are done."""
        ended: list[Written] = []
        for lane in (self._lanes[tier.name] for tier in tiers):
            waiting, lane.waiting = lane.waiting, deque()
            for item in waiting:
                if removal.covers(item.entry.key, item.entry.account):
                    ended += self._over(lane, item, False)
                    self._unpin(lane, item)
                else:
                    lane.waiting.append(item)
            waits = {item.entry.key for item in lane.waiting}
            for key, item in lane.pending.items():
                if key not in waits and removal.covers(key, item.entry.account):
                    lane.undo[key] = item
            self._kick(lane)  # what is first now may go, unlike what was
        self._tell_soon(ended)

    def waiting(self, tier: Tier) -> dict[str, int]:
        """For status."""
        lane = self._lanes[tier.name]
        return {"queued_objects": len(lane.pending), "queued_bytes": lane.pinned_bytes}

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way; what hangs is not counted."""
        return not any(lane.pending for lane in self._lanes.values())

    # ---- without it

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written or given up; False: not yet."""
        until = time.monotonic() + seconds
        with self._lock:
            while not self.idle:
                left = until - time.monotonic()
                if left <= 0 or not self._idle.wait(left):
                    return self.idle
        return True

    # ---- one batch

    def _kick(self, lane: _Lane) -> None:
        """Lock held: as many jobs as there are batches, at most as many as can run."""
        if lane.blocked:
            return
        most = max(1, lane.tier.adapter.threads)
        while lane.jobs < min(most, -(-len(lane.waiting) // lane.tier.batch)):
            if not lane.tier.workers.submit(self._job(lane)):
                break
            lane.jobs += 1
        if lane.waiting and not lane.jobs:  # the tier went down just now
            self._give_up(lane)

    def _go_on(self, lane: _Lane) -> None:
        """Without the lock: what waited for a deletion need not wait any more."""
        with self._lock:
            self._kick(lane)

    def _give_up(self, lane: _Lane) -> None:
        """Lock held: nothing of what waits will be written."""
        ended: list[Written] = []
        while lane.waiting:
            item = lane.waiting.popleft()
            lane.tier.count(dropped=1)
            ended += self._over(lane, item, False)
            self._unpin(lane, item)
        self._tell_soon(ended)

    def _tell_soon(self, ended: Sequence[Written]) -> None:
        """Lock held, so that nobody can be told now."""
        for written in ended:
            self._clock.after(0, partial(written.resolve, not written.failed))

    def _job(self, lane: _Lane) -> Job:
        batch: list[_Object] = []
        pinned: list[_Object] = []
        late: list[bytes] = []
        """Deleted while a call hung, which may store them yet."""
        begun = False

        def start() -> bool:
            nonlocal begun
            with self._lock:
                begun = True
                lane.jobs -= 1
                while lane.waiting and len(batch) < lane.tier.batch:
                    entry = lane.waiting[0].entry
                    if entry.key in lane.undo or not lane.tier.removals.admits(entry.key, entry.account):
                        break
                    batch.append(lane.waiting.popleft())
                pinned.extend(batch)
            return bool(batch)

        def run(call: Call) -> list[bool]:
            return lane.tier.store([self._put(item) for item in batch], call)

        def end(stored: list[bool] | None) -> None:
            ended: list[Written] = []
            with self._lock:
                if not begun:
                    lane.jobs -= 1
                    self._give_up(lane)
                if stored is None:
                    lane.tier.count(failed=len(batch))
                for item, has in zip(batch, stored or [False] * len(batch), strict=True):
                    ended += self._over(lane, item, has)
                if job.returned:  # at once, so that nothing is pinned when the last write is over
                    unpin()
                else:  # what waits is not to wait for a call that hangs
                    self._kick(lane)
                undo = [item.entry.key for item in batch if lane.undo.get(item.entry.key) is item]
                late.extend(() if job.returned else undo)
                removal = Removal.of(undo)
                if undo:
                    lane.tier.removals.begin(removal)  # before the next write may begin
                for key in undo:
                    del lane.undo[key]
                if self._demote:
                    done = [item.entry.key for item in reversed(batch) if item.complete and not item.left]
                    self._l1.demote(done)
            if undo:
                lane.tier.delete_later(undo)
                lane.tier.removals.end(removal)
                self._go_on(lane)
            for written in ended:
                written.resolve(not written.failed)

        def unpin() -> None:
            lane.tier.removals.returned(item.entry.key for item in pinned)
            while pinned:
                self._unpin(lane, pinned.pop())

        def let_go() -> None:
            with self._lock:
                unpin()
                self._kick(lane)
            if late:
                lane.tier.delete_later(late)

        job = Job("write", lane.tier.store_seconds, run, end, start, let_go)
        return job

    def _put(self, item: _Object) -> Put:
        entry = item.entry
        payload = self._view.data[entry.offset : entry.offset + entry.size]
        if not item.header:
            item.header = envelope.pack(
                envelope.ObjectInfo(
                    entry.key,
                    entry.size,
                    envelope.checksum(payload),
                    int(time.time()),
                    entry.account,
                    self._namespace_of(entry.key[:DIGEST_BYTES]),
                )
            )
        return Put(entry.key, item.header, payload)

    def _over(self, lane: _Lane, item: _Object, has: bool) -> list[Written]:
        """Lock held: a tier has an object, or gave up; whose wait ends with that."""
        item.left -= has
        item.complete = item.complete and has
        ended = []
        current = (
            lane.pending.get(item.entry.key) is item
        )  # else it was published anew, and that one is to come
        if current:
            del lane.pending[item.entry.key]
        for written in lane.watchers.pop(item.entry.key, ()) if current else ():
            written.left -= 1
            written.failed = written.failed or not has
            if not written.left:
                ended.append(written)
        if not lane.pending:
            self._idle.notify_all()
        return ended

    def _unpin(self, lane: _Lane, item: _Object) -> None:
        self._l1.unpin_entries([item.entry])
        lane.pinned_bytes -= item.entry.size
