"""The objects of L1: their memory in the pool, accounts and quotas, pins, and what goes first when room is short.

Leases on top of it: :mod:`lmcache.v1.storage.l1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from time import monotonic

from lmcache.v1.memory.range_allocator import RangeAllocator
from lmcache.v1.storage.accounts import Accounts, AccountUsage, L1Counters
from lmcache.v1.storage.eviction import LRU, EvictionPolicy
from lmcache.v1.storage.leases import Entry, Reservation
from lmcache.v1.storage.shm_pool import PAGE, PoolView, new_generation

__all__ = ["L1Objects"]

_YOUNG = 1 / 8
"""Of the capacity: as much of what was published last may be young. If everything were, nothing would be."""


class L1Objects:
    """Objects by key in a pool, without leases. Not thread-safe.

    Args:
        view: the server's mapping of the pool.
        watermark: usage, as a fraction of the capacity, above which an allocation first evicts.
            None: nothing is evicted and a full pool drops what is new.
        evict_ratio: fraction of the capacity that such an eviction frees at once.
        policy: which objects go first; least recently used by default.
        grace_seconds: for so long after its store an object goes after all that are older, whatever the policy says,
            so that who stored it finds it. What is known to be in the tiers below needs no grace.
    """

    def __init__(
        self,
        view: PoolView,
        watermark: float | None = 0.95,
        evict_ratio: float = 0.05,
        policy: EvictionPolicy | None = None,
        grace_seconds: float = 0.0,
    ) -> None:
        self._view = view
        self._grace = grace_seconds
        self._published = 0
        """Bytes so far."""
        self._allocator = RangeAllocator(view.data_bytes, PAGE)
        self._index: dict[bytes, Entry] = {}
        self._policy = LRU() if policy is None else policy
        self._taken: dict[int, Reservation] = {}
        """What :meth:`take` gave and nobody published or gave back, by its offset."""
        self._first: dict[bytes, None] = {}
        """Objects that go before all others; see :meth:`demote`."""
        self._accounts = Accounts()
        self._watermark = watermark
        self._evict_ratio = evict_ratio
        self._pinned = 0
        """Objects with a pin, counted as they come and go: status and metrics ask often."""
        self._held = 0
        self.counters = L1Counters()

    # ---- looking

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def get(self, key: bytes) -> Entry | None:
        """The published object ``key``. Says nothing of its use."""
        return self._index.get(key)

    def entries(self) -> Iterator[Entry]:
        """Every published object, the oldest first. Nothing may change meanwhile."""
        return iter(self._index.values())

    def prefix_length(self, key_rows: Iterable[Sequence[bytes]]) -> int:
        """Number of leading rows whose keys are all published; a row: one chunk's, over ranks and groups."""
        index, n = self._index, 0
        for row in key_rows:
            for key in row:
                if key not in index:
                    return n
            n += 1
        return n

    # ---- use

    def touch(self, columns: Sequence[Sequence[bytes]], used: bool = True) -> None:
        """Mark as just used what is published of ``columns``, each the keys of a chain of chunks.

        A prefix is of use only without gaps, so its last chunk, in every column, is the first to go. Not
        ``used``: only see to that order.
        """
        index = self._index
        if used and self._first:
            for key in chain.from_iterable(columns):
                self._first.pop(key, None)
        tell = self._policy.touch if used else self._policy.arrange
        if len(set(map(len, columns))) <= 1:
            rows = zip(*map(reversed, columns), strict=True)
            tell([key for row in rows for key in row if key in index])
            return
        depths = reversed(range(max(map(len, columns))))
        tell([c[i] for i in depths for c in columns if i < len(c) and c[i] in index])

    def pin_entries(self, entries: Sequence[Entry]) -> None:
        """Pin entries that a lease pins now, for a reader that may outlast the lease."""
        for entry in entries:
            entry.pins += 1
            self._pinned += entry.pins == 1

    def unpin_entries(self, entries: Sequence[Entry]) -> None:
        """Undo :meth:`pin_entries`."""
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                self._pinned -= 1
                if entry.transient and not entry.held:
                    self._remove(entry)

    # ---- memory that no lease owns: of a load from below, or of a writer in this process

    def take(self, key: bytes, size: int, account: str = "", depth: int = 0) -> Reservation | None:
        """Memory for an object; None if there is no room. It stays taken until :meth:`publish` or
        :meth:`give_back`, and nobody finds it before."""
        offset = self._allocate(size, account)
        if offset is None:
            self.counters.dropped_full += 1
            return None
        item = self._taken[offset] = self._reservation(key, offset, size, depth, account)
        return item

    def publish(self, item: Reservation, loaded: bool = False, transient: bool = False) -> Entry:
        """Make an object of what :meth:`take` gave, and return it; the one that is there, if there is one.

        Args:
            loaded: it came from a tier below.
            transient: it goes with its last pin.
        """
        del self._taken[item.offset]
        found = self._index.get(item.key)
        if found is not None:
            found.transient = found.transient and loaded
            self.counters.duplicates += 1
            self._free(item)
            return found
        entry = self._publish(item)
        entry.transient = transient
        if loaded:
            entry.young_until = 0.0
        self.counters.loaded += loaded
        self.counters.stored += not loaded
        return entry

    def give_back(self, item: Reservation) -> None:
        """Free what :meth:`take` gave, unpublished."""
        del self._taken[item.offset]
        self._free(item)

    # ---- what an operator asks for

    def hold(self, keys: Iterable[bytes]) -> int:
        """Keep these objects until :meth:`unhold`; how many of them are there."""
        return self._mark(keys, True)

    def unhold(self, keys: Iterable[bytes]) -> int:
        """Undo :meth:`hold`; how many of them are there."""
        return self._mark(keys, False)

    def clear(self, force: bool = False, account: str | None = None) -> int:
        """Drop every object that is not pinned; return how many.

        Args:
            force: those that an operator holds, too.
            account: only this one's.
        """
        return self._drop(
            entry
            for entry in self._index.values()
            if (force or not entry.held) and (account is None or entry.account == account)
        )

    def delete(self, keys: Iterable[bytes], force: bool = False) -> int:
        """Drop these objects, except what is pinned and, unless ``force``, held; return how many."""
        found = [self._index[key] for key in dict.fromkeys(keys) if key in self._index]
        return self._drop(e for e in found if force or not e.held)

    def demote(self, keys: Iterable[bytes]) -> None:
        """These go before all others, unless they are used again; the first of them first."""
        self._first.update((key, None) for key in keys if key in self._index)

    def set_quota(self, account: str, nbytes: int | None) -> None:
        """Limit what an account may take from now on; None: no limit. What it has beyond goes when it next
        stores.

        Raises:
            ValueError: for a negative limit.
        """
        self._accounts.set_quota(account, nbytes)

    def usage_by_account(self, limited: bool = False) -> dict[str, AccountUsage]:
        """Of every account that has something here, or a quota; ``limited``: only of those with a quota."""
        return self._accounts.usage(limited)

    # ---- memory

    def _allocate(self, size: int, account: str = "") -> int | None:
        need = self._allocator.rounded(size)
        capacity = self._allocator.capacity
        if need > capacity or not self._fits_quota(need, account):
            return None
        if self._watermark is None:
            return self._allocator.allocate(size)
        if self._allocator.used + need > self._watermark * capacity:
            self._evict_until_used(capacity * (self._watermark - self._evict_ratio) - need)
        offset = self._allocator.allocate(size)
        if offset is not None:
            return offset
        for key in list(self._victims()):  # fragmented: go on until a range is long enough
            entry = self._index.get(key)
            if entry is None or entry.pins or entry.held:
                continue
            self._evict(entry)
            if self._allocator.largest_free >= need:
                return self._allocator.allocate(size)
        return None

    def _fits_quota(self, need: int, account: str) -> bool:
        """Whether the account may take so much more, maybe after some of its own objects went."""
        quota = self._accounts.quota(account)
        if quota is None or self._accounts.used(account) + need <= quota:
            return True
        if self._watermark is None or need > quota:
            return False
        # As for the whole: free some more at once, because the way to the account's own may be long.
        freed, target = 0, self._accounts.used(account) + need - quota * (1 - self._evict_ratio)
        victims: list[Entry] = []
        seen: set[bytes] = set()  # what is to go first is named twice
        for key in self._victims():
            if freed >= target or len(seen) == self._accounts.objects(account):
                break
            entry = self._index.get(key)
            if entry is None or entry.account != account or key in seen:
                continue
            seen.add(key)
            if not entry.pins and not entry.held:
                victims.append(entry)
                freed += self._allocator.rounded(entry.size)
        if self._accounts.used(account) - freed + need > quota:
            return False
        for entry in victims:
            self._evict(entry)
        return True

    def _evict_until_used(self, target: float) -> None:
        victims: dict[bytes, Entry] = {}  # a policy may name a key twice, or one that is not here
        freed = 0
        for key in self._victims():
            if self._allocator.used - freed <= target:
                break
            entry = self._index.get(key)
            if entry is not None and not entry.pins and not entry.held and key not in victims:
                victims[key] = entry
                freed += self._allocator.rounded(entry.size)
        for entry in victims.values():
            self._evict(entry)

    def _victims(self) -> Iterable[bytes]:
        order = self._old_first(self._policy.victims()) if self._grace else self._policy.victims()
        return chain(self._first, order) if self._first else order

    def _old_first(self, order: Iterable[bytes]) -> Iterator[bytes]:
        """As the policy says, but what was stored just now last."""
        now, young = monotonic(), []
        since = self._published - self._allocator.capacity * _YOUNG
        for key in order:
            entry = self._index.get(key)
            if entry is not None and entry.young_until > now and entry.born >= since:
                young.append(key)
            else:
                yield key
        yield from young

    def _drop(self, entries: Iterable[Entry]) -> int:
        victims = [entry for entry in entries if not entry.pins]
        for entry in victims:
            self._remove(entry)
        return len(victims)

    def _mark(self, keys: Iterable[bytes], held: bool) -> int:
        found = [self._index[key] for key in dict.fromkeys(keys) if key in self._index]
        for entry in found:
            self._held += held - entry.held
            entry.held = held
            if entry.transient and not held and not entry.pins:
                self._remove(entry)
        return len(found)

    def _reservation(self, key: bytes, offset: int, size: int, depth: int, account: str) -> Reservation:
        item = Reservation(key, offset, size, new_generation(), depth, account=account)
        self._view.generations[offset // PAGE] = item.generation
        self._accounts.take(account, self._allocator.rounded(size))
        return item

    def _publish(self, item: Reservation) -> Entry:
        entry = Entry(
            item.key, item.offset, item.size, item.generation, account=item.account, depth=item.depth
        )
        if self._grace:
            entry.young_until, entry.born = monotonic() + self._grace, self._published
            self._published += self._allocator.rounded(item.size)
        self._index[item.key] = entry
        self._policy.add(item.key, item.size)
        self._accounts.published(item.account)
        return entry

    def _evict(self, entry: Entry) -> None:
        """It makes room for others."""
        self._remove(entry)
        self.counters.evicted += 1

    def _remove(self, entry: Entry) -> None:
        del self._index[entry.key]
        self._first.pop(entry.key, None)
        self._held -= entry.held
        self._policy.remove(entry.key)
        self._accounts.removed(entry.account)
        self._free(entry)

    def _free(self, item: Entry | Reservation) -> None:
        self._view.generations[item.offset // PAGE] = 0
        self._allocator.free(item.offset)
        self._accounts.give(item.account, self._allocator.rounded(item.size))
