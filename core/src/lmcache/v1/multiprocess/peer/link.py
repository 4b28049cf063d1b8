"""One session with another server: opened when first needed, kept alive, opened again after a loss.

Each call of the adapter uses a connection of its own, since a request may wait for long. A thread says every second
that we live, and hands in what is owed: leases whose end the server may not have heard of.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import lmcache
from lmcache.errors import LMCacheError
from lmcache.logging import init_logger
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.protocol.channel import Channel, Future, RequestFailed, Unavailable, expect
from lmcache.v1.storage.l2.adapter import AdapterError
from lmcache.v1.storage.l2.remote import reason

logger = init_logger(__name__)

R = TypeVar("R", bound=m.Message)

_PROTOCOL_MIN = 2
_BEAT_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
"""After a failure to connect, in which nobody tries again."""
_LEASE_LIMIT = 1 << 62
_OWED_KEPT = 4096


class SessionLost(AdapterError):
    """The peer was restarted, or took us for dead: the next call opens a new session."""


@dataclass(frozen=True)
class Opened:
    """A session. ``region`` is where the peer lets us write; None: payload goes in frames, ``why`` says why."""

    session: str
    epoch: str
    region: p.Region | None
    why: str


class Line:
    """One connection, for one call at a time."""

    def __init__(self, link: PeerLink, channel: Channel, opened: Opened) -> None:
        self._link, self._channel, self.opened = link, channel, opened
        self.session, self.where, self.seconds = opened.session, link.address, link.seconds

    def submit(self, message: m.Request, seconds: float, payload: Sequence[Any] = ()) -> Future:
        """Send; the answer is had by :meth:`finish`.

        Raises:
            AdapterError: if there is no connection.
        """
        with self._link.told():
            return self._channel.submit(message, seconds, payload)

    def finish(self, kind: type[R], future: Future) -> tuple[R, list[bytes]]:
        """The answer.

        Raises:
            AdapterError: if it is another, or none came in time.
        """
        with self._link.told():
            reply, frames = future.result()
            return expect(kind, reply), frames

    def ask(self, kind: type[R], message: m.Request, seconds: float) -> R:
        """A round trip. Raises what the two above do."""
        return self.finish(kind, self.submit(message, seconds))[0]

    def post(self, message: m.Request) -> bool:
        """Send without wanting an answer; False if there is no connection."""
        return self._channel.post(message)


class PeerLink:
    """The session, its connections and its thread.

    Args:
        address: ZeroMQ address of the server.
        seconds: for a round trip without payload.
        nixl: ask for a region to write to.
        on_beat: called every second from the thread while there is a session.
    """

    def __init__(self, address: str, seconds: float, nixl: bool, on_beat: Callable[[], None]) -> None:
        self.address = address
        self.seconds = seconds
        self._nixl = nixl
        self._on_beat = on_beat
        self._opened: Opened | None = None
        self._guard = threading.Lock()
        self._lines: list[Channel] = []
        self._owed: list[p.PushAbort | p.PullClose] = []
        self._owed_guard = threading.Lock()
        self._beat = Channel(address)
        self._failed = (0.0, "")
        self._leases = itertools.count(secrets.randbelow(_LEASE_LIMIT))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- for the adapter

    @contextmanager
    def line(self, seconds: float) -> Iterator[Line]:
        """A connection with an open session, to be had within ``seconds``.

        Raises:
            AdapterError: if the peer cannot be reached or refuses.
        """
        try:
            channel = self._lines.pop()
        except IndexError:  # not asked before: another call might take the last one meanwhile
            channel = Channel(self.address)
        try:
            yield Line(self, channel, self._open(seconds))
        except BaseException:
            channel.close()  # answers to what was given up may still come by it
            raise
        self._lines.append(channel)

    def new_lease(self) -> int:
        """An id that no other lease of this session has."""
        return next(self._leases) % _LEASE_LIMIT

    def owe(self, message: p.PushAbort | p.PullClose) -> None:
        """See to it that the peer hears of it, if it still knows the session."""
        with self._owed_guard:
            self._owed.append(message)
            del self._owed[:-_OWED_KEPT]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors of the transport as the adapter's; a session that the peer has forgotten is opened anew."""
        try:
            yield
        except RequestFailed as exc:
            if exc.code == "unknown_session":
                self._opened = None
                raise SessionLost(f"peer {self.address}: {reason(exc)}") from None
            raise AdapterError(f"peer {self.address}: {reason(exc)}") from None
        except Unavailable as exc:
            raise AdapterError(f"peer {self.address}: {reason(exc)}") from None

    @property
    def opened(self) -> Opened | None:
        return self._opened

    def close(self, bye: bool) -> None:
        """End the session. Without ``bye`` the peer finds out by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.seconds + 1)
        opened, self._opened = self._opened, None
        if opened is not None and bye:
            with suppress(LMCacheError):  # it has gone before
                self._beat.call(m.Bye(session=opened.session), min(1.0, self.seconds))
        for channel in (self._beat, *self._lines):
            channel.close()

    # ---- session

    def _open(self, seconds: float) -> Opened:
        opened = self._opened
        if opened is not None:
            return opened
        deadline = time.monotonic() + seconds
        if not self._guard.acquire(timeout=max(0.0, seconds)):
            raise AdapterError(f"peer {self.address}: no session in time")
        try:
            if self._opened is not None:
                return self._opened
            since, why = self._failed
            if time.monotonic() - since < _PAUSE_SECONDS:
                raise AdapterError(why)
            try:
                with self.told():
                    self._opened = self._say_hello(deadline)
            except AdapterError as exc:
                if seconds >= self.seconds:  # else it may be the caller's haste
                    self._failed = (time.monotonic(), str(exc))
                self._beat.reset()
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-peer", daemon=True)
                self._thread.start()
            return self._opened
        finally:
            self._guard.release()

    def _say_hello(self, deadline: float) -> Opened:
        def left() -> float:
            return max(0.0, min(self.seconds, deadline - time.monotonic()))

        client = f"{socket.gethostname()}:{os.getpid()} lmcache {lmcache.__version__}"
        hello = m.Hello(protocol_min=_PROTOCOL_MIN, protocol_max=m.PROTOCOL, role="tool", client=client)
        welcome = expect(m.Welcome, self._beat.call(hello, left())[0])
        # Registering a large pool takes its time, once; so this one may take what the caller has.
        wait = max(left(), deadline - time.monotonic()) if self._nixl else left()
        ready = expect(
            p.PeerReady, self._beat.call(p.PeerOpen(session=welcome.session, nixl=self._nixl), wait)[0]
        )
        return Opened(welcome.session, welcome.epoch, ready.region, reason(ready.why) if ready.why else "")

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            opened = self._opened
            if opened is None:
                continue
            try:
                self._on_beat()
                pong = expect(m.Pong, self._beat.call(m.Ping(session=opened.session), self.seconds)[0])
                if not pong.known or pong.epoch != opened.epoch:
                    self._opened = None
                    continue
                self._pay(opened)
            except LMCacheError as exc:
                logger.debug("peer %s: %s", self.address, exc)
            except Exception:  # without this thread the peer would take us for dead
                logger.exception("peer %s", self.address)

    def _pay(self, opened: Opened) -> None:
        while True:
            with self._owed_guard:
                if not self._owed:
                    return
                message = self._owed[0]
            if message.session == opened.session:
                self._beat.call(message, self.seconds)
            with self._owed_guard:
                self._owed.remove(message)
