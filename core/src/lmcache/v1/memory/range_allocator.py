"""A best-fit allocator over one arena of bytes, with coalescing of neighbours on free.

Keeps no state inside the arena, so the arena may be shared with processes that write to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class RangeAllocator:
    """Hands out byte ranges ``[offset, offset + size)`` of an arena of ``capacity`` bytes.

    Sizes are rounded up to ``alignment`` (a power of two). Not thread-safe: the owner holds the lock.
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}: expected a power of two")
        if capacity < alignment:
            raise ValueError(f"arena capacity {capacity}: expected at least one unit of {alignment} bytes")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self._allocated: dict[int, int] = {}
        self._free_start: dict[int, int] = {}
        self._free_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.used = 0
        self._insert(0, self.capacity)

    @property
    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def tail_free(self) -> int:
        """Bytes of the free range that ends where the arena ends."""
        start = self._free_end.get(self.capacity)
        return 0 if start is None else self.capacity - start

    def grow(self, nbytes: int) -> None:
        """Append ``nbytes`` to the arena; the last free range grows with it.

        Raises:
            ValueError: if that is not a positive multiple of the alignment.
        """
        if nbytes <= 0 or nbytes % self.alignment:
            raise ValueError(f"growth by {nbytes} bytes: expected a positive multiple of {self.alignment}")
        offset, size = self.capacity, nbytes
        self.capacity += nbytes
        before = self._free_end.get(offset)
        if before is not None:
            size += offset - before
            self._remove(before, offset - before)
            offset = before
        self._insert(offset, size)

    def rounded(self, size: int) -> int:
        return (size + self.alignment - 1) & -self.alignment

    def allocate(self, size: int) -> int | None:
        """Offset of a free range of ``size`` bytes, or None when no range is large enough.

        Raises:
            ValueError: if ``size`` is not positive.
        """
        if size <= 0:
            raise ValueError(f"allocation of {size} bytes: expected a positive size")
        need = self.rounded(size)
        at = bisect_left(self._by_size, (need, -1))
        if at == len(self._by_size):
            return None
        have, offset = self._by_size[at]
        self._remove(offset, have)
        if have > need:
            self._insert(offset + need, have - need)
        self._allocated[offset] = need
        self.used += need
        return offset

    def free(self, offset: int) -> None:
        """Return the range that starts at ``offset``.

        Raises:
            ValueError: if no allocated range starts there (a double free, for one).
        """
        size = self._allocated.pop(offset, None)
        if size is None:
            raise ValueError(f"free of offset {offset}: no allocated range starts there")
        self.used -= size
        after = self._free_start.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        before = self._free_end.get(offset)
        if before is not None:
            length = offset - before
            self._remove(before, length)
            offset, size = before, size + length
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        self._free_start[offset] = size
        self._free_end[offset + size] = offset
        insort(self._by_size, (size, offset))

    def _remove(self, offset: int, size: int) -> None:
        del self._free_start[offset]
        del self._free_end[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
