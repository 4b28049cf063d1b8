"""A client's session with the server: liveness, circuit breaker, reconnection.

A heartbeat thread with a socket of its own opens the session, keeps it alive and opens it again after the
server came back. While it is not open every call fails at once, so a dead server costs its callers one
time-out in all.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

import lmcache
from lmcache.errors import LMCacheError
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.attachment import Attachment, attach
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, Future, NotSent, RequestFailed, Unavailable, expect

logger = init_logger(__name__)

_LEASE_LIMIT = 1 << 62
_GIFTS_KEPT = 1024
_UNDER_WAY = 4
_LOOK_SECONDS = 0.2
"""Between looks, during a long wait, at whether it is still worth while."""

Gift: TypeAlias = "m.Release | m.Abort | m.EndRequest"
"""What gives something back. All are idempotent, so one that may be lost is sent again."""


class ClientOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Time limits, all in seconds."""

    control_timeout: float = 2.0
    """A round trip without payload."""
    data_bytes_per_second: float = 100e6
    """Slowest acceptable payload rate: in-frame transfers may take control_timeout + bytes / this."""
    heartbeat_interval: float = 2.0
    retry_interval: float = 0.5
    """Between attempts to reach a server that is away."""
    fence_timeout: float = 30.0
    """lmcache-driven: for a server that neither answers nor ends to say that it writes no more to our pages."""
    shm: str = "auto"
    """auto: map the pool if possible, else frames; require: no cache without mapping; off: always frames."""


class Call:
    """A round trip under way; see :meth:`CacheClient.begin`."""

    __slots__ = ("_client", "_future", "_message", "_posted")

    def __init__(self, client: CacheClient, message: m.Request, future: Future, posted: int) -> None:
        self._client, self._message, self._future, self._posted = client, message, future, posted

    def ready(self) -> bool:
        """Whether ``result`` has not to wait: the answer is there, or its deadline has passed. Takes a millisecond."""
        return not self._future.wait(0.0)

    def result(self) -> tuple[m.Reply, list[bytes]]:
        """The answer and its payload frames. Raises what :meth:`CacheClient.call` does."""
        answer = self._client._finish(self._message, self._future)
        self._client._read_up_to(self._posted)
        return answer


class CacheClient:
    """One session of one role.

    Args:
        address: ZeroMQ address of the server.
        role, engine, rank, ranks: see :class:`lmcache.v1.protocol.messages.Hello`.
        on_open: called from the heartbeat thread with each new session before it counts as open, through which a
            worker registers. May raise :class:`LMCacheError`; then the session is tried again later.
        on_lost: called from the heartbeat thread once the server has ended: whoever uses its pool lets go of it.
        map_pool: False for a worker that does not copy itself.
    """

    def __init__(
        self,
        address: str,
        role: m.Role,
        engine: str = "",
        rank: int = 0,
        ranks: int = 1,
        options: ClientOptions | None = None,
        on_open: Callable[[CacheClient], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        map_pool: bool = True,
    ) -> None:
        self.options = options or ClientOptions()
        self.address = address
        self.role: m.Role = role
        self.session = ""
        self.welcome: m.Welcome | None = None
        self.attachment: Attachment | None = None
        self.reason = "not connected yet"
        """Why the session is not open; empty while it is."""
        self._hello = m.Hello(
            protocol_min=m.PROTOCOL_MIN, protocol_max=m.PROTOCOL, role=role, engine=engine, rank=rank,
            ranks=ranks, client=f"{socket.gethostname()}:{os.getpid()} lmcache {lmcache.__version__}",
        )  # fmt: skip
        self._map_pool = map_pool and role == "worker"
        self._on_open = on_open
        self._on_lost = on_lost
        self._channel = Channel(address)
        self._beat = Channel(address)
        self._lease_ids = itertools.count(secrets.randbelow(_LEASE_LIMIT))
        self._posted = 0
        self._unsure: deque[tuple[int, Gift]] = deque(maxlen=_GIFTS_KEPT)
        """Posted, with its number, and no reply has come since that would show that the server read it."""
        self._owed: list[Gift] = []
        """To be sent once the server answers again."""
        self._up = threading.Event()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._guard = threading.Lock()
        self._logged_reason = ""
        self._thread = threading.Thread(target=self._run, name=f"lmcache-beat-{role}", daemon=True)

    # ---- for callers

    @property
    def up(self) -> bool:
        return self._up.is_set()

    def start(self, wait: float = 0.0) -> bool:
        """Start the heartbeat; wait at most ``wait`` seconds for the session. True if it is open."""
        self._thread.start()
        return self._up.wait(wait) if wait else self.up

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the session to be open; whether it is."""
        return self._up.wait(max(0.0, seconds))

    def close(self) -> None:
        """Close the session and stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self.options.control_timeout + 1)
        if self.up and not (self.attachment is not None and self.attachment.ended):
            try:  # with a reply, or the message might be dropped with the socket
                self._beat.call(m.Bye(session=self.session), self.options.control_timeout)
            except LMCacheError as exc:
                logger.debug("goodbye: %s", exc)
        self._up.clear()
        self._channel.close()
        self._beat.close()
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        self._on_open = self._on_lost = None  # whose they are need not wait for the garbage collector

    def new_lease(self) -> int:
        """A lease id that no other client's is likely to be."""
        return next(self._lease_ids) % _LEASE_LIMIT

    def call(
        self, message: m.Request, nbytes: int = 0, payload: Sequence[Any] = ()
    ) -> tuple[m.Reply, list[bytes]]:
        """One round trip within its deadline.

        Args:
            nbytes: payload bytes in either direction; they lengthen the deadline.

        Raises:
            Unavailable: if the server did not answer, then the circuit breaker opens; NotSent, which is one, if
            the session is not open. RequestFailed: if the server refused.
        """
        return self.begin(message, nbytes, payload).result()

    def begin(self, message: m.Request, nbytes: int = 0, payload: Sequence[Any] = ()) -> Call:
        """As :meth:`call`, for a caller that does not wait but looks again.

        Raises: what :meth:`call` does; what the answer brings, from the call's ``result``.
        """
        posted = self._posted
        return Call(self, message, self._submit(message, nbytes, payload), posted)

    def _read_up_to(self, posted: int) -> None:
        """The server answered what was sent after the first ``posted`` gifts: it has read them."""
        with self._guard:
            while self._unsure and self._unsure[0][0] <= posted:
                self._unsure.popleft()

    def pipeline(
        self, requests: Iterable[tuple[m.Request, int, Sequence[Any]]]
    ) -> Iterator[tuple[m.Reply, list[bytes]]]:
        """Round trips of ``(message, nbytes, payload)``, a few under way at a time; the answers in order.

        Raises: what :meth:`call` does, from the iterator.
        """
        under_way: deque[tuple[m.Request, Future]] = deque()
        for message, nbytes, payload in requests:
            if len(under_way) == _UNDER_WAY:
                yield self._finish(*under_way.popleft())
            under_way.append((message, self._submit(message, _UNDER_WAY * nbytes, payload)))
        while under_way:
            yield self._finish(*under_way.popleft())

    def _submit(self, message: m.Request, nbytes: int, payload: Sequence[Any]) -> Future:
        if not self._up.is_set():
            raise NotSent(f"{type(message).__name__}: {self.reason}")
        timeout = self.options.control_timeout + nbytes / self.options.data_bytes_per_second
        if isinstance(message, m.Lookup):
            timeout += max(0.0, message.wait)
        try:
            return self._channel.submit(message, timeout, payload)
        except Unavailable as exc:
            self._trip(str(exc), message)
            raise

    def _finish(self, message: m.Request, future: Future) -> tuple[m.Reply, list[bytes]]:
        try:
            return future.result()
        except Unavailable as exc:
            self._trip(str(exc), message)
            raise
        except RequestFailed as exc:
            if exc.code == "unknown_session":
                self._trip(str(exc), message)
            raise

    def post(self, message: Gift) -> None:
        """Give something back without waiting; if the server is away, once it is back with this session."""
        with self._guard:
            if self._up.is_set() and self._channel.post(message):
                self._posted += 1
                self._unsure.append((self._posted, message))
            elif message.session == self.session:
                self._owed.append(message)

    # ---- liveness

    def _trip(self, reason: str, message: m.Request) -> None:
        with self._guard:
            if isinstance(message, m.Lookup | m.Read):
                self._owed.append(m.Release(session=message.session, leases=[message.lease]))
            elif isinstance(message, m.Reserve | m.Write | m.Commit):
                self._owed.append(m.Abort(session=message.session, leases=[message.lease]))
            self._down(reason)
        self._channel.reset()
        self._wake.set()

    def _down(self, reason: str) -> None:
        self._up.clear()
        self.reason = reason
        self._owed.extend(gift for _, gift in self._unsure)
        self._unsure.clear()
        if self._logged_reason != reason:
            self._logged_reason = reason
            logger.warning(
                "cache server %s: %s; requests run uncached until it answers", self.address, reason
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self.attachment is not None and self.attachment.ended:
                    self._let_go()
                    raise Unavailable("the server has ended")
                if self.session:
                    self._ping()
                if not self.session:
                    self._open()
                if not self.up:
                    self._recover()
            except LMCacheError as exc:
                self._beat.reset()
                with self._guard:
                    self._down(str(exc))
            except Exception as exc:  # the thread must outlive whatever a callback does
                reason = f"{type(exc).__name__}: {exc}"
                logger.log(
                    logging.DEBUG if reason == self.reason else logging.ERROR, "heartbeat", exc_info=True
                )
                with self._guard:
                    self._down(reason)
            self._wake.wait(self.options.heartbeat_interval if self.up else self.options.retry_interval)
            self._wake.clear()

    def _let_go(self) -> None:
        """Drop the pool of a server that has ended: mapped, its memory would be missing for the next server."""
        with self._guard:
            self._up.clear()
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        if self._on_lost is not None:
            self._on_lost()

    def _ping(self) -> None:
        ping = m.Ping(session=self.session)
        pong = expect(m.Pong, self._beat.call(ping, self.options.control_timeout)[0])
        if not pong.known or self.welcome is None or pong.epoch != self.welcome.epoch:
            self._up.clear()
            self.session = ""

    def _open(self) -> None:
        welcome = expect(m.Welcome, self._beat.call(self._hello, self.options.control_timeout)[0])
        old, self.attachment = self.attachment, None
        if old is not None:
            old.close()
        self.welcome = welcome
        session = self.session
        try:
            self.attachment = attach(welcome, want_pool=self._map_pool, shm=self.options.shm)
            self.session = welcome.session
            if self._on_open is not None:
                self._on_open(self)
        except BaseException:
            self.session = session
            with suppress(LMCacheError):
                self._beat.call(m.Bye(session=welcome.session), self.options.control_timeout)
            raise

    def register(self, message: m.Register, seconds: float = 0.0) -> None:
        """For ``on_open``: register on the heartbeat's own channel, before the session is open to callers.

        Args:
            seconds: how long that may take at least.

        Raises:
            Unavailable: if the server did not answer in time, or ended, or we are closed. RequestFailed: if it
            refused.
        """
        future = self._beat.submit(message, max(seconds, self.options.control_timeout))
        while future.wait(_LOOK_SECONDS):
            if self._stop.is_set() or (self.attachment is not None and self.attachment.ended):
                raise Unavailable(f"{future.what}: the server has ended, or this client")
        future.result()

    def _recover(self) -> None:
        while True:
            with self._guard:
                self._owed = [gift for gift in self._owed if gift.session == self.session]
                if not self._owed:
                    self.reason = ""
                    if self._logged_reason:
                        logger.info("cache server %s: back, requests are cached again", self.address)
                        self._logged_reason = ""
                    self._up.set()
                    return
                gift = self._owed[0]
            try:
                self._beat.call(gift, self.options.control_timeout)
            except RequestFailed as exc:  # answered, if not as wished: nothing will come of asking again
                logger.debug("giving back: %s", exc)
            with self._guard:
                del self._owed[0]
