"""What an engine of our own holds: keys, sizes, and which go first. Built from its scan, kept in step after that."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l2.adapter import Held

__all__ = ["TierIndex"]


class TierIndex:
    """Thread-safe. May name what is not there any more: a load finds out. Never forgets what is there, so that
    everything can be evicted.

    Args:
        policy: which objects go first.
        held: what is there at start.
    """

    def __init__(self, policy: EvictionPolicy, held: Iterable[Held]) -> None:
        self._mutex = threading.Lock()
        self._policy = policy
        self._sizes: dict[bytes, int] = {}
        self.add_all(held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: bytes, size: int) -> None:
        """It is there now, with so many bytes in all."""
        with self._mutex:
            if key not in self._sizes:
                self._policy.add(key, size)
            self._sizes[key] = size

    def add_all(self, held: Iterable[Held]) -> None:
        """They are there now; what was used longest ago is to go first."""
        for key, size, _ in sorted(held, key=lambda item: item.used):
            self.add(key, size)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Just used; of those in a row the first is to be kept longest."""
        with self._mutex:
            known = [key for key in keys if key in self._sizes]
            if known:
                self._policy.touch(known[::-1])

    def remove(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Forget; the sizes of those that were known."""
        with self._mutex:
            sizes = {key: self._sizes.pop(key) for key in dict.fromkeys(keys) if key in self._sizes}
            for key in sizes:
                self._policy.remove(key)
        return sizes

    def victims(self, nbytes: int, without: Collection[bytes]) -> list[bytes]:
        """Those to go first that have ``nbytes`` in all, or everything."""
        chosen: dict[bytes, None] = {}
        with self._mutex:
            for key in self._policy.victims():
                if nbytes <= 0:
                    break
                if key in self._sizes and key not in without and key not in chosen:
                    chosen[key] = None
                    nbytes -= self._sizes[key]
        return list(chosen)

    def keys(self) -> list[bytes]:
        """All of them, now."""
        with self._mutex:
            return list(self._sizes)

    def items(self) -> list[tuple[bytes, int]]:
        """Keys and sizes, now."""
        with self._mutex:
            return list(self._sizes.items())
