"""A client of a server in this process, message by message, and what it stores: five chunks of one group."""

from __future__ import annotations

import itertools
from typing import Any

from helpers.local import LocalServer
from helpers.pages import layout
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.protocol import messages as m

CHUNK = 8
HASHES = chunk_hashes(range(40), Scope(chunk_size=CHUNK))
JOINED = b"".join(HASHES)
LEASES = itertools.count(1)
GROUP = layout(chunk_size=CHUNK)
SIZE = GROUP.object_bytes


class Peer:
    """One session; what it asks must be granted, unless the test says ``refused``."""

    def __init__(
        self,
        server: LocalServer,
        role: m.Role = "worker",
        engine: str = "engine",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.server = server
        hello = m.Hello(protocol_min=1, protocol_max=1, role=role, engine=engine, rank=rank, ranks=ranks)
        self.session = ""
        self.session = self.ask(hello).session

    def send(self, request: m.Request, *payload: bytes) -> Any:
        return self.server.ask(request, payload)[0]

    def ask(self, request: m.Request, *payload: bytes) -> Any:
        reply = self.send(request, *payload)
        assert not isinstance(reply, m.Error), reply
        return reply

    def refused(self, code: str, request: m.Request, *payload: bytes) -> str:
        reply = self.send(request, *payload)
        assert isinstance(reply, m.Error), reply
        assert reply.code == code, reply
        assert "\n" not in reply.message
        return reply.message

    def register(self, *groups: Any, mapped: bool = False) -> Peer:
        self.ask(m.Register(session=self.session, namespaces=list(groups or [GROUP]), mapped=mapped))
        return self

    def reserve(self, *columns: bytes) -> int:
        lease = next(LEASES)
        self.ask(m.Reserve(session=self.session, lease=lease, hashes=list(columns or [JOINED])))
        return lease

    def fill(self, lease: int, *indexes: int, data: bytes = b"x" * SIZE) -> None:
        for index in indexes:
            self.ask(m.Write(session=self.session, lease=lease, index=index), data)

    def store(self, data: bytes = b"x" * SIZE) -> None:
        lease = self.reserve()
        self.fill(lease, *range(len(HASHES)), data=data)
        self.ask(m.Commit(session=self.session, lease=lease, indexes=list(range(len(HASHES)))))

    def lookup(self, request: str = "r", **fields: Any) -> tuple[int, m.Found]:
        lease = next(LEASES)
        message = m.Lookup(
            session=self.session, request=request, lease=lease, **({"hashes": JOINED} | fields)
        )
        return lease, self.ask(message)

    def read(self, lease: int, index: int = 0, offset: int = 0, length: int = SIZE) -> m.Read:
        return m.Read(session=self.session, lease=lease, index=index, offset=offset, length=length)
