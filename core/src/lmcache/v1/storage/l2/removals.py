"""What is to go from a tier and is not gone yet: it is not loaded any more, and what is published anew comes after."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Removal", "Removals"]


@dataclass(frozen=True, eq=False, slots=True)
class Removal:
    """Objects that are to go.

    Args:
        keys: which; None: whatever is there.
        account: only what counts against it.
    """

    keys: frozenset[bytes] | None = None
    account: str | None = None

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> Removal:
        return cls(frozenset(keys))

    def covers(self, key: bytes, account: str) -> bool:
        """Whether an object of this key and account is one of them."""
        return (self.keys is None or key in self.keys) and self.account in (None, account)


class Removals:
    """Those of one tier that have begun, and what is written and loaded beside them. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: tuple[Removal, ...] = ()
        self._owed: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._watching: dict[int, set[bytes]] = {}
        """For each load under way, by the id of the set: what was being written when it began, or since."""

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._open)

    def begin(self, removal: Removal) -> None:
        with self._mutex:
            self._open = (*self._open, removal)

    def begin_except(self, keys: Iterable[bytes], anew: set[bytes]) -> tuple[list[bytes], Removal]:
        """Begin one of those of ``keys`` that are not in a load's ``anew``; which they are."""
        with self._mutex:
            old = [key for key in keys if key not in anew]
            removal = Removal.of(old)
            self._open = (*self._open, removal)
        return old, removal

    def end(self, removal: Removal) -> None:
        with self._mutex:
            self._open = tuple(one for one in self._open if one is not removal)

    def owe(self, keys: Iterable[bytes]) -> None:
        """These could not be removed, and are to be another time."""
        with self._mutex:
            self._owed.update(keys)

    def owed(self) -> list[bytes]:
        """What is owed, for whoever removes it now."""
        with self._mutex:
            keys, self._owed = list(self._owed), set()
        return keys

    def cover(self, key: bytes, account: str) -> bool:
        """Whether an object of this key and account is about to go."""
        return any(one.covers(key, account) for one in self._open)

    def admits(self, key: bytes, account: str) -> bool:
        """Whether an object may be written now: it would not go with what was there before it. It then is being
        written until :meth:`returned`."""
        with self._mutex:
            if self.cover(key, account):
                return False
            self._writing.add(key)
            for anew in self._watching.values():
                anew.add(key)
        return True

    def returned(self, keys: Iterable[bytes]) -> None:
        """These are being written no more."""
        with self._mutex:
            self._writing.difference_update(keys)

    @contextmanager
    def watched(self) -> Iterator[set[bytes]]:
        """Around a load: a set that gets the keys of what is written meanwhile."""
        with self._mutex:
            anew = set(self._writing)
            self._watching[id(anew)] = anew
        try:
            yield anew
        finally:
            with self._mutex:
                del self._watching[id(anew)]
