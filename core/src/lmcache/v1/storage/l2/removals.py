"""What is to go from a tier and is not gone yet: it is not loaded any more, and what is published anew comes after."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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
    """Those of one tier that have begun. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: tuple[Removal, ...] = ()

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._open)

    def begin(self, removal: Removal) -> None:
        with self._mutex:
            self._open = (*self._open, removal)

    def end(self, removal: Removal) -> None:
        with self._mutex:
            self._open = tuple(one for one in self._open if one is not removal)

    def cover(self, key: bytes, account: str) -> bool:
        """Whether an object of this key and account is about to go."""
        return any(one.covers(key, account) for one in self._open)
