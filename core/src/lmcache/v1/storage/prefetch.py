"""Prefetch: objects of the tiers below, brought into L1 for somebody who waits, but only until a deadline.

Every missing object is one *load*, shared by all who wait for it. It goes from tier to tier, in order: an engine of
our own is asked only for what its index names, a shared one first whether it has it. The memory it is loaded into is
a reservation that nobody can find; it is published after the object was verified, and stays taken as long as the
adapter may still write to it. An object that no tier gives ends the prefix there, for all who wait for it: what lies
behind is not loaded any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from lmcache.logging import init_logger
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.l2.adapter import Call, Want
from lmcache.v1.storage.l2.clock import Alarm, Clock
from lmcache.v1.storage.l2.envelope import ObjectInfo
from lmcache.v1.storage.l2.removals import Removal
from lmcache.v1.storage.l2.tier import Tier
from lmcache.v1.storage.l2.workers import Job
from lmcache.v1.storage.leases import Entry, Reservation
from lmcache.v1.storage.shm_pool import PoolView

__all__ = ["Loader", "Prefetch"]

logger = init_logger(__name__)

Rows = Sequence[Sequence[tuple[bytes, int]]]


class Prefetch:
    """A prefix on its way into L1. Read and called with the store's lock held.

    ``done``: nothing more comes. ``chunks`` leading rows are in L1 then, pinned until :meth:`release`.
    """

    def __init__(self, loader: Loader, rows: Rows, on_done: Callable[[], None]) -> None:
        self.done = False
        self.chunks = 0
        self._loader = loader
        self._on_done = on_done
        self._rows = [[key for key, _ in row] for row in rows]
        self._pinned: dict[bytes, Entry] = {}
        self._missing: dict[bytes, int] = {}
        """Row of each object that is still to come."""
        self._loaded: set[bytes] = set()
        """What was not in L1 before."""
        self._alarm: Alarm | None = None

    @property
    def most(self) -> int:
        """Leading rows that may be in L1 in the end."""
        return self.chunks if self.done else len(self._rows)

    def release(self) -> None:
        """Unpin; before it is done also cancel: ``on_done`` is not called any more, unless that call has begun
        already. Idempotent."""
        self._loader.release(self)


@dataclass(eq=False, slots=True)
class _Load:
    key: bytes
    size: int
    account: str
    depth: int
    tiers: list[Tier]
    """Still to be tried; the first of them now."""
    found: bool = False
    """The first of them said that it has it."""
    waiters: dict[Prefetch, None] = field(default_factory=dict)
    job: Job | None = None
    """Queued or under way, at the first of its tiers."""
    batch: list[_Load] = field(default_factory=list)
    """All loads of its job."""


class Loader:
    """All loads of a store.

    Args:
        lock: the store's.
        transient: whether what is loaded leaves L1 with its last pin.
        promote: told of what was loaded from which tier, with the lock held.
    """

    def __init__(
        self,
        l1: L1Cache,
        view: PoolView,
        tiers: Sequence[Tier],
        lock: threading.Lock,
        clock: Clock,
        transient: bool,
        promote: Callable[[bytes, Tier], None],
    ) -> None:
        self._l1 = l1
        self._view = view
        self._tiers = tiers
        self._lock = lock
        self._clock = clock
        self._transient = transient
        self._promote = promote
        self._loads: dict[bytes, _Load] = {}
        self._active: dict[Prefetch, None] = {}
        self._ended: list[Prefetch] = []
        self._closed = False

    # ---- with the lock held

    def begin(
        self,
        rows: Rows,
        account: str,
        seconds: float,
        on_done: Callable[[], None],
        names: Container[str] | None = None,
    ) -> Prefetch | None:
        """See :meth:`TieredStore.prefetch`."""
        usable = [t for t in self._tiers if (names is None or t.name in names) and t.may_read]
        if not usable or self._closed:
            return None
        prefetch = Prefetch(self, rows, on_done)
        new: list[_Load] = []
        for depth, row in enumerate(rows):
            todo = self._row(depth, row, account, usable)
            if todo is None:
                del prefetch._rows[depth:]
                break
            for load in todo:
                if load.key not in self._loads:
                    self._loads[load.key] = load
                    new.append(load)
                self._loads[load.key].waiters[prefetch] = None
                prefetch._missing.setdefault(load.key, depth)
        if not prefetch._missing:
            return None
        present = {
            key: entry for row in prefetch._rows for key in row if (entry := self._l1.get(key)) is not None
        }
        self._l1.pin_entries(list(present.values()))
        prefetch._pinned = present
        self._active[prefetch] = None
        self._advance(new)
        if prefetch.done:
            self._ended.remove(prefetch)
            self.release(prefetch)
            return None
        prefetch._alarm = self._clock.after(max(0.0, seconds), lambda: self._expire(prefetch))
        return prefetch

    def release(self, prefetch: Prefetch) -> None:
        """See :meth:`Prefetch.release`."""
        if not prefetch.done:
            self._stop(prefetch)
        pinned, prefetch._pinned = prefetch._pinned, {}
        self._l1.unpin_entries(list(pinned.values()))

    def forget(self, removal: Removal) -> None:
        """What is being loaded of these is deleted meanwhile: it is not to arrive."""
        for load in [load for load in self._loads.values() if removal.covers(load.key, load.account)]:
            self._dead(load)
        self._tell_soon()

    @property
    def active(self) -> int:
        """Prefetches under way."""
        return len(self._active)

    # ---- without it

    def close(self) -> None:
        """End every prefetch with what it has; nothing begins any more."""
        with self._lock:
            self._closed = True
            for prefetch in list(self._active):
                self._finish(prefetch)
        self._tell()

    # ---- plans

    def _row(
        self, depth: int, row: Sequence[tuple[bytes, int]], account: str, usable: Sequence[Tier]
    ) -> list[_Load] | None:
        """Loads that a row needs, new ones or those under way; None if it cannot be had."""
        todo = []
        for key, size in row:
            if key in self._l1:
                continue
            load = self._loads.get(key)
            if load is None:
                tiers = [
                    tier
                    for tier in usable
                    if tier.may_hold(key) is not False and not tier.removals.cover(key, account)
                ]
                load = _Load(key, size, account, depth, tiers)
            if not load.tiers or load.size != size or size <= 0:
                return None
            todo.append(load)
        return todo

    def _advance(self, loads: Iterable[_Load]) -> None:
        """Lock held: on with each load, at the tier that is next for it."""
        groups: dict[tuple[Tier, bool], list[_Load]] = {}
        for load in loads:
            while load.tiers and not load.tiers[0].may_read:
                _next_tier(load)
            if not load.tiers:
                self._dead(load)
            elif load.waiters:
                tier = load.tiers[0]
                groups.setdefault((tier, load.found or not tier.shared), []).append(load)
        for (tier, found), group in groups.items():
            per_job = max(1, min(tier.batch, -(-len(group) // max(1, tier.adapter.threads))))
            for at in range(0, len(group), per_job):
                self._send(tier, found, [load for load in group[at : at + per_job] if load.waiters])

    def _send(self, tier: Tier, found: bool, batch: list[_Load]) -> None:
        job = self._load_job(tier, batch) if found else self._ask_job(tier, batch)
        for load in batch:
            load.job, load.batch = job, batch
        if not batch or tier.workers.submit(job):
            return
        for load in batch:
            _next_tier(load)
        self._advance(batch)

    def _ask_job(self, tier: Tier, batch: list[_Load]) -> Job:
        asked: list[_Load] = []

        def start() -> bool:
            with self._lock:
                asked.extend(load for load in batch if load.waiters)
            return bool(asked)

        def run(call: Call) -> list[bool]:
            return tier.contains([load.key for load in asked], call)

        def end(answers: list[bool] | None) -> None:
            with self._lock:
                for load, has in zip(asked or batch, answers or [False] * len(batch), strict=False):
                    load.job = None
                    load.found = has
                    if not has:
                        _next_tier(load)
                self._advance(batch)
            self._tell()

        return Job("ask", tier.load_seconds, run, end, start)

    def _load_job(self, tier: Tier, batch: list[_Load]) -> Job:
        begun = False
        sent: list[_Load] = []
        memory: dict[_Load, Reservation] = {}

        def start() -> bool:
            nonlocal begun
            with self._lock:
                begun = True
                for load in batch:
                    item = self._room(load) if load.waiters else None
                    if item is not None:
                        sent.append(load)
                        memory[load] = item
            self._tell()
            return bool(sent)

        def run(call: Call) -> list[ObjectInfo | None]:
            return tier.load([Want(load.key, self._memory(memory[load])) for load in sent], call)

        def end(infos: list[ObjectInfo | None] | None) -> None:
            with self._lock:
                again = [] if begun else list(batch)
                for load, info in zip(sent, infos or [None] * len(sent), strict=True):
                    if info is None:
                        again.append(load)
                    elif load.waiters:
                        item = memory.pop(load)
                        self._arrived(load, self._l1.publish(item, True, self._transient), ours=True)
                        self._promote(load.key, tier)
                if job.returned:  # at once: the next tier needs room for the same
                    free()
                for load in again:
                    _next_tier(load)
                self._advance(again)
            self._tell()

        def free() -> None:
            while memory:
                self._l1.give_back(memory.popitem()[1])

        def let_go() -> None:
            with self._lock:
                free()

        job = Job("read", tier.load_seconds, run, end, start, let_go)
        return job

    def _room(self, load: _Load) -> Reservation | None:
        """Lock held: memory for a load; None if there is none, or it came some other way."""
        entry = self._l1.get(load.key)
        if entry is not None:
            self._arrived(load, entry, ours=False)
            return None
        item = self._l1.take(load.key, load.size, load.account, load.depth)
        if item is None:
            self._dead(load)
        return item

    def _memory(self, item: Reservation) -> memoryview:
        return self._view.data[item.offset : item.offset + item.size]

    # ---- ends, with the lock held

    def _arrived(self, load: _Load, entry: Entry, ours: bool) -> None:
        """An object is in L1; ``ours``: because it was loaded."""
        self._detach(load)
        for prefetch in load.waiters:
            self._l1.pin_entries([entry])
            prefetch._pinned[load.key] = entry
            if ours:
                prefetch._loaded.add(load.key)
            del prefetch._missing[load.key]
            if not prefetch._missing:
                self._finish(prefetch)
        load.waiters.clear()

    def _dead(self, load: _Load) -> None:
        """No tier gives it: every prefix that needs it ends before it."""
        self._detach(load)
        waiters = list(load.waiters)
        load.waiters.clear()
        for prefetch in waiters:
            depth = prefetch._missing.pop(load.key)
            del prefetch._rows[depth:]
            self._leave(prefetch, [key for key, row in prefetch._missing.items() if row >= depth])
            if not prefetch._missing:
                self._finish(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        """Keep the prefix that is there, let go of the rest; somebody is to call :meth:`_tell` without the lock."""
        self._stop(prefetch)
        pinned = prefetch._pinned
        chunks = 0
        for row in prefetch._rows:
            if any(key not in pinned for key in row):
                break
            chunks += 1
        prefetch.chunks = chunks
        keep = {key for row in prefetch._rows[:chunks] for key in row}
        surplus = [pinned.pop(key) for key in list(pinned) if key not in keep]
        self._l1.unpin_entries(surplus)
        self._l1.delete([entry.key for entry in surplus if entry.key in prefetch._loaded])
        columns = list(zip(*prefetch._rows[:chunks], strict=False))
        if columns:
            self._l1.touch(columns, used=False)
        self._ended.append(prefetch)

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.done = True
        self._active.pop(prefetch, None)
        if prefetch._alarm is not None:
            prefetch._alarm.cancel()
        self._leave(prefetch, list(prefetch._missing))

    def _leave(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        """It waits for these no more; what nobody waits for is cancelled."""
        for key in keys:
            prefetch._missing.pop(key)
            load = self._loads[key]
            load.waiters.pop(prefetch, None)
            if not load.waiters:
                self._detach(load)
                if load.job is not None and not any(other.waiters for other in load.batch):
                    load.tiers[0].workers.cancel(load.job)

    def _detach(self, load: _Load) -> None:
        if self._loads.get(load.key) is load:
            del self._loads[load.key]

    # ---- telling

    def _expire(self, prefetch: Prefetch) -> None:
        with self._lock:
            if not prefetch.done:
                self._finish(prefetch)
        self._tell()

    def _tell(self) -> None:
        """Without the lock: call back those whose prefetch ended."""
        with self._lock:
            ended, self._ended = self._ended, []
        for prefetch in ended:
            try:
                prefetch._on_done()
            except Exception:  # the caller's fault; it must not cost others their answer
                logger.exception("the end of a prefetch could not be told")

    def _tell_soon(self) -> None:
        if self._ended:
            self._clock.after(0, self._tell)


def _next_tier(load: _Load) -> None:
    """The first of its tiers is of no use for it."""
    if load.tiers:
        del load.tiers[0]
    load.found = False
    load.job = None
