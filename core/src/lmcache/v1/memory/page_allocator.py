"""An allocator of equal pages: no fragmentation, no search, and every range begins on a page."""

from __future__ import annotations

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out pages of ``page`` bytes by their offsets. Not thread-safe: the owner holds the lock."""

    def __init__(self, capacity: int, page: int) -> None:
        """
        Raises:
            ValueError: There is not room for one page, or a page has no bytes.
        """
        if page < 1 or capacity < page:
            raise ValueError(f"arena capacity {capacity}: expected at least one page of {page} bytes")
        self.page = page
        self.capacity = capacity - capacity % page
        # The page that was freed last comes first: it is the one most likely to be in a cache.
        self._free = list(range(self.capacity - page, -1, -page))
        self._allocated: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._allocated) * self.page

    @property
    def largest_free(self) -> int:
        return self.page if self._free else 0

    def rounded(self, size: int) -> int:
        return self.page

    def allocate(self, size: int) -> int | None:
        """Offset of a page, or None when all are taken.

        Raises:
            ValueError: ``size`` bytes do not fit in a page.
        """
        if not 0 < size <= self.page:
            raise ValueError(f"allocation of {size} bytes: expected 1 to {self.page}, what a page has")
        if not self._free:
            return None
        offset = self._free.pop()
        self._allocated.add(offset)
        return offset

    def free(self, offset: int) -> None:
        """
        Raises:
            ValueError: No allocated page starts there (a double free, for one).
        """
        if offset not in self._allocated:
            raise ValueError(f"free of offset {offset}: no allocated page starts there")
        self._allocated.remove(offset)
        self._free.append(offset)
