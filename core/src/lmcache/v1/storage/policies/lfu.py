"""LFU: least frequently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from lmcache.v1.storage.eviction import EvictionPolicy

__all__ = ["LFU"]


class _Bucket:
    """The keys used equally often, least recently used first, between the buckets used less and more often."""

    __slots__ = ("keys", "less", "more", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        self.less: _Bucket = self
        self.more: _Bucket = self


class LFU(EvictionPolicy):
    """Least frequently used first, and of those used equally often, least recently used first.

    Uses are counted for as long as an object is held; nothing ages. Every call costs the same however many
    objects there are: a linked list of buckets, one per count, as in Shah, Mitra and Matani, "An O(1) algorithm
    for implementing the LFU cache eviction scheme" (2010).
    """

    def __init__(self) -> None:
        self._ring = _Bucket(0)  # holds no keys: before the least used and after the most used
        self._bucket_of: dict[bytes, _Bucket] = {}

    def add(self, key: bytes, size: int) -> None:
        self._put(key, self._ring, 1)

    def touch(self, keys: list[bytes]) -> None:
        for key in keys:
            old = self._bucket_of[key]
            self._put(key, old, old.uses + 1)
            self._take(key, old)

    def arrange(self, keys: list[bytes]) -> None:
        for key in keys:
            self._bucket_of[key].keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._take(key, self._bucket_of.pop(key))

    def victims(self) -> Iterable[bytes]:
        return self._ordered()

    def _ordered(self) -> Iterator[bytes]:
        bucket = self._ring.more
        while bucket is not self._ring:
            yield from bucket.keys
            bucket = bucket.more

    def _put(self, key: bytes, less: _Bucket, uses: int) -> None:
        """Into the bucket of ``uses``, which comes right after ``less`` if it is there."""
        bucket = less.more
        if bucket.uses != uses:
            bucket = _Bucket(uses)
            bucket.less, bucket.more = less, less.more
            less.more.less = bucket
            less.more = bucket
        bucket.keys[key] = None
        self._bucket_of[key] = bucket

    def _take(self, key: bytes, bucket: _Bucket) -> None:
        del bucket.keys[key]
        if not bucket.keys:
            bucket.less.more, bucket.more.less = bucket.more, bucket.less
