"""Client side of the transport: one ZeroMQ DEALER socket, futures, bounded waits.

The calling thread itself sends and receives, so a round trip costs no thread switch. A lock makes a channel
safe to share; whoever waits also completes the futures of others whose replies it happens to read.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from lmcache.errors import LMCacheError
from lmcache.v1.protocol import messages as m

_CONNECT_MS = 1000

R = TypeVar("R", bound=m.Message)


class Unavailable(LMCacheError):
    """The server did not answer in time, or cannot be reached."""


class NotSent(Unavailable):
    """The request did not leave this process, so nothing will come of it."""


class RequestFailed(LMCacheError):
    """The server answered with an error. ``code`` is its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def expect(kind: type[R], reply: m.Reply) -> R:
    """``reply``, of the kind that the request is answered with.

    Raises:
        RequestFailed: if it is another.
    """
    if not isinstance(reply, kind):
        got = type(reply).__name__
        raise RequestFailed("bad_reply", f"expected {kind.__name__}, the server answers {got}")
    return reply


class Future:
    """A reply to come. ``result`` waits for it, at most until the deadline that was set at submission."""

    __slots__ = ("_channel", "_deadline", "_id", "_reply", "what")

    def __init__(self, channel: Channel, ident: int, deadline: float, what: str) -> None:
        self._channel = channel
        self._id = ident
        self._deadline = deadline
        self._reply: tuple[m.Reply, list[bytes]] | None = None
        self.what = what

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the reply, within the deadline; whether there is anything left to wait for."""
        now = time.monotonic()
        self._channel._pump(self, min(self._deadline, now + seconds))
        return self._reply is None and time.monotonic() < self._deadline

    def result(self) -> tuple[m.Reply, list[bytes]]:
        """The reply and its payload frames.

        Raises:
            Unavailable: if the deadline passed. RequestFailed: if the server answered with an error.
        """
        if self._reply is None:
            self._channel._pump(self, self._deadline)
            self._channel._pending.pop(self._id.to_bytes(8, "little"), None)
        if self._reply is None:
            raise Unavailable(f"{self.what}: no answer from {self._channel.address} in time")
        reply = self._reply[0]
        if isinstance(reply, m.Error):
            raise RequestFailed(reply.code, reply.message)
        return self._reply


class Channel:
    """Requests to one server.

    Args:
        address: ZeroMQ address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._pending: dict[bytes, Future] = {}
        self._next = 0
        self._rcvtimeo = -2
        self._socket: zmq.Socket[bytes] | None = None

    def submit(self, message: m.Request, timeout: float, payload: Sequence[Any] = ()) -> Future:
        """Send a request; its future's deadline is ``timeout`` seconds from now.

        Raises:
            NotSent: if there is no connection within the time-out.
        """
        deadline = time.monotonic() + timeout
        what = type(message).__name__
        with self._lock:
            self._next += 1
            ident = self._next.to_bytes(8, "little")
            future = Future(self, self._next, deadline, what)
            self._pending[ident] = future
            try:
                self._send([ident, m.encode(message), *payload], deadline, what)
            except BaseException:
                del self._pending[ident]
                raise
        return future

    def call(
        self, message: m.Request, timeout: float, payload: Sequence[Any] = ()
    ) -> tuple[m.Reply, list[bytes]]:
        """``submit`` and wait."""
        return self.submit(message, timeout, payload).result()

    def post(self, message: m.Request) -> bool:
        """Send without wanting a reply; False if there is no connection."""
        with self._lock:
            try:
                self._send([bytes(8), m.encode(message)], 0.0, type(message).__name__)
            except Unavailable:
                return False
        return True

    def reset(self) -> None:
        """Drop the connection; the next request opens a new one at once, without the old one's back-off."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
                self._socket = None
            self._pending.clear()

    close = reset

    def _open(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue for a connection that may not come
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.IPV6, "[" in self.address)
            socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME_BYTES)
            try:
                socket.connect(self.address)
            except zmq.ZMQError as exc:
                socket.close()
                raise NotSent(f"server address {self.address}: {exc.strerror}") from None
            self._socket = socket
            self._rcvtimeo = -2
        return self._socket

    def _send(self, frames: list[Any], deadline: float, what: str) -> None:
        socket = self._open()
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return
        except zmq.Again:
            pass  # not connected yet, or not any more: wait below, as long as the caller allows
        wait = max(0.0, deadline - time.monotonic())
        if socket.poll(int(wait * 1000), zmq.POLLOUT):
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                pass  # lost between the poll and the send: the same answer as below
        raise NotSent(f"{what}: no connection to {self.address}")

    def _pump(self, future: Future, deadline: float) -> None:
        """Read replies until ``future`` has its own or the deadline passes."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            while future._reply is None:
                socket = self._socket
                wait = int((deadline - time.monotonic()) * 1000) + 1
                if socket is None or wait <= 0:
                    break
                if wait != self._rcvtimeo:
                    socket.rcvtimeo = self._rcvtimeo = wait
                try:
                    frames = socket.recv_multipart()
                except zmq.Again:
                    break
                except zmq.ZMQError as exc:
                    if exc.errno == errno.EINTR:
                        continue
                    raise
                self._dispatch(frames)
        finally:
            self._lock.release()

    def _dispatch(self, frames: list[bytes]) -> None:
        if len(frames) < 2:
            return
        try:
            reply = m.reply_decoder.decode(frames[1])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            reply = m.Error(code="bad_reply", message=f"reply from {self.address} cannot be read: {exc}")
        future = self._pending.pop(frames[0], None)
        if (
            future is not None
        ):  # else it came after its deadline, and what it granted was given back by lease id
            future._reply = (reply, frames[2:])
