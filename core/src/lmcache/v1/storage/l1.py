"""L1: the index over the shared-memory pool, with eviction on the allocation path and owned leases.

Invariants (held by ``tests/unit/test_l1_history.py``):

* an object is found only after its commit, and never before its bytes are complete;
* memory under a pin or a write lease is never evicted, freed or given to anybody else;
* the generation word of freed memory is 0 before the memory can be given out again.

Not thread-safe: the server holds one lock around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcache.v1.memory.range_allocator import RangeAllocator
from lmcache.v1.storage.eviction import LRU, EvictionPolicy
from lmcache.v1.storage.leases import Entry, ReadLease, Reservation, Tombstones, WriteLease
from lmcache.v1.storage.shm_pool import PAGE, PoolView, new_generation

EXISTS = -1
FULL = -2


@dataclass(slots=True)
class L1Counters:
    """Running totals since the server started."""

    stored: int = 0
    duplicates: int = 0
    evicted: int = 0
    dropped_full: int = 0
    aborted: int = 0


class L1Cache:
    """Objects by key in a pool.

    Args:
        view: the server's mapping of the pool.
        watermark: usage, as a fraction of the capacity, above which a reservation first evicts.
            None: nothing is evicted and a full pool drops what is new.
        evict_ratio: fraction of the capacity that such an eviction frees at once.
        policy: which objects go first; least recently used by default.
    """

    def __init__(
        self,
        view: PoolView,
        watermark: float | None = 0.95,
        evict_ratio: float = 0.05,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._view = view
        self._allocator = RangeAllocator(view.data_bytes, PAGE)
        self._index: dict[bytes, Entry] = {}
        self._policy = LRU() if policy is None else policy
        self._reads: dict[tuple[str, int], ReadLease] = {}
        self._writes: dict[tuple[str, int], WriteLease] = {}
        self._gone = Tombstones()
        self._watermark = watermark
        self._evict_ratio = evict_ratio
        self._pinned = 0
        """Objects with a pin, counted as they come and go: status and metrics ask often."""
        self.counters = L1Counters()

    # ---- reading

    def prefix_length(self, key_rows: Iterable[Sequence[bytes]]) -> int:
        """Number of leading rows whose keys are all published; a row: one chunk's, over ranks and groups."""
        index, n = self._index, 0
        for row in key_rows:
            for key in row:
                if key not in index:
                    return n
            n += 1
        return n

    def touch(self, columns: Sequence[Sequence[bytes]], used: bool = True) -> None:
        """Mark as just used what is published of ``columns``, each the keys of a chain of chunks.

        A prefix is of use only without gaps, so its last chunk, in every column, is the first to go. Not
        ``used``: only see to that order.
        """
        index = self._index
        tell = self._policy.touch if used else self._policy.arrange
        if len(set(map(len, columns))) <= 1:
            rows = zip(*map(reversed, columns), strict=True)
            tell([key for row in rows for key in row if key in index])
            return
        depths = reversed(range(max(map(len, columns))))
        tell([c[i] for i in depths for c in columns if i < len(c) and c[i] in index])

    def is_used_up(self, owner: str, lease: int) -> bool:
        """Whether no read lease of this id can be had: it was given back already, or is held."""
        return (owner, lease) in self._gone or (owner, lease) in self._reads

    def pin(
        self,
        owner: str,
        lease: int,
        session: str,
        request: str,
        columns: Mapping[int, Sequence[Sequence[bytes]]],
    ) -> dict[int, list[list[Entry]]]:
        """Pin published ``columns[rank]`` for ``request`` under the client's lease id and mark them as just
        used.

        Raises:
            KeyError: if the lease was given back already, or its id is in use.
        """
        if self.is_used_up(owner, lease):
            raise KeyError(lease)
        index = self._index
        held = {rank: [[index[key] for key in column] for column in mine] for rank, mine in columns.items()}
        shares = {rank: [entry for column in mine for entry in column] for rank, mine in held.items()}
        for entries in shares.values():
            self.pin_entries(entries)
        self.touch([column for mine in columns.values() for column in mine])
        self._reads[owner, lease] = ReadLease(session, request, shares)
        return held

    def read_share(self, owner: str, lease: int, rank: int) -> list[Entry]:
        """What ``rank`` holds under a read lease, in the order of the lookup; empty if it holds nothing."""
        found = self._reads.get((owner, lease))
        return found.shares.get(rank, []) if found else []

    def pin_entries(self, entries: Sequence[Entry]) -> None:
        """Pin entries that a lease pins now, for a reader that may outlast the lease."""
        for entry in entries:
            entry.pins += 1
            self._pinned += entry.pins == 1

    def unpin_entries(self, entries: Sequence[Entry]) -> None:
        """Undo :meth:`pin_entries`."""
        for entry in entries:
            entry.pins -= 1
            self._pinned -= entry.pins == 0

    def release(self, owner: str, lease: int, rank: int | None = None) -> None:
        """Give back a rank's share of a read lease (None: all shares). Harmless if it is not there."""
        found = self._reads.get((owner, lease))
        if found is None:
            if rank is None:
                self._gone.add(owner, lease)
            return
        for r in list(found.shares) if rank is None else [rank]:
            self.unpin_entries(found.shares.pop(r, ()))
        if not found.shares:
            del self._reads[owner, lease]
            self._gone.add(owner, lease)

    # ---- writing

    def reserve(
        self, session: str, lease: int, columns: Sequence[Sequence[tuple[bytes, int]]], mapped: bool
    ) -> list[list[tuple[int, int]]]:
        """Reserve memory for columns of ``(key, size)``, each in the order of a chain of chunks.

        Returns:
            Per column and pair ``(offset, generation)``, or (EXISTS, 0) or (FULL, 0).

        Raises:
            KeyError: if the lease was given back already, or its id is in use.
        """
        if (session, lease) in self._gone or (session, lease) in self._writes:
            raise KeyError(lease)
        self.touch([[key for key, _ in column] for column in columns])
        items: list[Reservation] = []
        slots: list[list[tuple[int, int]]] = [[] for _ in columns]
        too_large: int | None = None  # nothing is freed before we return: so there is no room for more of it
        for column, out in zip(columns, slots, strict=True):
            for depth, (key, size) in enumerate(column):
                if key in self._index:
                    out.append((EXISTS, 0))
                    continue
                offset = None if too_large is not None and size >= too_large else self._allocate(size)
                if offset is None:
                    too_large = size if too_large is None else min(size, too_large)
                    self.counters.dropped_full += 1
                    out.append((FULL, 0))
                    continue
                item = Reservation(key, offset, size, new_generation(), depth)
                self._view.generations[offset // PAGE] = item.generation
                items.append(item)
                out.append((offset, item.generation))
        self._writes[session, lease] = WriteLease(session, items, mapped)
        return slots

    def reserved(self, session: str, lease: int) -> list[Reservation]:
        """The reservations of a write lease, in order.

        Raises:
            KeyError: if there is no such lease.
        """
        return self._writes[session, lease].items

    def commit(self, session: str, lease: int, indexes: Sequence[int]) -> int:
        """Publish the reservations at ``indexes`` of the lease, free the others, end the lease; return how
        many.

        Raises:
            KeyError: if there is no such lease. IndexError: for an index that it does not hold; nothing
            changes.
        """
        items = self._writes[session, lease].items
        wanted = set(indexes)
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(items):
            raise IndexError(f"commit of reservations {sorted(wanted)}: the lease holds {len(items)}")
        del self._writes[session, lease]
        self._gone.add(session, lease)
        published = 0
        # Later chunks of a prefix are the first to go.
        for i, item in sorted(enumerate(items), key=lambda pair: -pair[1].depth):
            if i not in wanted:
                self.counters.aborted += 1
                self._free(item.offset)
            elif item.key in self._index:
                self.counters.duplicates += 1
                self._free(item.offset)
            else:
                self._index[item.key] = Entry(item.key, item.offset, item.size, item.generation)
                self._policy.add(item.key, item.size)
                published += 1
        self.counters.stored += published
        return published

    def abort(self, session: str, lease: int) -> None:
        """Free a write lease's memory unpublished. Harmless if it is not there (any more)."""
        found = self._writes.pop((session, lease), None)
        self._gone.add(session, lease)
        for item in found.items if found else ():
            self.counters.aborted += 1
            self._free(item.offset)

    # ---- owners

    def drop_session(self, session: str, dead: bool) -> None:
        """Take back what a session owns. ``dead``: its process is gone, and its mapped writes with it."""
        for owner_lease in [k for k, v in self._reads.items() if v.session == session]:
            self.release(*owner_lease)
        for owner_lease in [
            k for k, v in self._writes.items() if v.session == session and (dead or not v.mapped)
        ]:
            self.abort(*owner_lease)

    def drop_rank(self, owner: str, rank: int) -> None:
        """Release the shares of a rank that died."""
        for found_owner, lease in [k for k, v in self._reads.items() if k[0] == owner and rank in v.shares]:
            self.release(found_owner, lease, rank)

    def drop_request(self, owner: str, request: str) -> None:
        """Release every read lease of a request that ended."""
        for owner_lease in [k for k, v in self._reads.items() if k[0] == owner and v.request == request]:
            self.release(*owner_lease)

    # ---- memory

    def clear(self) -> int:
        """Drop every object that is not pinned; return how many."""
        victims = [entry for entry in self._index.values() if not entry.pins]
        for entry in victims:
            self._evict(entry)
        return len(victims)

    @property
    def has_leases(self) -> bool:
        """Whether anybody may still be reading or writing."""
        return bool(self._reads or self._writes)

    def usage(self) -> dict[str, int]:
        """Bytes and counts for status and metrics."""
        return {
            "capacity_bytes": self._allocator.capacity,
            "used_bytes": self._allocator.used,
            "objects": len(self._index),
            "pinned_objects": self._pinned,
            "read_leases": len(self._reads),
            "write_leases": len(self._writes),
            "reserved_bytes": sum(
                self._allocator.rounded(i.size) for w in self._writes.values() for i in w.items
            ),
        }

    def _allocate(self, size: int) -> int | None:
        need = self._allocator.rounded(size)
        capacity = self._allocator.capacity
        if self._watermark is None or need > capacity:
            return self._allocator.allocate(size)
        if self._allocator.used + need > self._watermark * capacity:
            self._evict_until_used(capacity * (self._watermark - self._evict_ratio) - need)
        offset = self._allocator.allocate(size)
        if offset is not None:
            return offset
        for key in list(self._policy.victims()):  # fragmented: go on until a range is long enough
            entry = self._index.get(key)
            if entry is None or entry.pins:
                continue
            self._evict(entry)
            if self._allocator.largest_free >= need:
                return self._allocator.allocate(size)
        return None

    def _evict_until_used(self, target: float) -> None:
        victims: dict[bytes, Entry] = {}  # a policy may name a key twice, or one that is not here
        freed = 0
        for key in self._policy.victims():
            if self._allocator.used - freed <= target:
                break
            entry = self._index.get(key)
            if entry is not None and not entry.pins and key not in victims:
                victims[key] = entry
                freed += self._allocator.rounded(entry.size)
        for entry in victims.values():
            self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        del self._index[entry.key]
        self._policy.remove(entry.key)
        self._free(entry.offset)
        self.counters.evicted += 1

    def _free(self, offset: int) -> None:
        self._view.generations[offset // PAGE] = 0
        self._allocator.free(offset)
