"""A storage engine in memory, whose reads and writes may be held up or made to fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from helpers.local import LocalServer
from helpers.sessions import CHUNK
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Held, Put, StorageAdapter, Usage, Want


class HeldTier(StorageAdapter):
    """Objects in a dict, which outlives a server. ``reads`` and ``writes`` are gates: cleared, calls wait before them.

    Args:
        objects: header and payload by key.
        sync: whether it is written in step with L1.
    """

    def __init__(self, objects: dict[bytes, tuple[bytes, bytes]] | None = None, sync: bool = False) -> None:
        self.objects = {} if objects is None else objects
        self.sync = sync
        self.reads, self.writes = threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.failing = False

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        return [key in self.objects for key in keys]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        self._pass(self.writes, call)
        for put in objects:
            self.objects[put.key] = put.header, bytes(put.payload)
        return [True] * len(objects)

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        self._pass(self.reads, call)
        out: list[bytes | None] = []
        for want in wants:
            header, payload = self.objects.get(want.key, (None, b""))
            if header is not None and len(payload) == len(want.payload):
                want.payload[:] = payload
                out.append(header)
            else:
                out.append(None)
        return out

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        for key in keys:
            self.objects.pop(key, None)
        return [True] * len(keys)

    def scan(self) -> Iterator[Held]:
        for key, (header, payload) in self.objects.items():
            yield Held(key, len(header) + len(payload), 0.0)

    def usage(self) -> Usage:
        return Usage(sum(len(h) + len(p) for h, p in list(self.objects.values())), len(self.objects), 0)

    def _pass(self, gate: threading.Event, call: Call) -> None:
        while not gate.wait(0.01):
            if call.over:
                raise AdapterError("held up for too long")
        if self.failing:
            raise AdapterError("it fails")


@contextmanager
def served(tier: HeldTier, **settings: Any) -> Iterator[LocalServer]:
    """A server over this tier alone, whose gates are open at the end."""
    local = LocalServer(chunk_size=CHUNK, adapters=lambda: [("memory", tier)], **settings)
    try:
        yield local
    finally:
        tier.reads.set()
        tier.writes.set()
        local.close()
