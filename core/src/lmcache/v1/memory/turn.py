"""The lock of an owner of memory objects, which knows who is inside."""

from __future__ import annotations

import threading

__all__ = ["OwnerLock"]


class OwnerLock:
    """A lock, not reentrant, that a thread can ask whether it is in it.

    The collector runs the end of a dropped generator in whatever thread it happens to run, also in one that holds the
    lock. What gives memory back there must know, and only note it: it would wait for itself.
    """

    __slots__ = ("_inside", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[int] = set()

    def is_inside(self) -> bool:
        """Whether this thread holds the lock, or is just taking it or letting go of it."""
        return threading.get_ident() in self._inside

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of ``threading.Lock``."""
        me = threading.get_ident()
        was_inside = me in self._inside  # a condition asks by trying whether its caller holds the lock
        self._inside.add(me)  # before: the collector may come between the two
        taken = False
        try:
            taken = self._lock.acquire(blocking, timeout)
        finally:
            if not taken and not was_inside:
                self._inside.discard(me)
        return taken

    def release(self) -> None:
        self._lock.release()
        self._inside.discard(threading.get_ident())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._lock.locked()
