"""What is to happen by a certain time, on the request loop's thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """Callbacks by time. The server's lock guards it, and is held while they run."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def next_deadline(self) -> float:
        """``time.monotonic`` of the first; infinite if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at ``when`` (``time.monotonic``) or soon after."""
        heapq.heappush(self._heap, (when, next(self._order), callback))

    def expire(self, now: float) -> None:
        """Call all whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
