"""What an allocator of objects takes places from: ranges of one arena, or buffers one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lmcache.v1.memory.arena import Arena, buffer_arena
from lmcache.v1.memory.objects import Place

__all__ = ["LEAST_ALIGNMENT", "ArenaSpace", "BufferSpace", "Ranges", "Space"]

#: Bytes of the largest element: a tensor begins at a multiple of its element's size.
LEAST_ALIGNMENT = 8


class Ranges(Protocol):
    """What ``RangeAllocator`` and ``PageAllocator`` have in common."""

    capacity: int

    @property
    def used(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    def rounded(self, size: int) -> int: ...
    def allocate(self, size: int) -> int | None: ...
    def free(self, offset: int) -> None: ...


class Space(Protocol):
    """Called under the allocator's lock."""

    @property
    def capacity(self) -> int | None:
        """Bytes in all; None without a limit."""

    @property
    def used(self) -> int: ...
    @property
    def largest_free(self) -> int | None: ...

    def take(self, nbytes: int) -> Place | None:
        """A place of at least that many bytes; None if there is none."""

    def give(self, place: Place) -> None:
        """Take a place back."""

    def is_sound(self, places: Iterable[Place]) -> bool:
        """Whether exactly these places are taken, and no two of them share a byte."""

    def close(self) -> None:
        """No place is taken any more: give the memory back."""


class ArenaSpace:
    """Ranges of one arena."""

    def __init__(self, arena: Arena, ranges: Ranges) -> None:
        self.arena = arena
        self.ranges = ranges

    @property
    def capacity(self) -> int | None:
        return self.ranges.capacity

    @property
    def used(self) -> int:
        return self.ranges.used

    @property
    def largest_free(self) -> int | None:
        return self.ranges.largest_free

    def take(self, nbytes: int) -> Place | None:
        offset = self.ranges.allocate(nbytes)
        if offset is None:
            return None
        return Place(self.arena, offset, self.ranges.rounded(nbytes), offset)

    def give(self, place: Place) -> None:
        self.ranges.free(place.offset)

    def is_sound(self, places: Iterable[Place]) -> bool:
        at = total = 0
        for place in sorted(places, key=lambda place: place.offset):
            if place.offset < at:
                return False
            at = place.offset + place.nbytes
            total += place.nbytes
        return at <= self.ranges.capacity and total == self.ranges.used

    def close(self) -> None:
        self.arena.close()


class BufferSpace:
    """Each place is a buffer of its own, of Python's memory."""

    def __init__(self, limit: int | None = None) -> None:
        self.capacity = limit
        self.used = 0
        self._serial = 0

    @property
    def largest_free(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.used

    def take(self, nbytes: int) -> Place | None:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            return None
        try:
            arena = buffer_arena(nbytes)
        except MemoryError:
            return None  # the host's limit is a limit, too
        self._serial += 1
        self.used += nbytes
        return Place(arena, 0, nbytes, self._serial)

    def give(self, place: Place) -> None:
        self.used -= place.nbytes  # the buffer itself goes with the last view of it

    def is_sound(self, places: Iterable[Place]) -> bool:
        return sum(place.nbytes for place in places) == self.used

    def close(self) -> None:
        """Nothing is kept beyond the buffers."""
