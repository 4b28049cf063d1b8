"""The two policies that do not care what is used: first in, first out; and none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lmcache.v1.storage.eviction import EvictionPolicy

__all__ = ["FIFO", "Noop"]


class FIFO(EvictionPolicy):
    """What was published first goes first, whatever was used since."""

    def __init__(self) -> None:
        # Not a dict: finding the first key of a dict costs more with every key deleted before it.
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes, size: int) -> None:
        self._order[key] = None

    def touch(self, keys: list[bytes]) -> None:
        """Nothing: an object's age is all that counts."""

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def victims(self) -> Iterable[bytes]:
        return self._order


class Noop(EvictionPolicy):
    """Nothing ever goes: what is new is dropped when L1 is full."""

    def add(self, key: bytes, size: int) -> None:
        """Nothing: there is no order to keep."""

    def touch(self, keys: list[bytes]) -> None:
        """Nothing."""

    def remove(self, key: bytes) -> None:
        """Nothing."""

    def victims(self) -> Iterable[bytes]:
        return ()
