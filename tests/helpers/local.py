"""The server's answers without a server: its service in this process, and a client that asks it directly."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lmcache.v1.multiprocess.attachment import Attachment
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed, Unavailable
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.shm_pool import PAGE, PoolView, table_bytes


def pool_view(pages: int, kind: type[PoolView] = PoolView) -> PoolView:
    """A pool of ``pages`` pages that nobody else maps."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, table_bytes(pages * PAGE) + pages * PAGE)
        return kind(fd, pages * PAGE)
    finally:
        os.close(fd)


class LocalServer:
    """A service with a pool of ``pages`` pages. ``answers`` may be switched off, as by a stopped process.

    Args:
        adapters: makes the tiers below L1, by name, at each start.
    """

    def __init__(
        self,
        pages: int = 256,
        chunk_size: int = 8,
        adapters: Callable[[], Sequence[tuple[str, StorageAdapter]]] = tuple,
        **settings: Any,
    ) -> None:
        self._pages = pages
        self._adapters = adapters
        self.service: Service | None = None  # type: ignore[assignment]
        self._settings = settings
        self.answers = True
        self.start(chunk_size)

    def start(self, chunk_size: int = 0) -> None:
        """Start anew: another epoch, an empty pool."""
        self.close()
        self.view = pool_view(self._pages)
        self.chunk_size = chunk_size or self.chunk_size
        self.metrics = Metrics()
        config = ServerConfig(l1_size_gb=1, chunk_size=self.chunk_size, **self._settings)
        self.lock = threading.RLock()  # so that a test that holds it may look as well
        self.service = Service(
            config,
            self.view,
            None,
            self.metrics,
            lock=self.lock,
            adapters=self._adapters(),  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """End the threads of tiers."""
        if self.service is not None:
            self.service.store.close(5.0)

    def ask(self, request: m.Request, payload: Sequence[bytes] = ()) -> tuple[m.Reply, list[bytes]]:
        """A request as it arrives and the reply as it leaves."""
        arrived = m.request_decoder.decode(m.encode(request))
        late: queue.SimpleQueue[m.Reply] = queue.SimpleQueue()
        with self.lock:
            answer = self.service.handle(arrived, [memoryview(frame) for frame in payload], late.put)
        reply, frames = answer or (self._wait_for(late), ())
        return m.reply_decoder.decode(m.encode(reply)), [bytes(frame) for frame in frames]

    def _wait_for(self, late: queue.SimpleQueue[m.Reply]) -> m.Reply:
        """A late answer, while the loop's clock goes on."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                left = self.service.next_deadline - time.monotonic()
                return late.get(timeout=min(max(0.0, left), 1.0))
            except queue.Empty:
                with self.lock:
                    self.service.expire(time.monotonic())
        raise AssertionError("no answer")

    def take_back(self) -> None:
        """Every object vanishes, as if all read leases had ended while nobody looked."""
        l1 = self.service.l1
        with self.lock:
            for owner_lease in list(l1._reads):
                l1.release(*owner_lease)
            l1.clear()

    def clear(self) -> None:
        """L1 drops what nobody reads or writes."""
        with self.lock:
            self.service.l1.clear()

    @property
    def usage(self) -> dict[str, int]:
        with self.lock:
            return self.service.l1.usage()

    def left_over(self) -> dict[str, int]:
        """What clients hold: nothing, once all that they began has ended."""
        usage = self.usage
        held = {
            name: usage[name] for name in ("read_leases", "write_leases", "pinned_objects", "reserved_bytes")
        }
        requests = sum(len(s.hashes) for s in self.service.sessions.by_id.values())
        return {name: n for name, n in (held | {"requests": requests}).items() if n}

    def all_given_back(self) -> bool:
        """Whether nothing is left over, not even an empty lease."""
        with self.lock:
            return self.left_over() == {} and not self.service.l1.has_leases

    def objects(self) -> dict[bytes, bytes]:
        """Key and bytes of every published object."""
        data = self.view.data
        with self.lock:
            return {
                entry.key: bytes(data[entry.offset : entry.offset + entry.size])
                for entry in self.service.l1.entries()
            }


class LocalClient:
    """Stands in for ``CacheClient``: the same attributes, no threads, reconnecting when it is told to."""

    _leases = itertools.count(1)

    def __init__(
        self,
        server: LocalServer,
        role: m.Role = "scheduler",
        engine: str = "engine",
        rank: int = 0,
        ranks: int = 1,
        mapped: bool = True,
        on_open: Callable[[Any], None] | None = None,
    ) -> None:
        self.server = server
        self.role: m.Role = role
        self.up = False
        self.reason = ""
        self.session = ""
        self.welcome: m.Welcome | None = None
        self.attachment: Attachment | None = None
        self.sent: list[m.Request] = []
        self._hello = m.Hello(
            protocol_min=m.PROTOCOL_MIN,
            protocol_max=m.PROTOCOL,
            role=role,
            engine=engine,
            rank=rank,
            ranks=ranks,
        )
        self._mapped = mapped
        self._on_open = on_open
        self._owed: list[m.Request] = []
        self.reconnect()

    def reconnect(self) -> bool:
        """What the heartbeat does: ping, open a session if need be, send what is owed."""
        if not self.server.answers:
            self.up = False
            return False
        known = bool(self.session) and self._ask(m.Ping(session=self.session)).known
        if not known:
            self.welcome = self._ask(self._hello)
            session = self.server.service.sessions.by_id[self.welcome.session]
            session.mapped = self._mapped and self.role == "worker"
            view = self.server.view if session.mapped else None
            self.attachment = Attachment(None, view, "" if view else "frames")
            self.session = self.welcome.session
            if self._on_open is not None:
                self._on_open(self)
            self._owed.clear()
        while self._owed:
            self._ask(self._owed.pop(0))
        self.up = True
        return True

    def new_lease(self) -> int:
        return next(self._leases)

    def call(
        self, message: m.Request, nbytes: int = 0, payload: Sequence[Any] = ()
    ) -> tuple[m.Reply, list[bytes]]:
        self._check(message)
        self.sent.append(message)
        reply, frames = self.server.ask(message, [bytes(frame) for frame in payload])
        if isinstance(reply, m.Error):
            self.up = self.up and reply.code != "unknown_session"
            raise RequestFailed(reply.code, reply.message)
        return reply, frames

    def pipeline(
        self, requests: Iterable[tuple[m.Request, int, Sequence[Any]]]
    ) -> Iterator[tuple[m.Reply, list[bytes]]]:
        for message, nbytes, payload in requests:
            yield self.call(message, nbytes, payload)

    def post(self, message: m.Request) -> None:
        self.sent.append(message)
        if self.up and self.server.answers:
            self.server.ask(message)
        else:
            self._owed.append(message)

    def register(self, message: m.Register) -> None:
        self._ask(message)

    def close(self) -> None:
        if self.up:
            self._ask(m.Bye(session=self.session))
        self.up = False

    def _check(self, message: m.Request) -> None:
        if self.up and not self.server.answers:
            self.up = False
            lease = getattr(message, "lease", None)
            if lease is not None:
                kind = m.Release if isinstance(message, m.Lookup | m.Read) else m.Abort
                self._owed.append(kind(session=message.session, leases=[lease]))
        if not self.up:
            raise Unavailable(f"{type(message).__name__}: no answer")

    def _ask(self, message: m.Request) -> Any:
        reply, _ = self.server.ask(message)
        if isinstance(reply, m.Error):
            raise RequestFailed(reply.code, reply.message)
        return reply
