"""Client side of ``server/attach.py``: map the pool of a server on this host, and be seen to live."""

from __future__ import annotations

import os
import socket
import threading

from lmcache.errors import LMCacheError
from lmcache.logging import info_once, init_logger
from lmcache.v1.multiprocess.host import WANT_FD, WATCH_ONLY, boot_id, socket_name
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)

_SECONDS = 2.0


class Attachment:
    """An open connection to the server's Unix socket and, for a worker, the mapped pool."""

    def __init__(self, lifeline: socket.socket | None, pool: PoolView | None, reason: str) -> None:
        self.pool = pool
        self.reason = reason
        """Why there is no mapping; empty if there is one, or none was wanted."""
        self._lifeline = lifeline
        self._ended = False
        self._stop = threading.Event()
        self._prefault: threading.Thread | None = None

    @property
    def watched(self) -> bool:
        """Whether each side learns of the other's end at once."""
        return self._lifeline is not None

    @property
    def ended(self) -> bool:
        """Whether the server has closed the connection, which it does only when it ends.

        After :meth:`close`: whether it had done so before.
        """
        if self._lifeline is None:
            return self._ended
        try:
            return not self._lifeline.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def prefault(self) -> None:
        """Fill this process's page tables for the pool, in a thread of its own, until :meth:`close`."""
        if self.pool is not None:
            target, args = self.pool.prefault, (self._stop,)
            self._prefault = threading.Thread(target=target, args=args, name="lmcache-prefault", daemon=True)
            self._prefault.start()

    def close(self) -> None:
        """Tell the server that this process writes no more. The mapping ends with its last user: at once, unless
        a copy is under way."""
        if self._lifeline is not None:
            self._ended = self.ended
            self._lifeline.close()
            self._lifeline = None
        self.pool = None
        self._stop.set()
        if self._prefault is not None:
            self._prefault.join(_SECONDS)
            self._prefault = None


def attach(welcome: m.Welcome, want_pool: bool, shm: str) -> Attachment:
    """Connect to the server's Unix socket if it is on this host; map the pool if ``want_pool``.

    Raises:
        LMCacheError: if ``shm`` is "require" and the pool cannot be mapped; the text says why.
    """
    where = welcome.attach
    reason = ""
    if where is None:
        reason = "the server keeps its pool to itself (--shm off)"
    elif where.host != boot_id():
        where, reason = None, "the server is on another host"
    elif want_pool and shm == "off":
        reason = "shared memory is switched off (lmcache.mp.shm=off)"
    elif want_pool:
        try:
            return _connect(where, welcome.session, want_pool)
        except (OSError, LMCacheError) as exc:
            reason = f"the server's pool cannot be mapped: {exc}"
    if want_pool:
        if shm == "require":
            raise LMCacheError(f"lmcache.mp.shm=require: {reason}")
        info_once(logger, reason, "payload travels in frames: %s", reason)
    lifeline = None
    if where is not None:
        try:  # so that the server learns of our death at once, and not from a long silence
            lifeline = _connect(where, welcome.session, want_pool=False)._lifeline
        except (OSError, LMCacheError) as exc:
            logger.debug("the server does not watch this process: %s", exc)
    return Attachment(lifeline, None, reason if want_pool else "")


def _connect(where: m.Attach, session: str, want_pool: bool) -> Attachment:
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        lifeline.settimeout(_SECONDS)
        lifeline.connect(socket_name(where.socket))
        lifeline.sendall(session.encode() + (WANT_FD if want_pool else WATCH_ONLY))
        answer, fds, _, _ = socket.recv_fds(lifeline, 512, 1)
        if answer != b"+":
            raise LMCacheError(answer.decode("utf-8", "replace") or "the server closed the connection")
        lifeline.setblocking(False)
        if not want_pool:
            return Attachment(lifeline, None, "")
        if not fds:
            raise LMCacheError("the server sent no descriptor")
        try:
            pool = PoolView(fds[0], where.data_bytes)
        finally:
            for fd in fds:
                os.close(fd)
        attachment = Attachment(lifeline, pool, "")
        attachment.prefault()
        return attachment
    except BaseException:
        lifeline.close()
        raise
