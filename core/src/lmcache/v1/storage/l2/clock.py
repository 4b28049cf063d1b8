"""One thread that does small things later: ends of waits, and probes. What it calls must return at once."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from lmcache.logging import init_logger

__all__ = ["Alarm", "Clock"]

logger = init_logger(__name__)


class Alarm:
    """Something to be done at a time, unless it is cancelled first."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Harmless afterwards. An action that began goes on."""
        self.action = None


class Clock:
    """Alarms, in order. The thread begins with the first of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, action: Callable[[], None]) -> Alarm:
        """Call ``action`` in so many seconds, from the clock's thread. Never, once the clock is closed."""
        alarm = Alarm(time.monotonic() + seconds, action)
        with self._changed:
            if self._closed:
                return alarm
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-tiers-clock", daemon=True)
                self._thread.start()
            first = not self._heap or alarm.when < self._heap[0][0]
            heapq.heappush(self._heap, (alarm.when, next(self._order), alarm))
            if len(self._heap) > 256 and self._heap[len(self._heap) // 2][2].action is None:
                self._heap = [item for item in self._heap if item[2].action is not None]
                heapq.heapify(self._heap)
            if first:
                self._changed.notify()
        return alarm

    def close(self) -> None:
        """Do what is due, forget the rest, end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if not self._heap or self._heap[0][0] > time.monotonic():
                    self._heap.clear()
                    return
                action = heapq.heappop(self._heap)[2].action
            if action is not None:
                try:
                    action()
                except Exception:  # the others' alarms must go off all the same
                    logger.exception("a timed action of the tiers failed")
