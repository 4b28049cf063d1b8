"""The request loop: one thread, one ROUTER socket, strict frames."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from lmcache.errors import StartupError
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.protocol import messages as m

logger = init_logger(__name__)

_ID_BYTES = 8
_SWEEP_SECONDS = 1.0
_MESSAGES_QUEUED = 32
"""Per client and direction. Each may carry a piece of payload, so this bounds the memory that a client can take."""
_DRAIN_SECONDS = 2.0
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 10),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 25_000),
)
"""A host that is gone closes no connection. The kernel finds out in 25 seconds: the first four by asking a connection
that is silent, the last by what it does not acknowledge."""
_QUIET_MS = 300
"""Silence after which nothing more is thought to be on its way; on a busy host delivery takes its time."""


class RequestLoop:
    """Receives requests, lets the service answer, sends replies. Binds at construction, serves in ``run``.

    A request that the service answers later is answered from any thread; this loop's thread sends the reply.

    Args:
        host, port: an address of this host and a port, 0 for a free one; or ``ipc://…`` and 0.

    Raises:
        StartupError: if the address is in use or cannot be bound.
    """

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self._late: deque[tuple[bytes, bytes, m.Reply]] = deque()
        self._awaited = 0
        """Requests that are to be answered later. Only while there are any does the loop watch for answers."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME_BYTES)
        for queue in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(queue, _MESSAGES_QUEUED)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)  # a client that does not read must not stop the others
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        local = host.startswith("ipc://")
        if local:  # an abstract address has no mode: only who runs as we do may connect
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        else:
            self._socket.setsockopt(zmq.IPV6, ":" in host)
            for option, value in _KEEPALIVE:
                self._socket.setsockopt(option, value)
        where = host if local else f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
        try:
            self._socket.bind(where)
        except zmq.ZMQError as exc:
            self.close()
            if local:
                raise StartupError(f"{where}: cannot be bound ({exc.strerror}); choose another") from None
            raise StartupError(
                f"--port {port}: cannot bind {where} ({exc.strerror}); choose another --host or --port"
            ) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = 0 if local else int(bound.rpartition(":")[2])
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self.address = where if local else f"tcp://{f'[{host}]' if ':' in host else host}:{self.port}"

    def run(
        self, service: Service, lock: threading.Lock, stop: threading.Event, sweep: Callable[[], None]
    ) -> None:
        """Serve until ``stop`` is set; then let transfers under way end, for a bounded time."""
        next_sweep = time.monotonic() + _SWEEP_SECONDS
        while not stop.is_set():
            self._serve_one(service, lock)
            self._expire(service, lock)
            if time.monotonic() >= next_sweep:
                sweep()
                next_sweep = time.monotonic() + _SWEEP_SECONDS
        with lock:
            service.stop()  # nothing new is granted from here on
        self._socket.setsockopt(zmq.RCVTIMEO, _QUIET_MS)
        drain_until = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < drain_until and (self._serve_one(service, lock) or service.l1.has_leases):
            continue

    def reaches(self, connection: bytes) -> bool:
        """Whether a client's connection is there. For the thread that runs the loop: it sends an answer to nothing."""
        try:
            self._socket.send_multipart([connection, bytes(_ID_BYTES), m.encode(m.Ok())])
        except zmq.ZMQError as exc:
            return exc.errno != errno.EHOSTUNREACH
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _serve_one(self, service: Service, lock: threading.Lock) -> bool:
        """Answer one request; False if none came."""
        socket = self._socket
        if self._awaited:
            left_ms = 1000 * (service.next_deadline - time.monotonic())
            limit_ms = int(socket.rcvtimeo)
            if not self._send_late(math.ceil(max(0.0, left_ms)) if left_ms < limit_ms else limit_ms):
                return False
        try:
            peer = socket.recv()
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno == errno.EINTR:
                return False
            raise
        head: list[bytes] = []
        payload: list[memoryview] = []
        while socket.rcvmore:
            if len(head) < 2:
                head.append(socket.recv())
            else:
                payload.append(socket.recv(copy=False).buffer)
        if len(head) != 2 or len(head[0]) != _ID_BYTES:
            self._malformed("frames", peer)
            return True
        try:
            request = m.request_decoder.decode(head[1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            self._malformed("message", peer)
            if any(head[0]):
                self._metrics.errors.labels("malformed").inc()
                self._reply(
                    peer, head[0], m.Error(code="malformed", message=f"message cannot be read: {exc}"), ()
                )
            return True
        with lock:
            answer = service.handle(request, payload, partial(self._answer_later, peer, head[0]), peer)
        self._metrics.requests.inc()
        if answer is None:
            self._awaited += 1
        elif any(head[0]):
            self._reply(peer, head[0], *answer)
        return True

    @staticmethod
    def _expire(service: Service, lock: threading.Lock) -> None:
        """Answer those who waited long enough for something."""
        now = time.monotonic()
        if now >= service.next_deadline:
            with lock:
                service.expire(now)

    def _answer_later(self, peer: bytes, ident: bytes, reply: m.Reply) -> None:
        """Answer a request that the service did not answer at once. From any thread, once."""
        self._late.append((peer, ident, reply))
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _send_late(self, timeout_ms: int) -> bool:
        """Wait for a request or a late answer, and send late answers; True if a request is there."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while self._late:
            peer, ident, reply = self._late.popleft()
            self._awaited -= 1
            if any(ident):
                self._reply(peer, ident, reply, ())
        return self._socket in ready

    def _reply(self, peer: bytes, ident: bytes, reply: m.Reply, frames: Sequence[memoryview]) -> None:
        try:
            self._socket.send_multipart([peer, ident, m.encode(reply), *frames])
        except zmq.ZMQError as exc:  # EHOSTUNREACH: the client left; EAGAIN: it does not read
            self._metrics.undeliverable.inc()
            logger.debug("reply not delivered: %s", exc)

    def _malformed(self, fault: str, peer: bytes) -> None:
        self._metrics.malformed.labels(fault).inc()
        logger.debug("malformed %s from %s dropped", fault, peer.hex())
