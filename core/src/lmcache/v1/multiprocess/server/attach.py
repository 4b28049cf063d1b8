"""Hands the pool's descriptor to clients on this host, and learns of their death.

A client connects to a Unix socket, sends its session id, and receives the descriptor (SCM_RIGHTS). It keeps
the connection open for its whole life: the kernel closes it when the process ends, however it ends, so the
end of the stream is the one sure sign that the process can no longer write to the pool.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmcache.errors import StartupError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.multiprocess.host import WANT_FD, socket_name
from lmcache.v1.multiprocess.server.sessions import Peer

logger = init_logger(__name__)

_SESSION_ID_BYTES = 32
_STRANGER_SECONDS = 5.0
"""After which a connection that names no session is closed."""
_NO_FILE_SECONDS = 0.2


class AttachServer:
    """The Unix socket of one server.

    Args:
        address: ``@name`` (abstract: leaves no file) or a path, created with mode 0600.
        fd: the pool's descriptor.
        on_attach: called with a session id, whether it gets the descriptor and who asks; returns an error text or
            None.
        on_gone: called with the session id once its connection has ended.

    Raises:
        StartupError: if the address is taken or cannot be bound.
    """

    def __init__(
        self,
        address: str,
        fd: int,
        on_attach: Callable[[str, bool, Peer], str | None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.address = address
        self._fd = fd
        self._on_attach = on_attach
        self._on_gone = on_gone
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have said nothing yet, and since when."""
        self._listener = self._bind()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)[::-1]
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="lmcache-attach", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, close all connections and remove the socket's file, if it has one."""
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join(5)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)
        if not self.address.startswith("@"):
            Path(self.address).unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        if not self.address.startswith("@"):
            self._remove_dead_socket(Path(self.address))
        # The mask is the whole process's, which may be an engine's: an abstract address, having no file, needs none.
        old_mask = None if self.address.startswith("@") else os.umask(0o177)
        try:
            listener.bind(socket_name(self.address))
        except OSError as exc:
            listener.close()
            raise StartupError(
                f"--shm-socket {self.address}: cannot be bound ({exc.strerror}); choose another path"
            ) from None
        finally:
            if old_mask is not None:
                os.umask(old_mask)
        listener.listen(64)
        listener.setblocking(False)
        return listener

    @staticmethod
    def _remove_dead_socket(path: Path) -> None:
        if not path.is_socket():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its server is dead
            except OSError as exc:
                logger.debug("probing %s: %s", path, exc)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0 if self._strangers else None):
                if key.fileobj == self._woken:
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj, key.data)
                except Exception:  # without this thread nobody would learn of a client's death
                    logger.exception("attach")
            limit = time.monotonic() - _STRANGER_SECONDS
            for peer in [peer for peer, since in self._strangers.items() if since < limit]:
                self._close(peer)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as exc:
            warn_once(logger, "accept", "attach: accept failed: %s", exc)
            time.sleep(_NO_FILE_SECONDS)  # the connection goes on waiting: without a pause we would spin
            return
        peer.setblocking(False)
        self._strangers[peer] = time.monotonic()
        self._selector.register(peer, selectors.EVENT_READ, [""])

    def _read(self, peer: socket.socket, state: list[str]) -> None:
        try:
            data = peer.recv(_SESSION_ID_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and not state[0] and len(data) == _SESSION_ID_BYTES + 1:
            self._attach(peer, data, state)
            return
        # The end, or a peer that speaks out of turn.
        self._close(peer)
        if state[0]:
            self._on_gone(state[0])

    def _close(self, peer: socket.socket) -> None:
        self._strangers.pop(peer, None)
        self._selector.unregister(peer)
        peer.close()

    def _attach(self, peer: socket.socket, data: bytes, state: list[str]) -> None:
        session, want_fd = (
            data[:_SESSION_ID_BYTES].decode("ascii", "replace"),
            data[_SESSION_ID_BYTES:] == WANT_FD,
        )
        who = _peer_of(peer)
        error = stranger(who, "map the pool of") if want_fd else None
        error = error or self._on_attach(session, want_fd, who)
        try:
            if error is not None:
                peer.sendall(error.encode()[:500])
                peer.shutdown(socket.SHUT_WR)
                return
            state[0] = session
            self._strangers.pop(peer, None)
            if want_fd:
                socket.send_fds(peer, [b"+"], [self._fd])
            else:
                peer.sendall(b"+")
        except OSError as exc:
            logger.debug("attach: peer left: %s", exc)


def _peer_of(connection: socket.socket) -> Peer:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", packed)
    return Peer(pid, uid)


def stranger(peer: Peer, what: str) -> str | None:
    """Why ``peer`` may not do ``what`` to this server; None if it may."""
    mine = os.geteuid()
    if peer.uid in (mine, 0):
        return None
    return f"uid {peer.uid} may not {what} a server that runs as uid {mine}; run both as one user"
