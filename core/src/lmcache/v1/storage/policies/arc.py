"""ARC: a balance between recently and frequently used that learns from what it evicted too early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from lmcache.v1.storage.eviction import EvictionPolicy

__all__ = ["ARC"]

_Keys = OrderedDict[bytes, None]


class ARC(EvictionPolicy):
    """Adaptive replacement cache: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03.

    Objects used once since they came (the paper's T1) and objects used more often (T2) are two LRU lists. Two
    lists of ghosts, keys without objects (B1, B2), say what left which of them lately. A key that comes back
    from B1 says that T1 should have been larger, one from B2 the opposite; ``_target`` is how large T1 shall be.

    Two things differ because L1 is not a cache of so and so many pages. The paper's capacity is what was held
    when L1 last asked for victims, for then it was full. And L1 asks before it publishes what it makes room
    for, so what a returning key teaches counts from the next eviction on.
    """

    def __init__(self) -> None:
        self._once: _Keys = OrderedDict()
        self._often: _Keys = OrderedDict()
        self._left_once: _Keys = OrderedDict()
        self._left_often: _Keys = OrderedDict()
        self._target = 0.0
        self._capacity = 0

    def add(self, key: bytes, size: int) -> None:
        once, often = len(self._left_once), len(self._left_often)
        if key in self._left_once:
            self._target = min(self._target + max(1.0, often / once), self._capacity)
            del self._left_once[key]
            self._often[key] = None
        elif key in self._left_often:
            self._target = max(self._target - max(1.0, once / often), 0.0)
            del self._left_often[key]
            self._often[key] = None
        else:
            self._once[key] = None
        self._forget()

    def touch(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self._often:
                self._often.move_to_end(key)
            else:
                del self._once[key]
                self._often[key] = None

    def arrange(self, keys: list[bytes]) -> None:
        for key in keys:
            (self._often if key in self._often else self._once).move_to_end(key)

    def remove(self, key: bytes) -> None:
        if key in self._once:
            del self._once[key]
            self._left_once[key] = None
        else:
            del self._often[key]
            self._left_often[key] = None
        self._forget()

    def victims(self) -> Iterable[bytes]:
        self._capacity = len(self._once) + len(self._often)
        return self._ordered()

    @property
    def ghosts(self) -> int:
        """How many keys are remembered without an object: never more than twice the capacity."""
        return len(self._left_once) + len(self._left_often)

    def _ordered(self) -> Iterator[bytes]:
        once, often = iter(self._once), iter(self._often)
        n_once, n_often = len(self._once), len(self._often)
        while n_once or n_often:
            if n_once and (n_once > self._target or not n_often):
                n_once -= 1
                yield next(once)
            else:
                n_often -= 1
                yield next(often)

    def _forget(self) -> None:
        """Keep T1 with its ghosts within one capacity, and everything within two."""
        room = self._capacity - len(self._once)
        while self._left_once and len(self._left_once) > room:
            self._left_once.popitem(last=False)
        room += self._capacity - len(self._often) - len(self._left_once)
        while self._left_often and len(self._left_often) > room:
            self._left_often.popitem(last=False)
