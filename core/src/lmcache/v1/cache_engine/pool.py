"""Memory objects over L1's pool: memory that is being written, and published objects that are being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count

from lmcache.v1.memory.arena import Arena
from lmcache.v1.memory.metadata import Layout
from lmcache.v1.memory.objects import MemoryObj, Place
from lmcache.v1.memory.turn import OwnerLock
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.leases import Entry, Reservation
from lmcache.v1.storage.shm_pool import PAGE, PoolView

__all__ = ["PoolObjects"]


class PoolObjects:
    """The owner of memory objects whose bytes are L1's.

    An object that is written is a reservation: given back unpublished, its memory is free. One that is read pins its
    entry until its last holder is gone, whoever that is. Every method wants L1's lock, which is the objects' own: so
    nobody may give a reference back while holding it.
    """

    def __init__(self, l1: L1Cache, view: PoolView, lock: OwnerLock) -> None:
        self.lock = lock
        self.lost: deque[tuple[Place, int, int]] = deque()
        self.late: deque[MemoryObj] = deque()
        self._l1 = l1
        self._arena = Arena(view.data_bytes, view.address, keeps=view)
        self._serial = count(1)
        self._behind: dict[int, Reservation | Entry] = {}

    def new(
        self, row: Sequence[tuple[bytes, int]], layout: Layout, account: str, depth: int
    ) -> list[MemoryObj] | None:
        """An object to write each ``(key, size)`` to, with one reference; None: there is no room for all."""
        items: list[Reservation] = []
        for key, size in row:
            item = self._l1.take(key, size, account, depth)
            if item is None:
                for taken in items:
                    self._l1.give_back(taken)
                return None
            items.append(item)
        return [self._object(item, layout) for item in items]

    def publish(self, obj: MemoryObj) -> bool:
        """Make what was written findable; False: somebody else was faster. The object lives on, as one that is read."""
        serial = obj.place.key
        item = self._behind[serial]
        if not isinstance(item, Reservation) or item.key in self._l1:
            return False
        entry = self._l1.publish(item)
        self._l1.pin_entries([entry])
        self._behind[serial] = entry
        return True

    def read(self, entry: Entry, layout: Layout) -> MemoryObj:
        """A published object, pinned, with one reference."""
        self._l1.pin_entries([entry])
        return self._object(entry, layout)

    def released(self, place: Place) -> None:
        """The last holder of an object is gone."""
        behind = self._behind.pop(place.key)
        if isinstance(behind, Reservation):
            self._l1.give_back(behind)
        else:
            self._l1.unpin_entries([behind])

    def reclaim(self) -> int:
        """Take back what was given back late, and what was dropped by holders that forgot; how many these were."""
        while self.late:
            self.late.popleft().drop_reference()
        found = 0
        while self.lost:
            place = self.lost.popleft()[0]
            if place.key in self._behind:  # else a generator that was dropped with it gave it back after all
                self.released(place)
                found += 1
        return found

    @property
    def live(self) -> int:
        """Objects that somebody holds."""
        return len(self._behind)

    def _object(self, behind: Reservation | Entry, layout: Layout) -> MemoryObj:
        serial = next(self._serial)
        self._behind[serial] = behind
        taken = -(-layout.nbytes // PAGE) * PAGE
        return MemoryObj(self, Place(self._arena, behind.offset, taken, serial), layout)
