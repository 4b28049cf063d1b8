"""Shared pages of event counters: how far the records of an event have come, for every process to read.

A slot is eight 64-bit words. ``RECORDED`` and ``COMPLETED`` only grow, also when a slot passes from one event
to the next: record ``n`` is done when ``COMPLETED >= n``, and ``COMPLETED`` passes ``n`` only when all records
up to it are done, in whatever order their streams get there. So nothing that comes late completes what came
after. ``GENERATION`` tells the events of a slot apart; it moves on only when nothing is outstanding, so a
reader that finds another one knows that all its event stood for is done. ``FAILED`` is the first record of
this generation whose stream dropped it, 0 if none; such a slot is not used again.

Only the process that created a page writes it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

from lmcache.v1.platform.cpu import futex
from lmcache.v1.platform.cpu.shared_file import SharedFile, create_file

__all__ = ["COMPLETED", "FAILED", "GENERATION", "MAGIC", "RECORDED", "Completion", "Slot", "SlotPool", "word"]

GENERATION, RECORDED, COMPLETED, FAILED = range(4)
MAGIC = int.from_bytes(b"LMCevts1", "little")
"""First word of a page. What would be slot 0 is the page's head."""

_WORDS = 8
_SLOTS = 1024
_SCAN = 16
_LOW = 0 if sys.byteorder == "little" else 4


def word(slot: int, which: int) -> int:
    """The index of a slot's word in a page of 64-bit words."""
    return slot * _WORDS + which


def futex_address(file: SharedFile, slot: int) -> int:
    """Where to sleep for a change of the slot's ``COMPLETED``: its low 32 bits."""
    return file.address + word(slot, COMPLETED) * 8 + _LOW


class Slot:
    """One slot, as its creator sees it."""

    def __init__(self, file: SharedFile, words: memoryview, index: int) -> None:
        self.file, self.index = file, index
        self._pid = os.getpid()
        self._words = words
        self._lock = threading.Lock()
        self._ended: deque[tuple[int, bool]] = deque()
        self._ahead: set[int] = set()

    def __getitem__(self, which: int) -> int:
        return int(self._words[word(self.index, which)])

    def _set(self, which: int, value: int) -> None:
        self._words[word(self.index, which)] = value

    def renew(self) -> None:
        """Give the slot to another event. It must be quiescent."""
        self._set(GENERATION, self[GENERATION] + 1)

    @property
    def quiescent(self) -> bool:
        return self[COMPLETED] == self[RECORDED]

    def record(self) -> Completion:
        """Begin a record; what is returned, once called, ends it."""
        with self._lock:
            number = self[RECORDED] + 1
            self._set(RECORDED, number)
        return Completion(self, number)

    def end(self, number: int, failed: bool) -> None:
        """A record is done, or never will be. May be called by the garbage collector, anywhere."""
        if self._pid != os.getpid():
            return  # a forked copy of what the parent still has to do
        self._ended.append((number, failed))
        while self._ended and self._lock.acquire(blocking=False):  # whoever has the lock looks again after it
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._ended:
            number, failed = self._ended.popleft()
            self._ahead.add(number)
            if failed and not 0 < self[FAILED] < number:
                self._set(FAILED, number)
        done = self[COMPLETED]
        while done + 1 in self._ahead:
            done += 1
            self._ahead.discard(done)
        if done != self[COMPLETED]:
            self._set(COMPLETED, done)
            futex.wake(futex_address(self.file, self.index))


class Completion:
    """Ends one record when a stream calls it; a stream that drops it uncalled has failed the record."""

    __slots__ = ("_number", "_open", "_slot")

    def __init__(self, slot: Slot, number: int) -> None:
        self._slot, self._number, self._open = slot, number, True

    def __call__(self, _: object = None) -> None:
        self._end(failed=False)

    def fail(self) -> None:
        """Say that the record will never be done."""
        self._end(failed=True)

    def __del__(self) -> None:
        self.fail()

    def _end(self, failed: bool) -> None:
        if self._open:
            self._open = False
            self._slot.end(self._number, failed)


class SlotPool:
    """The slots of one process. Pages are added as events are alive at once, and kept.

    Args:
        slots_per_page: One of them is the head.
    """

    def __init__(self, slots_per_page: int = _SLOTS) -> None:
        self._per_page = slots_per_page
        self._lock = threading.Lock()
        self._fresh: list[Slot] = []
        self._given_back: deque[Slot] = deque()
        self.pages: list[SharedFile] = []

    def take(self) -> Slot:
        """A slot for a new event.

        Raises:
            DeviceError: There is no memory for another page.
        """
        with self._lock:
            slot = self._used() or self._unused()
            slot.renew()
            return slot

    def give_back(self, slot: Slot) -> None:
        """Its event is gone. May be called by the garbage collector, anywhere."""
        self._given_back.append(slot)

    def _used(self) -> Slot | None:
        for _ in range(min(len(self._given_back), _SCAN)):
            slot = self._given_back.popleft()
            if slot[FAILED]:
                continue  # its FAILED must stay readable
            if slot.quiescent:
                return slot
            self._given_back.append(slot)
        return None

    def _unused(self) -> Slot:
        if not self._fresh:
            file = create_file(self._per_page * _WORDS * 8, "lmcache-events")
            words = memoryview(file).cast("Q")
            words[0] = MAGIC
            self._fresh = [Slot(file, words, index) for index in range(self._per_page - 1, 0, -1)]
            self.pages.append(file)
        return self._fresh.pop()
