"""L1: the index over the shared-memory pool, with eviction on the allocation path and owned leases.

Invariants (held by ``tests/unit/test_l1_history.py``):

* an object is found only after its commit, and never before its bytes are complete;
* memory under a pin or a write lease is never evicted, freed or given to anybody else;
* the generation word of freed memory is 0 before the memory can be given out again.

Not thread-safe: the server holds one lock around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l1_objects import L1Objects
from lmcache.v1.storage.leases import Entry, ReadLease, Reservation, Tombstones, WriteLease
from lmcache.v1.storage.shm_pool import PoolView

EXISTS = -1
FULL = -2
GRACE_SECONDS = 2.0
"""What a server and an engine give to what was just stored: its next lookup comes within that, as a rule."""


class L1Cache(L1Objects):
    """Objects by key in a pool, and the leases on them.

    Args: those of :class:`L1Objects`.
    """

    def __init__(
        self,
        view: PoolView,
        watermark: float | None = 0.95,
        evict_ratio: float = 0.05,
        policy: EvictionPolicy | None = None,
        grace_seconds: float = 0.0,
    ) -> None:
        super().__init__(view, watermark, evict_ratio, policy, grace_seconds)
        self._reads: dict[tuple[str, int], ReadLease] = {}
        self._writes: dict[tuple[str, int], WriteLease] = {}
        self._gone = Tombstones()

    # ---- reading

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
        self,
        session: str,
        lease: int,
        columns: Sequence[Sequence[tuple[bytes, int]]],
        mapped: bool,
        account: str = "",
    ) -> list[list[tuple[int, int]]]:
        """Reserve memory for columns of ``(key, size)``, each in the order of a chain of chunks.

        Args:
            account: whose quota it counts against.

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
                found = self._index.get(key)
                if found is not None:
                    found.transient = False  # somebody wants it here
                    out.append((EXISTS, 0))
                    continue
                offset = (
                    None if too_large is not None and size >= too_large else self._allocate(size, account)
                )
                if offset is None:
                    too_large = size if too_large is None else min(size, too_large)
                    self.counters.dropped_full += 1
                    out.append((FULL, 0))
                    continue
                items.append(self._reservation(key, offset, size, depth, account))
                out.append((offset, items[-1].generation))
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
                self._free(item)
            elif item.key in self._index:
                self._index[item.key].transient = False
                self.counters.duplicates += 1
                self._free(item)
            else:
                self._publish(item)
                published += 1
        self.counters.stored += published
        return published

    def abort(self, session: str, lease: int) -> None:
        """Free a write lease's memory unpublished. Harmless if it is not there (any more)."""
        found = self._writes.pop((session, lease), None)
        self._gone.add(session, lease)
        for item in found.items if found else ():
            self.counters.aborted += 1
            self._free(item)

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

    # ---- state

    @property
    def has_leases(self) -> bool:
        """Whether anybody may still be reading or writing."""
        return bool(self._reads or self._writes or self._taken)

    def usage(self) -> dict[str, int]:
        """Bytes and counts for status and metrics."""
        return {
            "capacity_bytes": self._allocator.capacity,
            "used_bytes": self._allocator.used,
            "objects": len(self._index),
            "pinned_objects": self._pinned,
            "held_objects": self._held,
            "read_leases": len(self._reads),
            "write_leases": len(self._writes),
            "reserved_bytes": sum(
                self._allocator.rounded(item.size)
                for items in (*(w.items for w in self._writes.values()), self._taken.values())
                for item in items
            ),
        }
