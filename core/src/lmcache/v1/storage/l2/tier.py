"""One tier: a storage engine with all that is done for every engine alike.

Checksums and headers, verification, quarantine, the index of what an engine of our own holds, its eviction, counters.
Threads, deadlines and breakers are :mod:`lmcache.v1.storage.l2.workers`'.

The methods that take a :class:`Call` run in the tier's threads. An adapter's answers are hints there: one of the wrong
length is an error of the engine; what is loaded is verified; what is not what was stored is a miss, is deleted
(*quarantine*), counted, and told once in a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from lmcache.logging import init_logger, warn_once
from lmcache.v1.storage.accounts import AccountUsage
from lmcache.v1.storage.eviction import LRU, EvictionPolicy
from lmcache.v1.storage.l2 import envelope
from lmcache.v1.storage.l2.adapter import AdapterError, AdapterFull, Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.clock import Clock
from lmcache.v1.storage.l2.quotas import Coming, TierAccounts, coming, part_of
from lmcache.v1.storage.l2.remote import reason
from lmcache.v1.storage.l2.removals import Removal, Removals
from lmcache.v1.storage.l2.tier_index import TierIndex
from lmcache.v1.storage.l2.workers import Job, Workers

__all__ = ["Tier", "TierCounters"]

logger = init_logger(__name__)

T = TypeVar("T")
Observe = Callable[[str, Mapping[str, Any]], None]

_PROBE_KEY = bytes(64)
"""A key that no object has: asked for to see whether the engine answers."""
_WATERMARK, _EVICT_TO = 0.95, 0.90
"""Of an owned engine's capacity: where eviction begins and where it stops."""
_EVICT_BATCH = 16
_TURN_SECONDS = 0.1
_QUARANTINE_LOG_SECONDS = 60.0
_CLOSE_SECONDS = 1.0
"""An adapter gets at least so long to close."""


@dataclass(slots=True)
class TierCounters:
    """Objects and bytes since the start. ``dropped``: not written because the queue was full or the tier was down;
    ``failed``: tried and not written; ``over_quota``: not written because the account has no more room there."""

    stored: int = 0
    stored_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    over_quota: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    missed: int = 0
    quarantined: int = 0
    evicted: int = 0
    deleted: int = 0


class Tier:
    """An adapter with everything around it.

    Args:
        name: for people, flags and metrics; unique among the tiers.
        clock: shared by all tiers.
        load_seconds, store_seconds: deadline of one call.
        breaker_failures, breaker_seconds: see :class:`Workers`.
        policy: what goes first from an engine of our own.
        observe: told of what happens; must return at once.

    Raises:
        AdapterError, OSError: if what the engine holds cannot be listed.
    """

    def __init__(
        self,
        name: str,
        adapter: StorageAdapter,
        clock: Clock,
        load_seconds: float,
        store_seconds: float,
        breaker_failures: int,
        breaker_seconds: float,
        observe: Observe,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.name = name
        self.adapter = adapter
        self.shared = bool(adapter.shared)
        self.reads, self.writes, self.sync = bool(adapter.reads), bool(adapter.writes), bool(adapter.sync)
        self.batch = max(1, int(adapter.batch))
        self.load_seconds, self.store_seconds = load_seconds, store_seconds
        self.counters = TierCounters()
        self.index = None if self.shared else TierIndex(LRU() if policy is None else policy, adapter.scan())
        """What it holds, where nobody else writes to it; None: only the engine knows."""
        self._accounts = None if self.index is None else TierAccounts(adapter, self.index, self._evict)
        self.where = reason(str(adapter.describe()))  # a plugin's may be anything
        self.removals = Removals()
        self.on_removed: Callable[[], None] = lambda: None
        """Called after each removal, from any thread, without a lock."""
        self._scans = adapter.scans
        self._counting = threading.Lock()
        self._observe = observe
        self._clock = clock
        self._evicting = threading.Lock()
        self._said = float("-inf")
        self._state = "up"
        self.workers = Workers(
            name, adapter.threads, clock, self._probe, breaker_failures, breaker_seconds, self._on_state
        )
        self._trim_later()

    def count(self, **more: int) -> None:
        """Add to running totals, by their names."""
        with self._counting:
            for name, number in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + number)

    # ---- what is known without asking

    def may_hold(self, key: bytes) -> bool | None:
        """Whether the engine holds it, from memory; None: it must be asked."""
        return None if self.index is None else key in self.index

    def needs(self, key: bytes, account: str) -> bool:
        """Whether it is to be written: it is not there, or about to go."""
        return not self.may_hold(key) or self.removals.cover(key, account)

    @property
    def may_read(self) -> bool:
        """Whether it is of use to ask it now."""
        return self.reads and self.workers.usable("read")

    def usage(self) -> Usage:
        """The adapter's figures; -1 for all of them if it fails to tell."""
        try:
            used, objects, capacity = self.adapter.usage()
            usage = Usage(int(used), int(objects), int(capacity))
        except Exception as exc:  # a plugin's fault must not spoil the server's status
            logger.debug("tier %s: usage: %s", self.name, exc)
            return Usage(-1, -1, -1)
        return usage if self.index is None else usage._replace(objects=len(self.index))

    def status(self) -> dict[str, Any]:
        """For people and metrics, without accounts. Does no I/O."""
        usage = self.usage()
        return {
            "name": self.name,
            "type": self.adapter.type_name or type(self.adapter).__name__,
            "where": self.where,
            "shared": self.shared,
            "sync": self.sync,
            "state": self.workers.state,
            "objects": usage.objects,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            **self.workers.figures(),
            **asdict(self.counters),
        }

    # ---- accounts

    def accounts(self, limited: bool = False) -> dict[str, AccountUsage]:
        """What each account has there, and may; nobody where that is not known. ``limited``: only who has a quota."""
        return {} if self._accounts is None else self._accounts.usage(limited)

    def set_quota(self, account: str, nbytes: int | None) -> None:
        """Limit an account; None: no limit. What it has beyond goes soon.

        Raises:
            ValueError: if accounts cannot be limited there, in one line; or for a negative limit.
        """
        books = None if self._accounts is None else self._accounts.books
        if books is None:
            why = (
                "others store there, too, so nobody knows what one account has"
                if self.shared
                else "its engine does not say what an account has"
            )
            raise ValueError(f"tier {self.name!r}: {why}; limit accounts in l1, or in a tier of type disk")
        books.set_quota(account, nbytes)
        self._trim_later()

    def accounts_state(self) -> list[dict[str, Any]] | None:
        """The same for people; None: not known."""
        if self._accounts is None or self._accounts.books is None:
            return None
        return [
            {
                "account": name,
                "used_bytes": has.used_bytes,
                "objects": has.objects,
                "limit_bytes": has.quota_bytes,
            }
            for name, has in self._accounts.usage().items()
        ]

    def _trim_later(self) -> None:
        if self._accounts is not None and self._accounts.over:
            self.workers.submit(Job("write", self.store_seconds, self._trim, self._trimmed))

    def _trimmed(self, more: bool | None) -> None:
        if more:  # a lock is not fair: stores that wait for it go first
            self._clock.after(_TURN_SECONDS, self._trim_later)

    def _trim(self, call: Call) -> bool:
        if self._accounts is None or not self._evicting.acquire(timeout=call.remaining):
            return False
        try:
            return self._accounts.trim(call)
        finally:
            self._evicting.release()

    # ---- in the tier's threads

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """Whether the engine says that it holds each."""
        return [bool(answer) for answer in self._answers(self.adapter.contains(keys, call), keys, "contains")]

    def load(self, wants: Sequence[Want], call: Call) -> list[envelope.ObjectInfo | None]:
        """Load and verify: for each what it is, or None for a miss, whatever its memory holds then."""
        with self.removals.watched() as anew:
            return self._load(wants, call, anew)

    def _load(self, wants: Sequence[Want], call: Call, anew: set[bytes]) -> list[envelope.ObjectInfo | None]:
        headers = self._answers(self.adapter.load(wants, call), wants, "load")
        found: list[envelope.ObjectInfo | None] = []
        bad: list[bytes] = []
        gone: list[bytes] = []
        for (key, payload), header in zip(wants, headers, strict=True):
            info = None
            if header is not None:
                try:
                    info = envelope.check(memoryview(header), key, payload)
                except (envelope.EnvelopeError, TypeError, ValueError) as exc:
                    bad.append(key)
                    self._tell_bad(key, exc)
            elif not call.over:
                gone.append(key)
            found.append(info)
        good = [info for info in found if info is not None]
        self.count(
            loaded=len(good),
            loaded_bytes=sum(info.size for info in good),
            missed=len(found) - len(good),
            quarantined=len(bad),
        )
        if bad:
            self._observe("quarantine", {"tier": self.name, "objects": len(bad)})
        if self.index is not None:
            self.index.touch(info.key for info in good)
            bad += [
                key for key in gone if key in self.index
            ]  # not whole, or of another size: of use to nobody
        if bad:
            self._quarantine(bad, anew)
        return found

    def _quarantine(self, bad: Sequence[bytes], anew: set[bytes]) -> None:
        """Delete what a load found of no use; but of ``anew`` that says nothing."""
        keys, removal = self.removals.begin_except(bad, anew)
        if not keys or not self._submit(removal, lambda call: self.delete(keys, call), lambda _: None):
            self.removals.end(removal)
            self.on_removed()

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """Make room and store; for each whether the engine has it now."""
        if self.index is None or self._accounts is None:
            stored = [bool(a) for a in self._answers(self.adapter.store(objects, call), objects, "store")]
            self._count_stored(objects, stored, 0)
            return stored
        all_of_them = [coming(self.adapter, put) for put in objects]
        fits = self._room(all_of_them, call)
        new = [one for one, fit in zip(all_of_them, fits, strict=True) if fit]
        answers = iter(self._store(new, call) if new else ())
        stored = [fit and next(answers) for fit in fits]
        for one, has in reversed(
            list(zip(all_of_them, stored, strict=True))
        ):  # the first are to be kept longest
            if has:
                self.index.add(one.put.key, one.item)
        missing = [one for one, has, fit in zip(all_of_them, stored, fits, strict=True) if fit and not has]
        self._count_stored(objects, stored, fits.count(False) + sum(map(self._accounts.is_full, missing)))
        return stored

    def _store(self, new: Sequence[Coming], call: Call) -> list[bool]:
        puts = [one.put for one in new]
        try:
            return [bool(answer) for answer in self._answers(self.adapter.store(puts, call), puts, "store")]
        except AdapterFull as exc:
            warn_once(logger, f"full:{self.name}", "tier %s is full before its time: %s", self.name, exc)
            self._make_way(self._need(new), {put.key for put in puts}, call, call)
            return [False] * len(puts)

    def _count_stored(self, objects: Sequence[Put], stored: Sequence[bool], over_quota: int) -> None:
        done = [len(put.payload) for put, has in zip(objects, stored, strict=True) if has]
        self.count(
            stored=len(done),
            stored_bytes=sum(done),
            failed=len(objects) - len(done) - over_quota,
            over_quota=over_quota,
        )

    def delete(self, keys: Sequence[bytes], call: Call) -> int:
        """Remove what is there; how many of them are gone for sure."""
        known = {} if self.index is None else self.index.remove(keys)
        removed: Sequence[Any] = [False] * len(keys)
        try:
            removed = self._answers(self.adapter.delete(keys, call), keys, "delete")
        finally:
            if self.index is not None:  # what may still be there must be found again, to go another time
                for key, gone in zip(keys, removed, strict=True):
                    if not gone and key in known:
                        self.index.add(key, known[key])
        count = sum(map(bool, removed))
        self.count(deleted=count)
        return count

    def clear(self, call: Call) -> int:
        """Remove everything of ours; how many objects, -1 if that is not known."""
        before = [] if self.index is None else self.index.keys()
        count = int(self.adapter.clear(call))
        if self.index is not None:
            left = {
                held.key for held in self.adapter.scan()
            }  # what could not go; what came meanwhile adds itself
            self.index.remove(key for key in before if key not in left)
        self.count(deleted=max(0, count))
        return count

    def headers(self, keys: Sequence[bytes], call: Call) -> list[envelope.ObjectInfo | None]:
        """What the engine says that each is, unverified; None: not to be had."""
        infos: list[envelope.ObjectInfo | None] = []
        for key, header in zip(
            keys, self._answers(self.adapter.headers(keys, call), keys, "headers"), strict=True
        ):
            try:
                info = None if header is None else envelope.unpack(memoryview(header))
            except (envelope.EnvelopeError, TypeError, ValueError):
                info = None
            infos.append(info if info is not None and info.key == key else None)
        return infos

    # ---- jobs of its own

    def delete_later(self, keys: Sequence[bytes]) -> None:
        """Delete in a thread of the tier; where that fails, when it is well again."""

        def end(count: int | None) -> None:
            if count is None:
                self.removals.owe(keys)

        if not self.remove_later(Removal.of(keys), lambda call: self.delete(keys, call), end):
            self.removals.owe(keys)
            self.on_removed()
            if self.workers.usable("write"):  # by now
                self._delete_owed()

    def _delete_owed(self) -> None:
        if keys := self.removals.owed():
            self.delete_later(keys)

    def remove_later(
        self, removal: Removal, act: Callable[[Call], int], end: Callable[[int | None], None]
    ) -> bool:
        """Have a thread of the tier do what ``removal`` says, by ``act``; ``end`` gets its result, or None. False:
        refused, and neither is called. What is published from now on is not written before it is over."""

        self.removals.begin(removal)
        taken = self._submit(removal, act, end)
        if not taken:
            self.removals.end(removal)
        return taken

    def _submit(
        self, removal: Removal, act: Callable[[Call], int], end: Callable[[int | None], None]
    ) -> bool:
        """Of a removal that has begun; it ends with the job."""

        def over(count: int | None) -> None:
            self.removals.end(removal)
            try:
                end(count)
            finally:
                self.on_removed()

        return self.workers.submit(Job("write", self.store_seconds, act, over))

    def close(self, seconds: float) -> None:
        """End the threads, then the adapter; what hangs is left behind."""
        until = Call(seconds)
        self.workers.close(seconds)
        closing = threading.Thread(
            target=self._close_adapter, name=f"lmcache-tier-{self.name}-close", daemon=True
        )
        closing.start()
        closing.join(max(_CLOSE_SECONDS, until.remaining))

    def _close_adapter(self) -> None:
        try:
            self.adapter.close()
        except Exception as exc:  # at the end of everything; nobody can do more about it
            logger.warning("tier %s (%s): did not close well: %s", self.name, self.where, exc)

    def _need(self, objects: Iterable[Coming]) -> int:
        """Bytes of what is new and can fit at all: nothing is to go for an object that will not come."""
        capacity = self.usage().capacity_bytes
        return sum(
            one.item.taken
            for one in objects
            if (capacity <= 0 or one.item.taken <= capacity) and not self.may_hold(one.put.key)
        )

    def _room(self, objects: Sequence[Coming], call: Call) -> list[bool]:
        """Evict what it would be too much of, first in the accounts of ``objects``; for each of them whether its
        account has room."""
        if self._accounts is None or not self._evicting.acquire(timeout=call.remaining):
            return [True] * len(objects)
        try:
            fits = self._accounts.make_room(objects, call)
            need = self._need(one for one, fit in zip(objects, fits, strict=True) if fit)
            used, _, capacity = self.usage()
            if capacity > 0 and used + need > capacity * _WATERMARK:
                without = {one.put.key for one in objects}
                self._make_way(used + need - int(capacity * _EVICT_TO), without, call, part_of(call))
                self._make_way(self.usage().used_bytes + need - capacity, without, call, call)
            return fits
        finally:
            self._evicting.release()

    def _make_way(self, nbytes: int, without: set[bytes], call: Call, until: Call) -> None:
        if self.index is not None:
            self._evict(self.index.victims(nbytes, without), call, until)

    def _evict(self, victims: Sequence[bytes], call: Call, until: Call) -> None:
        for at in range(0, len(victims), _EVICT_BATCH):
            if not (call.over or until.over):
                self.count(evicted=self.delete(victims[at : at + _EVICT_BATCH], call))

    def _probe(self, call: Call) -> None:
        self.contains([_PROBE_KEY], call)

    def _answers(self, answer: Iterable[T], asked: Sequence[Any], what: str) -> list[T]:
        """What the engine answered, one for each; after a look at whether it still is the one that we know.

        Raises:
            AdapterError: if it answered for more or fewer.
        """
        answers = list(answer)
        if len(answers) != len(asked):
            raise AdapterError(f"{what} answered for {len(answers)} objects: expected {len(asked)}")
        if self.index is not None and self._scans != self.adapter.scans:
            self._scans = self.adapter.scans
            self.index.remove(self.index.keys())
            self.index.add_all(self.adapter.scan())
            self._trim_later()
        return answers

    # ---- telling

    def _on_state(self, state: str) -> None:
        was, self._state = self._state, state
        if was == state:
            return
        self._observe("tier_state", {"tier": self.name, "state": state})
        if state == "up":
            self._trim_later()
            self._delete_owed()
            logger.info("tier %s (%s): is well again", self.name, self.where)
        elif was == "up":
            logger.warning(
                "tier %s (%s): %s, %s; not used until it is well again",
                self.name, self.where, state, self.workers.counts.last_error or "no reason known",
            )  # fmt: skip

    def _tell_bad(self, key: bytes, why: Exception) -> None:
        now = time.monotonic()
        if now - self._said >= _QUARANTINE_LOG_SECONDS:
            self._said = now
            logger.warning(
                "tier %s (%s): object %s… is not what was stored (%s); taken for a miss and deleted; %d so far",
                self.name, self.where, key.hex()[:16], why, self.counters.quarantined + 1,
            )  # fmt: skip
