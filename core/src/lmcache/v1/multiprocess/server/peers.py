"""Sessions with other servers: who they are, whether they live, which transport they get.

A peer's end shows in its connection: the kernel closes it when the process ends. Sessions that fall silent are asked
for it, so a peer that was killed keeps nothing for longer than some seconds, and one that is only stopped keeps what
it may still be writing to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.multiprocess.peer.nixl import Target
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.pull import Pulls
from lmcache.v1.multiprocess.server.push import Pushes
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.sessions import Sessions
from lmcache.v1.multiprocess.server.unmatched import Unmatched
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)

Later: TypeAlias = "Callable[[m.Reply], None]"
Answer: TypeAlias = "m.Reply | tuple[m.Reply, Sequence[memoryview]] | None"

_SILENT_SECONDS = 3.0
"""After which a peer, which says something every second, is asked for."""


class Peers:
    """The peers of one server; called under its lock.

    Args:
        sessions: the server's table.
        limit_bytes: most bytes of L1 that all peers together may hold unpublished, and may pin; 0: half.
        direct: whether peers may write to L1 themselves, by NIXL.
        stopping: whether nothing new is to be taken.
        published: told, under the lock, the keys of what was pushed.
    """

    def __init__(
        self,
        epoch: str,
        view: PoolView,
        l1: L1Cache,
        lock: threading.Lock,
        metrics: Metrics,
        sessions: Sessions,
        limit_bytes: int,
        direct: bool,
        stopping: Callable[[], bool] = lambda: False,
        published: Callable[[Sequence[bytes]], None] = lambda keys: None,
    ) -> None:
        self._epoch, self._view, self._lock = epoch, view, lock
        self._sessions = sessions
        self._connections: dict[str, bytes] = {}
        """Of each peer's session: the one that its last message came by."""
        self._stopping = stopping
        self.unmatched = Unmatched(sessions)
        self._target: Target | None = None
        self._why = "" if direct else "the peer takes payload in frames only (--peer-transport frames)"
        self._opening = threading.Lock()
        self.pushes = Pushes(epoch, view, l1, lock, metrics, limit_bytes, published)
        self.pulls = Pulls(view, l1, lock, metrics, limit_bytes)
        self.handlers: dict[type, Callable[[Any, Sequence[memoryview], Later], Answer]] = {
            p.PeerOpen: self._open,
            p.PushReserve: self._reserve,
            p.PushWrite: lambda msg, payload, _: self.pushes.write(msg, payload),
            p.PushCommit: lambda msg, _, later: self.pushes.commit(msg, later),
            p.PushAbort: lambda msg, *_: self.pushes.abort(msg),
            p.PeerFind: lambda msg, *_: self.pulls.find(msg),
            p.PullOpen: lambda msg, _, later: self.pulls.open(msg, later),
            p.PullRead: lambda msg, *_: self.pulls.read(msg),
            p.PullClose: lambda msg, *_: self.pulls.close(msg),
        }

    def handle(self, msg: Any, payload: Sequence[memoryview], later: Later, connection: bytes) -> Answer:
        """The answer to a peer's message; None: ``later`` gets it, once, from any thread.

        Raises:
            Refused: if it is none that can be served.
        """
        session = self._sessions.active(msg.session)
        if session.id not in self._connections and not isinstance(msg, p.PeerOpen):
            raise Refused("bad_request", f"{type(msg).__name__}: the session is not a peer's; open it first")
        self._connections[session.id] = connection
        return self.handlers[type(msg)](msg, payload, later)

    # ---- transport

    def _open(self, msg: p.PeerOpen, _: object, later: Later) -> m.Reply | None:
        if not msg.nixl or self._why:
            return p.PeerReady(epoch=self._epoch, why=self._why)
        if self._target is not None:
            return p.PeerReady(epoch=self._epoch, region=self._target.region)
        threading.Thread(target=self._open_target, args=(later,), name="lmcache-nixl", daemon=True).start()
        return None

    def _open_target(self, later: Later) -> None:
        """Register the pool, once; it may take its time, so without the server's lock."""
        with self._opening:
            if self._target is None and not self._why:
                try:
                    target = Target(self._view, self.pushes.has_direct)
                except LMCacheError as exc:
                    self._why = f"on the peer: {exc}"
                    warn_once(logger, "nixl", "peers push in frames: %s", exc)
                else:
                    with self._lock:
                        self._target = target
        region = self._target.region if self._target is not None else None
        later(p.PeerReady(epoch=self._epoch, region=region, why=self._why))

    def _reserve(self, msg: p.PushReserve, _: object, later: Later) -> m.Reply | None:
        if self._stopping():
            raise Refused("stopping", "the server is stopping and takes nothing new")
        if msg.direct:
            if self._target is None:
                raise Refused(
                    "bad_request", "push by NIXL: the session was given no region; open it with nixl"
                )
            self._target.wake()
        reply = self.pushes.reserve(msg, later)
        self.unmatched.pushed(msg)
        return reply

    # ---- lives

    def drop(self, ident: str, dead: bool) -> bool:
        """A session ends; True: it must not, for its client may be writing and is not known to be gone."""
        if ident not in self._connections:
            return False
        if not dead and self.pushes.has_direct(ident):
            return True
        del self._connections[ident]
        self.pushes.drop(ident)
        self.pulls.drop(ident)
        return False

    def sweep(self, reaches: Callable[[bytes], bool], drop: Callable[[str], None]) -> None:
        """Take back what is overdue; ``drop`` the sessions of silent peers whose connection is gone.

        Args:
            reaches: whether a connection is there. Sends something.
        """
        limit = time.monotonic() - _SILENT_SECONDS
        for ident in [s.id for s in self._sessions.silent_since(limit) if s.id in self._connections]:
            if not reaches(self._connections[ident]):
                logger.info("a peer is gone: its connection is closed")
                drop(ident)
        self.pushes.sweep()
        self.pulls.sweep()

    def close(self) -> None:
        """Let threads end and the pool go."""
        self.pushes.close()
        self.pulls.shut()
        if self._target is not None:
            self._target.close()

    def state(self) -> dict[str, object]:
        """For status."""
        return {
            "sessions": len(self._connections),
            "transport": "nixl" if self._target is not None else "frames",
            "pulls": self.pulls.count,
            "unmatched_layouts": self.unmatched.count,
            **self.pushes.state(),
        }
