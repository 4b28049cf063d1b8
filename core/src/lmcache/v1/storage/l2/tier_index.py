"""What an engine of our own holds: keys, sizes, whose, which go first. Built from its scan, kept in step since."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l2.adapter import Held

__all__ = ["Item", "TierIndex"]


class Item(NamedTuple):
    """``size``: of header and payload. ``account`` None: not known. ``taken``: of the capacity; 0: as the size."""

    size: int
    account: str | None = None
    taken: int = 0


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
        self._items: dict[bytes, Item] = {}
        self._objects: Counter[str | None] = Counter()
        """Of each account."""
        self.add_all(held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def add(self, key: bytes, item: Item) -> None:
        """It is there now."""
        with self._mutex:
            old = self._items.get(key)
            if old is None:
                self._policy.add(key, item.size)
            else:
                self._uncount(old)
            self._items[key] = item
            self._objects[item.account] += 1

    def add_all(self, held: Iterable[Held]) -> None:
        """They are there now; what was used longest ago is to go first."""
        for key, size, _, account, taken in sorted(held, key=lambda item: item.used):
            self.add(key, Item(size, account, taken))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Just used; of those in a row the first is to be kept longest."""
        with self._mutex:
            known = [key for key in keys if key in self._items]
            if known:
                self._policy.touch(known[::-1])

    def remove(self, keys: Iterable[bytes]) -> dict[bytes, Item]:
        """Forget; those that were known."""
        with self._mutex:
            found = {key: self._items.pop(key) for key in dict.fromkeys(keys) if key in self._items}
            for key, item in found.items():
                self._policy.remove(key)
                self._uncount(item)
        return found

    def victims(self, nbytes: int, without: Collection[bytes], account: str | None = None) -> list[bytes]:
        """Those to go first that take ``nbytes`` in all, or everything; of this account only, if one is named."""
        chosen: list[bytes] = []
        seen: set[bytes] = set()  # a policy may name a key twice
        with self._mutex:
            objects = len(self._items) if account is None else self._objects[account]
            for key in self._policy.victims():
                if nbytes <= 0 or len(seen) == objects:
                    break
                item = self._items.get(key)
                if item is None or key in seen or account not in (None, item.account):
                    continue
                seen.add(key)
                if key not in without:
                    chosen.append(key)
                    nbytes -= item.taken or item.size
        return chosen

    def of_account(self, account: str) -> tuple[list[bytes], list[bytes]]:
        """What counts against it, and that of which it is not known."""
        with self._mutex:
            mine = [key for key, item in self._items.items() if item.account == account]
            unknown = [key for key, item in self._items.items() if item.account is None]
        return mine, unknown

    def keys(self) -> list[bytes]:
        """All of them, now."""
        with self._mutex:
            return list(self._items)

    def items(self) -> list[tuple[bytes, Item]]:
        """All of them by key, now."""
        with self._mutex:
            return list(self._items.items())

    def _uncount(self, item: Item) -> None:
        self._objects[item.account] -= 1
        if not self._objects[item.account]:
            del self._objects[item.account]
