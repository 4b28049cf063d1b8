"""S3-FIFO: three queues that drop quickly what is used once."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from lmcache.v1.storage.eviction import EvictionPolicy

__all__ = ["S3FIFO"]

_MOST_USES = 3
_SMALL_SHARE = 10


class S3FIFO(EvictionPolicy):
    """Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP '23.

    New objects enter a small queue, a tenth of the cache. At its end, what was used at least twice moves to the
    main queue, and the rest goes, leaving its key as a ghost, of which there are as many as fit into the main
    queue. What comes back while its ghost is there enters the main queue. At the end of that one, what was used
    goes round again for each of its uses, at most three.

    The capacity is what was held when L1 last asked for victims, for then it was full. Being asked changes
    nothing else: which objects are passed over on the way to a victim is noted, and they move when L1 evicts
    that victim, since it may read further than it evicts.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._small_target = 1
        self._most_ghosts = 0
        self._passed: list[tuple[bytes, int]] = []
        self._passed_before: dict[bytes, int] = {}
        self._moved = 0

    def add(self, key: bytes, size: int) -> None:
        self._no_plan()
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, keys: list[bytes]) -> None:
        self._no_plan()
        for key in keys:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, _MOST_USES)

    def arrange(self, keys: list[bytes]) -> None:
        """Nothing: queues keep the order in which keys came."""

    def remove(self, key: bytes) -> None:
        self._move_passed(self._passed_before.pop(key, 0))
        if key in self._small:
            del self._small[key]
            self._ghosts[key] = None
        else:
            del self._main[key]
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterable[bytes]:
        self._no_plan()
        capacity = len(self._small) + len(self._main)
        self._small_target = max(1, capacity // _SMALL_SHARE)
        self._most_ghosts = capacity - self._small_target
        return self._ordered(self._passed, self._passed_before)

    @property
    def ghosts(self) -> int:
        """How many keys are remembered without an object: never more than the main queue's share of the cache."""
        return len(self._ghosts)

    def _ordered(self, passed: list[tuple[bytes, int]], before: dict[bytes, int]) -> Iterator[bytes]:
        """What goes first, noting in ``passed`` who moves to the end of the main queue, and with which count."""
        small, main = iter(self._small.items()), iter(self._main.items())
        n_small, n_main, unmoved = len(self._small), len(self._main), len(self._main)
        behind: deque[tuple[bytes, int]] = deque()  # what follows the main queue's own by now
        while n_small or n_main:
            if n_small and (n_small >= self._small_target or not n_main):
                key, uses = next(small)
                n_small -= 1
                stays, uses = uses > 1, 0
                n_main += stays
            else:
                key, uses = next(main) if unmoved else behind.popleft()
                unmoved = max(0, unmoved - 1)
                stays, uses = uses > 0, uses - 1
                n_main -= not stays
            if stays:
                behind.append((key, uses))
                passed.append((key, uses))
            else:
                before[key] = len(passed)
                yield key

    def _move_passed(self, upto: int) -> None:
        for key, uses in self._passed[self._moved : upto]:
            if self._small.pop(key, None) is not None or self._main.pop(key, None) is not None:
                self._main[key] = uses
        self._moved = max(self._moved, upto)

    def _no_plan(self) -> None:
        """What was noted holds until anything else happens."""
        self._passed, self._passed_before, self._moved = [], {}, 0
