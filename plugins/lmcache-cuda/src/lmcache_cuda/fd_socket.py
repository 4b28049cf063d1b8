"""File descriptors from one process to another, over a Unix socket: what the kernel calls SCM_RIGHTS.

A descriptor is offered under a token of 16 random bytes; whoever shows the token, and is the same user, gets it. The
connection stays as long as the importer wants: its end tells of the exporter's death.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time

from lmcache.errors import ConfigError, DeviceError, bad_value
from lmcache.logging import init_logger
from lmcache_cuda import settings

__all__ = ["MAX_PATH", "TOKEN_BYTES", "FdServer", "check_user", "fetch", "server", "withdraw"]

logger = init_logger(__name__)

TOKEN_BYTES = 16
MAX_PATH = 107
"""Bytes of a socket's path, by the kernel."""
_SECONDS = 10.0
_PAUSE = 0.1
"""How long the server leaves a machine alone that has no descriptor or thread for it."""
_PREFIX, _SOCKET = "lmcache-cuda-", re.compile(r"[0-9]+-[0-9a-f]{8}\.sock\Z")
_STALE_SECONDS = 60.0
"""A younger socket may have been bound by a process that is about to listen."""
_CREDENTIALS = struct.Struct("3i")
_GIVEN, _UNKNOWN = b"+", b"?"


class FdServer:
    """Hands out descriptors of this process.

    Args:
        folder: Where the socket is to be; None: a folder of its own that nobody else may enter.

    Raises:
        ConfigError: ``folder`` cannot be used.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may withdraw, anywhere
        self._offers: dict[bytes, int] = {}
        self._closed = False
        _sweep(folder)
        self._own = None if folder else tempfile.mkdtemp(prefix=_PREFIX)
        where = folder or self._own or ""
        self.path = os.path.join(where, f"{self.pid}-{secrets.token_hex(4)}.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.path)
            os.chmod(self.path, 0o600)
        except OSError as exc:
            self._socket.close()
            text = bad_value(settings.FOLDER, where, "a folder in which this process may make sockets")
            raise ConfigError(f"{text}: {exc}") from exc
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="lmcache-cuda-fds", daemon=True).start()

    def offer(self, fd: int) -> bytes:
        """The token for a descriptor, which from now on is the server's to close."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._offers[token] = fd
        return token

    def withdraw(self, token: bytes) -> None:
        """End an offer. Harmless if that was done."""
        with self._lock:
            fd = self._offers.pop(token, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """End all offers and remove the socket."""
        if self.pid != os.getpid():
            return  # a forked copy: all of it is the parent's
        self._closed = True
        for token in list(self._offers):
            self.withdraw(token)
        with contextlib.suppress(OSError):  # the folder may have been removed meanwhile
            os.unlink(self.path)
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)

    def _serve(self) -> None:
        while not self._closed:
            peer = None
            try:
                peer, _ = self._socket.accept()
                threading.Thread(
                    target=self._answer, args=(peer,), name="lmcache-cuda-fd", daemon=True
                ).start()
            except (OSError, RuntimeError) as exc:  # out of descriptors or of threads, for now; or closed
                if peer is not None:
                    peer.close()
                if not self._closed:
                    logger.warning("socket %s: an importer is not served: %s", self.path, exc)
                    time.sleep(_PAUSE)

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.settimeout(_SECONDS)
                _check_peer(peer)
                token = peer.recv(TOKEN_BYTES + 1)
                with self._lock:
                    fd = self._offers.get(token)
                    fd = None if fd is None else os.dup(fd)
                if fd is None:
                    peer.send(_UNKNOWN)
                    return
                try:
                    socket.send_fds(peer, [_GIVEN], [fd])
                finally:
                    os.close(fd)
                peer.settimeout(None)
                peer.recv(1)  # until the importer has enough
            except (OSError, DeviceError) as exc:
                logger.debug("a descriptor was not handed out: %s", exc)


def _sweep(folder: str | None) -> None:
    """Remove the sockets of processes that were killed before they could."""
    places = [folder] if folder else glob.glob(f"{glob.escape(tempfile.gettempdir())}/{_PREFIX}*")
    for place in places:
        with contextlib.suppress(OSError):  # another user's, or another process is at it, too
            for name in filter(_SOCKET.match, os.listdir(place)):
                path = os.path.join(place, name)
                if time.time() - os.stat(path).st_mtime > _STALE_SECONDS and _nobody_listens(path):
                    os.unlink(path)
                    if not folder:
                        os.rmdir(place)


def _nobody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _check_peer(peer: socket.socket, expected: int = 0) -> None:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    check_user(user, os.geteuid())
    if expected and pid != expected:
        raise DeviceError(
            f"the process at the socket is {pid}: expected {expected}, which the descriptor names"
        )


def check_user(user: int, mine: int) -> None:
    """Refuse the process of another user; root may have and give what it likes.

    Raises:
        DeviceError: It is another user's.
    """
    if user not in (mine, 0) and mine != 0:
        raise DeviceError(f"the process at the socket is of user {user}: expected {mine}")


def fetch(path: str, token: bytes, pid: int = 0) -> tuple[int, socket.socket]:
    """The descriptor that another process offers, and the connection, which ends when that process does.

    Args:
        path: Its socket.
        token: What it gave for the descriptor. Nobody but the process that is meant gets to see it.
        pid: That process, as this one sees it; 0 where process ids are not shared.

    Raises:
        DeviceError: Nobody is there, it is another user or process, or it offers no such thing.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(_SECONDS)
        try:
            peer.connect(path)
            _check_peer(peer, pid)
            peer.send(token)
            answer, fds, flags, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            raise DeviceError(
                f"socket {path}: {exc}; the exporter has ended, or {settings.FOLDER} must name a folder that both"
                " processes see"
            ) from exc
        if answer != _GIVEN or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise DeviceError(f"socket {path}: {_refusal(answer, flags)}")
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return fds[0], peer


def _refusal(answer: bytes, flags: int) -> str:
    if answer == _UNKNOWN:
        return "the exporter does not share this any more"
    if flags & socket.MSG_CTRUNC:
        return "this process can open no more files; raise ulimit -n"
    return "no descriptor came; the exporter has ended, or can open no more files"


_LOCK = threading.Lock()
_server: FdServer | None = None


def server() -> FdServer:
    """The one of this process, made on the first call.

    Raises:
        ConfigError: LMCACHE_CUDA_IPC_DIR cannot be used.
    """
    global _server
    with _LOCK:
        if _server is None or _server.pid != os.getpid():
            _server = FdServer(os.environ.get(settings.FOLDER, "").strip() or None)
            atexit.register(_server.close)
        return _server


def withdraw(token: bytes) -> None:
    """End an offer of this process's server, if there is one. Takes no lock that ``server`` holds: the garbage
    collector may come here from within it."""
    made = _server
    if made is not None and made.pid == os.getpid():
        made.withdraw(token)
