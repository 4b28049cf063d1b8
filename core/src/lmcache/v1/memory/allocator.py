"""The allocator of memory objects: layouts in, objects out, over any space."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from lmcache.logging import init_logger
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.memory.metadata import Layout, layout_of
from lmcache.v1.memory.objects import MemoryObj, Place
from lmcache.v1.memory.spaces import Space
from lmcache.v1.memory.turn import OwnerLock

__all__ = ["MemoryAllocator", "MemoryAllocatorInterface"]

logger = init_logger(__name__)


class MemoryAllocatorInterface(Protocol):
    """What all allocators of memory objects have in common; ``MemoryAllocator`` says what each does."""

    @property
    def capacity(self) -> int | None: ...
    @property
    def used(self) -> int: ...
    @property
    def live(self) -> int: ...
    def allocate(self, shapes: Any, dtypes: Any = None, fmt: MemoryFormat = ...) -> MemoryObj | None: ...
    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat = ...
    ) -> list[MemoryObj] | None: ...
    def free(self, obj: MemoryObj) -> None: ...
    def batched_free(self, objs: Iterable[MemoryObj]) -> None: ...
    def memcheck(self) -> bool: ...
    def close(self) -> None: ...


class MemoryAllocator:
    """Objects in one space. Thread-safe. A space without room is answered with None, at once: whether to evict,
    to wait or to go without is the caller's choice."""

    def __init__(self, space: Space) -> None:
        self.lock = OwnerLock()
        self.lost: deque[tuple[Place, int, int]] = deque()
        self.late: deque[MemoryObj] = deque()
        self.dropped = 0
        """Objects that were dropped, so far, with references or pins left: each is a fault of its holder."""
        self._space = space
        self._live: dict[int, Place] = {}
        self._closed = False

    # --- objects -----------------------------------------------------------------------------------------

    def allocate(
        self, shapes: Any, dtypes: Any = None, fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> MemoryObj | None:
        """An object with one reference whose contents are anything, or None where there is no room.

        Args:
            shapes: A shape, or several for several tensors.
            dtypes: A type of torch or its name, one for all or one per shape; None: bytes.
            fmt: What the axes mean.

        Raises:
            ValueError: The layout makes no sense, or the allocator is closed.
        """
        found = self._allocate(layout_of(shapes, dtypes, fmt), 1)
        return None if found is None else found[0]

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat = MemoryFormat.UNDEFINED
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects of one layout; all of them or None.

        Raises:
            ValueError: As ``allocate``, and for a batch of less than one.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected 1 or more")
        return self._allocate(layout_of(shapes, dtypes, fmt), batch_size)

    def free(self, obj: MemoryObj) -> None:
        """Give the caller's reference back, which must be the last one.

        Raises:
            ValueError: Another allocator made it, others hold it, or it is free already.
        """
        if obj.parent() is not self:
            raise ValueError(f"free of {obj}: expected an object of this allocator")
        if not obj.is_valid():
            raise ValueError(f"free of {obj}: it is free already")
        if not obj.can_evict:
            raise ValueError(f"free of {obj}: others hold it; give one reference back with ref_count_down()")
        obj.ref_count_down()

    def batched_free(self, objs: Iterable[MemoryObj]) -> None:
        """Free each."""
        for obj in objs:
            self.free(obj)

    def _allocate(self, layout: Layout, count: int) -> list[MemoryObj] | None:
        while True:  # as often as there is more room than at the last try
            seen = self._space.capacity
            places = self._places(layout.nbytes, count)
            if places is not None:
                return [MemoryObj(self, place, layout) for place in places]
            if not self._grow(layout.nbytes, count, seen):
                return None

    def _places(self, nbytes: int, count: int) -> Sequence[Place] | None:
        with self.lock:
            if self._closed:
                raise ValueError(f"{type(self).__name__}: it is closed")
            self._reclaim()
            places: list[Place] = []
            while len(places) < count:
                place = self._space.take(nbytes)
                if place is None:
                    for taken in places:
                        self._space.give(taken)
                    return None
                places.append(place)
            self._live.update((place.key, place) for place in places)
            return places

    def _grow(self, nbytes: int, count: int, seen: int | None) -> bool:
        """Whether the capacity is above ``seen`` now. One that grows must have an end."""
        return False

    # --- what objects call -------------------------------------------------------------------------------

    def released(self, place: Place) -> None:
        """An object's last holder is gone. The lock is held."""
        del self._live[place.key]
        self._space.give(place)
        if self._closed and not self._live:
            self._space.close()

    def _reclaim(self) -> None:
        """Take back what was given back late, and what was dropped with holders left. The lock is held."""
        while self.late:
            self.late.popleft().drop_reference()
        if not self.lost:
            return
        before = self.dropped
        while self.lost:
            place, refs, pins = self.lost.popleft()
            if (
                self._live.get(place.key) is not place
            ):  # a generator that was dropped with it gave it back after all
                continue
            self.dropped += 1
            logger.debug("dropped: %d bytes at %d: refs=%d, pins=%d", place.nbytes, place.offset, refs, pins)
            if (
                place.arena.address
            ):  # else views of a device's tensor, which do not keep the object, may be in use
                self.released(place)
        if (
            self.dropped.bit_length() > before.bit_length()
        ):  # a caller that always forgets does not fill the log
            logger.warning(
                "%s: %d memory objects were dropped with references or pins left; each holder gives its own back "
                "with ref_count_down() or unpin()",
                type(self).__name__,
                self.dropped,
            )

    # --- the whole ---------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Bytes in all; None without a limit."""
        return self._space.capacity

    @property
    def used(self) -> int:
        """Bytes that objects take, with what alignment adds."""
        with self.lock:
            self._reclaim()
            return self._space.used

    @property
    def largest_free(self) -> int | None:
        """Bytes of the largest object that there is room for; None without a limit."""
        with self.lock:
            self._reclaim()
            return self._space.largest_free

    @property
    def live(self) -> int:
        """Objects that hold memory."""
        with self.lock:
            self._reclaim()
            return len(self._live)

    def memcheck(self) -> bool:
        """Whether the books are right: no two objects share a byte, and what is taken is what they take."""
        with self.lock:
            self._reclaim()
            return self._space.is_sound(self._live.values())

    def close(self) -> None:
        """Allocate nothing more. The memory goes when the last object does. Closing twice is allowed."""
        with self.lock:
            self._reclaim()
            if self._closed:
                return
            self._closed = True
            if not self._live:
                self._space.close()
                return
            live = len(self._live)
        logger.info("%s: closed; the memory stays until %d objects are released", type(self).__name__, live)

    def __enter__(self) -> MemoryAllocator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
