"""An engine without KV of its own: what it stores follows from the key, so that anybody can tell what is right."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from helpers.server import CALL_SECONDS, hello, namespace
from lmcache.errors import LMCacheError
from lmcache.v1.keys import Namespace, Scope, chunk_hashes, object_key
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel

_LEASES = itertools.count(1)


def new_lease() -> int:
    return os.getpid() << 32 | next(_LEASES)


def content(ns: Namespace, chunk: bytes) -> bytes:
    """The bytes of one object: of its key, nobody else's."""
    seed = hashlib.blake2b(object_key(ns.digest(), chunk)).digest()
    return (seed * (ns.object_bytes // len(seed) + 1))[: ns.object_bytes]


class Gone(Exception):
    """The server was killed, and nobody waits for its answers any more."""


class Stranger:
    """A scheduler and a worker of one engine with one KV group, in frames, over one connection."""

    def __init__(self, address: str, engine: str, ns: Namespace | None = None) -> None:
        self.channel = Channel(address)
        self.gone = threading.Event()
        """Set: whoever waits for an answer gives up."""
        self.namespace = ns or namespace("load", page_bytes=(4096,))
        self.worker = hello(self.channel, role="worker", engine=engine).session
        self.scheduler = hello(self.channel, role="scheduler", engine=engine).session
        self.ask(m.Register(session=self.worker, namespaces=[self.namespace], mapped=False))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        for session in (self.worker, self.scheduler):
            with suppress(LMCacheError):  # the server may have ended before
                self.channel.call(m.Bye(session=session), 1.0)
        self.channel.close()

    def ask(self, request: m.Request, payload: Sequence[bytes] = (), seconds: float = CALL_SECONDS) -> Any:
        return self._call(request, payload, seconds)[0]

    def _call(self, request: m.Request, payload: Sequence[bytes], seconds: float) -> Any:
        future = self.channel.submit(request, seconds, payload)
        while future.wait(0.05):
            if self.gone.is_set():
                raise Gone
        return future.result()

    def hashes(self, tokens: Sequence[int], **scope: Any) -> list[bytes]:
        return chunk_hashes(tokens, Scope(chunk_size=self.namespace.chunk_size, **scope))

    def store(self, hashes: Sequence[bytes], account: str = "", wait: float = 1.0) -> int:
        """Store chunks; how many were published. ``wait``: seconds for tiers that are to have them, too."""
        lease = new_lease()
        reserve = m.Reserve(session=self.worker, lease=lease, hashes=[b"".join(hashes)], account=account)
        slots = self.ask(reserve).slots[0][::2]
        granted = [chunk for chunk, offset in zip(hashes, slots, strict=True) if offset >= 0]
        for index, chunk in enumerate(granted):
            data = content(self.namespace, chunk)
            self.ask(m.Write(session=self.worker, lease=lease, index=index), [data])
        commit = m.Commit(session=self.worker, lease=lease, indexes=list(range(len(granted))), wait=wait)
        return int(self.ask(commit).count)

    def find(self, hashes: Sequence[bytes], wait: float = 10.0) -> int:
        """Look chunks up, read all that was found and compare; how many were found."""
        lease, request = new_lease(), f"find {next(_LEASES)}"
        lookup = m.Lookup(
            session=self.scheduler, request=request, lease=lease, hashes=b"".join(hashes), wait=wait
        )
        found = self.ask(lookup, seconds=CALL_SECONDS + max(0.0, wait))
        assert not found.pending
        for index in range(found.chunks):
            read = m.Read(
                session=self.worker, lease=lease, index=index, offset=0, length=self.namespace.object_bytes
            )
            _, frames = self._call(read, (), CALL_SECONDS)
            assert frames[0] == content(self.namespace, hashes[index]), "bytes of something else"
        self.ask(m.EndRequest(session=self.scheduler, requests=[request]))
        return int(found.chunks)
