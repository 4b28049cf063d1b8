"""Memory of other processes, mapped into this one: once per allocation, until nothing uses it any more."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

from lmcache.logging import init_logger

__all__ = ["Mapping", "Mappings"]

logger = init_logger(__name__)


class Mapping:
    """One mapped allocation. It ends with the last reference: wrappers and tensors hold one each."""

    def __init__(self, ptr: int, nbytes: int, unmap: Callable[[int], None]) -> None:
        self.ptr, self.nbytes = ptr, nbytes
        # At the process's end the driver unmaps all by itself, and may be gone before us.
        weakref.finalize(self, _unmap, unmap, ptr).atexit = False

    def holds(self, ptr: int) -> bool:
        """Whether an address is in it."""
        return self.ptr <= ptr < self.ptr + self.nbytes


def _unmap(unmap: Callable[[int], None], ptr: int) -> None:
    try:
        unmap(ptr)
    except RuntimeError as exc:  # nobody waits for the answer
        logger.warning("memory of another process at %#x is not unmapped: %s", ptr, exc)


class Mappings:
    """Those of this process, by what tells one allocation from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._open: weakref.WeakValueDictionary[Hashable, Mapping] = weakref.WeakValueDictionary()

    def open(self, key: Hashable, map_it: Callable[[], Mapping]) -> Mapping:
        """The mapping of ``key``, made if there is none. An exporter that does not answer holds up nobody else's."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            found = self._open.get(key)
            if found is None:
                try:
                    found = map_it()
                    with self._lock:
                        self._open[key] = found
                finally:
                    with self._lock:
                        self._making.pop(key, None)
            return found

    def hold(self, ptr: int) -> bool:
        """Whether an address is in memory that was mapped here."""
        return any(mapping.holds(ptr) for mapping in list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)
