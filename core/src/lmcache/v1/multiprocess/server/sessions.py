"""Who is connected: sessions, engines, and what each engine's ranks registered."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from lmcache.v1.keys import Namespace
from lmcache.v1.protocol.messages import Role


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

    def close(self, ident: str) -> Session | None:
        """Forget a session, and with its last one the engine."""
        session = self.by_id.pop(ident, None)
        if session is None or not session.engine:
            return session
        others = [s for s in self.by_id.values() if s.engine == session.engine]
        engine = self.engines.get(session.engine)
        if engine is not None and session.role == "worker" and not any(s.rank == session.rank and s.role == "worker" for s in others):
            engine.namespaces.pop(session.rank, None)
        if not others:
            self.engines.pop(session.engine, None)
        return session

    def silent_since(self, limit: float) -> list[Session]:
        """Sessions not heard of since ``limit`` (monotonic seconds)."""
        return [s for s in self.by_id.values() if s.seen < limit]
