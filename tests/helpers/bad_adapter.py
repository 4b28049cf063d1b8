"""A storage engine in memory that misbehaves as it is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage, Want


class BadAdapter(StorageAdapter):
    """``mode``: ``well``; ``fails`` raises; ``hangs`` until :meth:`release`; ``lies`` says loaded and changes a byte;
    ``forgets`` lists objects and has none of them."""

    def __init__(self, shared: bool = True, sync: bool = False) -> None:
        self.shared = shared
        self.sync = sync
        self.mode = "well"
        self.held: dict[bytes, tuple[bytes, bytes]] = {}
        self.closed = False
        self.calls: list[str] = []
        self._go = threading.Event()

    def release(self) -> None:
        self.mode = "well"
        self._go.set()

    def _enter(self, what: str) -> None:
        self.calls.append(what)
        if self.mode == "hangs":
            self._go.wait(60)
        if self.mode == "fails":
            raise AdapterError("told to fail")

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        self._enter("contains")
        return [key in self.held for key in keys]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        self._enter("store")
        for put in objects:
            self.held[put.key] = (put.header, bytes(put.payload))
        return [True] * len(objects)

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        self._enter("load")
        return [self._one(want) for want in wants]

    def _one(self, want: Want) -> bytes | None:
        if self.mode == "forgets" or want.key not in self.held:
            return None
        header, payload = self.held[want.key]
        if len(payload) != len(want.payload):
            return None
        want.payload[:] = payload
        if self.mode == "lies":
            want.payload[len(payload) // 2] ^= 1
        return header

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        self._enter("delete")
        for key in keys:
            self.held.pop(key, None)
        return [True] * len(keys)

    def clear(self, call: Call) -> int:
        self._enter("clear")
        count = len(self.held)
        self.held.clear()
        return count

    def usage(self) -> Usage:
        return Usage(sum(len(p) for _, p in self.held.values()), len(self.held), 0)

    def close(self) -> None:
        self.closed = True
