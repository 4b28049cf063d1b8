"""A tiered store over a small pool, and short spellings for what tests do with it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from helpers.local import pool_view
from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.prefetch import Prefetch
from lmcache.v1.storage.shm_pool import PAGE
from lmcache.v1.storage.tiers import TieredStore, TierOptions

LEASES = itertools.count(1)
CHAIN = [f"c{i}" for i in range(10)]


def key(name: str) -> bytes:
    """A key of 64 bytes that begins with the name."""
    return name.encode().ljust(64, b".")


def payload(name: str, pages: int = 1) -> bytes:
    """The bytes that belong to it."""
    return name.encode().ljust(16, b"~") * (pages * PAGE // 16)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition; whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Store(TieredStore):
    """``adapters`` below an L1 of ``pages`` pages; an object is one page."""

    def __init__(
        self,
        *adapters: StorageAdapter,
        pages: int = 64,
        watermark: float | None = 1.0,
        policy: EvictionPolicy | None = None,
        **options: object,
    ) -> None:
        self.view = pool_view(pages)
        self.lock = threading.Lock()
        self.events: list[tuple[str, object]] = []
        super().__init__(
            L1Cache(self.view, watermark, 0.0, policy),
            self.view,
            [(f"t{i}", adapter) for i, adapter in enumerate(adapters)],
            self.lock,
            TierOptions(**options),  # type: ignore[arg-type]
            observe=lambda event, fields: self.events.append((event, fields)),
        )

    def put(self, *names: str, account: str = "") -> int:
        """Store a chain of chunks and publish it; how many went in."""
        lease = next(LEASES)
        with self.lock:
            column = [(key(name), PAGE) for name in names]
            (slots,) = self.l1.reserve("s", lease, [column], True, account)
            granted = [name for name, (offset, _) in zip(names, slots, strict=True) if offset >= 0]
            for name, (offset, _) in zip(names, slots, strict=True):
                if offset >= 0:
                    self.view.data[offset : offset + PAGE] = payload(name)
            count = self.l1.commit("s", lease, range(len(granted)))
            self.published([key(name) for name in names])
        return count

    def in_l1(self, *names: str) -> int:
        """Length of the prefix that L1 has."""
        with self.lock:
            return self.l1.prefix_length([[key(name)] for name in names])

    def forget(self) -> None:
        """Empty L1 alone."""
        with self.lock:
            self.l1.clear()

    def ask(
        self, *names: str, seconds: float = 10.0, account: str = ""
    ) -> tuple[Prefetch | None, threading.Event]:
        """Begin a prefetch; the event is set when it is done."""
        ended = threading.Event()
        with self.lock:
            found = self.prefetch([[(key(name), PAGE)] for name in names], account, seconds, ended.set)
        return found, ended

    def fetch(self, *names: str, seconds: float = 10.0) -> int:
        """Prefetch, check every byte of what came, release; the number of chunks."""
        ended = threading.Event()
        with self.lock:  # without help from below what counts is what L1 has at this moment
            found = self.prefetch([[(key(name), PAGE)] for name in names], "", seconds, ended.set)
            if found is None:
                return self.l1.prefix_length([[key(name)] for name in names])
        assert ended.wait(seconds + 5.0), "on_done was not called"
        with self.lock:
            assert found.done
            self.check(names[: found.chunks])
            found.release()
            return found.chunks

    def check(self, names: Sequence[str]) -> None:
        """What L1 has of them, and it must have all, is right."""
        for name in names:
            entry = self.l1.get(key(name))
            assert entry is not None, name
            assert bytes(self.view.data[entry.offset : entry.offset + entry.size]) == payload(name), name

    def nothing_is_taken(self) -> bool:
        """No pin, no reservation, nothing in a queue."""
        with self.lock:
            usage = self.l1.usage()
            queues = [tier["queued_objects"] + tier["queued_bytes"] for tier in self.status()]
        return not any([usage["pinned_objects"], usage["reserved_bytes"], *queues])


def memory(**options: object) -> FaultAdapter:
    """A tier in memory that does not err, unless the options say so."""
    return FaultAdapter(FaultOptions(**options))  # type: ignore[arg-type]


class Recorder(FaultAdapter):
    """Remembers the order of what it stores, and waits before each call until it may go on."""

    def __init__(self, **options: object) -> None:
        super().__init__(FaultOptions(**options))  # type: ignore[arg-type]
        self.order: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = 0

    def store(self, objects, call):  # type: ignore[no-untyped-def]
        self.at_gate += 1
        self.gate.wait(20)
        self.order += [put.key.rstrip(b".").decode() for put in objects]
        return super().store(objects, call)

    def load(self, wants, call):  # type: ignore[no-untyped-def]
        self.at_gate += 1
        self.gate.wait(20)
        return super().load(wants, call)


def held(adapter: FaultAdapter) -> set[str]:
    """Names of what it holds."""
    return {k.rstrip(b".").decode() for k in list(adapter.objects)}
