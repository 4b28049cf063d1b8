"""Who is connected: sessions, engines, and what each engine's ranks registered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache.v1.keys import Namespace, object_key
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.protocol.messages import Role


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel names it."""

    pid: int
    uid: int


@dataclass(slots=True)
class Session:
    """One client. Its id is a secret that only the client and the server know."""

    id: str
    role: Role
    engine: str
    rank: int
    client: str
    seen: float
    mapped: bool = False
    """A connection through which it received the pool's descriptor is open (see ``attach.py``)."""
    peer: Peer | None = None
    """The process whose end closes the session; None before it has connected to the Unix socket."""
    registered: bool = False
    """A worker that has named its layouts."""
    hashes: dict[str, list[bytes]] = field(default_factory=dict)
    """Per request, the chunk digests received so far; later lookups send only what follows."""


@dataclass(slots=True)
class Engine:
    """An inference engine: one scheduler, ``ranks`` workers."""

    ranks: int
    namespaces: dict[int, list[tuple[bytes, Namespace]]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """All ranks have registered, so a hit can be a hit for every one of them."""
        return len(self.namespaces) == self.ranks

    def columns(self, hashes: Sequence[bytes]) -> dict[int, list[list[bytes]]]:
        """Per rank and KV group, the keys of the objects that a chain of chunks is stored as."""
        return {
            rank: [[object_key(namespace, chunk) for chunk in hashes] for namespace, _ in groups]
            for rank, groups in self.namespaces.items()
        }


class Sessions:
    """The table of sessions and engines. The server's lock guards it."""

    def __init__(self) -> None:
        self.by_id: dict[str, Session] = {}
        self.engines: dict[str, Engine] = {}

    def open(self, role: Role, engine: str, rank: int, ranks: int, client: str) -> Session:
        session = Session(secrets.token_hex(16), role, engine, rank, client, time.monotonic())
        self.by_id[session.id] = session
        if engine and engine not in self.engines:
            self.engines[engine] = Engine(ranks)
        return session

    def active(self, ident: str) -> Session:
        """An open session, which is heard of now.

        Raises:
            Refused: if there is none.
        """
        session = self.by_id.get(ident)
        if session is None:
            raise Refused(
                "unknown_session",
                "session unknown: the server was restarted or the session expired; say hello again",
            )
        session.seen = time.monotonic()
        return session

    def engine_of(self, session: Session) -> Engine:
        """The engine that a session belongs to.

        Raises:
            Refused: if it belongs to none.
        """
        engine = self.engines.get(session.engine)
        if engine is None:
            raise Refused("bad_request", "session belongs to no engine; say hello with an engine id")
        return engine

    def close(self, ident: str) -> Session | None:
        """Forget a session, and with its last one the engine."""
        session = self.by_id.pop(ident, None)
        if session is None or not session.engine:
            return session
        engine = self.engines.get(session.engine)
        if engine is not None and session.role == "worker" and not self.peers(session):
            engine.namespaces.pop(session.rank, None)
        if not any(s.engine == session.engine for s in self.by_id.values()):
            self.engines.pop(session.engine, None)
        return session

    def peers(self, session: Session) -> list[Session]:
        """Other worker sessions of the same engine and rank: a stand-in to come, or a namesake."""
        place = (session.engine, session.rank)
        return [
            s
            for s in self.by_id.values()
            if s.role == "worker" and s.id != session.id and (s.engine, s.rank) == place
        ]

    def silent_since(self, limit: float) -> list[Session]:
        """Sessions not heard of since ``limit`` (monotonic seconds)."""
        return [s for s in self.by_id.values() if s.seen < limit]
