"""A client of a server's pushes and pulls, as a peer is one: it asks, and may ask for what it should not."""

from __future__ import annotations

import hashlib
import itertools
import queue
import random
from collections.abc import Sequence
from typing import Any

from helpers.local import LocalServer
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l2.adapter import Put
from lmcache.v1.storage.l2.envelope import ObjectInfo, checksum, pack
from lmcache.v1.storage.shm_pool import PAGE

PAYLOAD = 2 * PAGE - 100


def key_of(name: object) -> bytes:
    """The key of an object called ``name``."""
    return hashlib.blake2b(repr(name).encode(), digest_size=p.KEY_BYTES).digest()


def payload_of(name: object, size: int = PAYLOAD) -> bytes:
    """The bytes that ``name`` always has."""
    return random.Random(repr(name)).randbytes(size)


def put_of(name: object, size: int = PAYLOAD, account: str = "") -> Put:
    """``name`` as a tier stores it."""
    data = payload_of(name, size)
    info = ObjectInfo(key_of(name), len(data), checksum(data), account=account)
    return Put(info.key, pack(info), memoryview(data))


class Pusher:
    """One peer's session with a service in this process, on ``connection``."""

    _leases = itertools.count(1)

    def __init__(self, server: LocalServer, connection: bytes = b"connection") -> None:
        self.server = server
        self.connection = connection
        self.session = ""
        self.session = self.ask(m.Hello(protocol_min=2, protocol_max=2, role="tool")).session
        self.ask(p.PeerOpen(session=self.session))

    def begin(self, request: Any, *payload: bytes) -> queue.SimpleQueue[Any]:
        """Where the answer is put, now or later; it has come as a client sees it."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arrived = m.request_decoder.decode(m.encode(request))
        frames = [memoryview(frame) for frame in payload]
        with self.server.lock:
            reply = self.server.service.handle(arrived, frames, answers.put, self.connection)
        if reply is not None:
            answers.put((reply[0], [bytes(frame) for frame in reply[1]]))
        return answers

    def send(self, request: Any, *payload: bytes) -> Any:
        reply = self.begin(request, *payload).get(timeout=30)
        self.frames = reply[1] if isinstance(reply, tuple) else []
        return m.reply_decoder.decode(m.encode(reply[0] if isinstance(reply, tuple) else reply))

    def ask(self, request: Any, *payload: bytes) -> Any:
        reply = self.send(request, *payload)
        assert not isinstance(reply, m.Error), reply
        return reply

    def refused(self, code: str, request: Any, *payload: bytes) -> str:
        reply = self.send(request, *payload)
        assert isinstance(reply, m.Error), reply
        assert reply.code == code, reply
        assert "\n" not in reply.message
        return reply.message

    def reservation(self, names: Sequence[object], size: int = PAYLOAD, **fields: Any) -> p.PushReserve:
        values = {
            "session": self.session, "lease": next(self._leases), "keys": b"".join(map(key_of, names)),
            "sizes": [size] * len(names),
        }  # fmt: skip
        return p.PushReserve(**(values | fields))

    def reserve(self, names: Sequence[object], size: int = PAYLOAD, **fields: Any) -> tuple[int, list[int]]:
        """The lease and each object's offset."""
        message = self.reservation(names, size, **fields)
        return message.lease, self.ask(message).slots[0][::2]

    def write(self, lease: int, index: int, data: bytes, offset: int = 0) -> Any:
        return self.send(p.PushWrite(session=self.session, lease=lease, index=index, offset=offset), data)

    def commit(self, lease: int, payloads: Sequence[bytes]) -> p.PushCommit:
        """To publish everything, with the checksums of these."""
        return p.PushCommit(
            session=self.session, lease=lease, indexes=list(range(len(payloads))),
            checksums=[checksum(data) for data in payloads],
        )  # fmt: skip

    def push(self, names: Sequence[object], size: int = PAYLOAD, **fields: Any) -> list[int]:
        """Everything that is given room, in one go; the results of the commit."""
        lease, offsets = self.reserve(names, size, **fields)
        data = [payload_of(n, size) for n, offset in zip(names, offsets, strict=True) if offset >= 0]
        for index, payload in enumerate(data):
            assert isinstance(self.write(lease, index, payload), m.Ok)
        return list(self.ask(self.commit(lease, data)).results) if data else []

    def abort(self, lease: int, over: bool = True) -> None:
        self.ask(p.PushAbort(session=self.session, leases=[lease], over=over))

    def held(self, names: Sequence[object]) -> list[bool]:
        found = self.ask(p.PeerFind(session=self.session, keys=b"".join(map(key_of, names))))
        return list(found.held)

    def bye(self) -> None:
        self.ask(m.Bye(session=self.session))
