"""Servers that start quickly: forked from a process that has imported all that a server needs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from lmcache.v1.multiprocess.server.app import Ready, run_server
from lmcache.v1.multiprocess.server.config import ServerConfig

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["helpers.forked_server", "lmcache.v1.storage.l2.disk", "uvicorn.protocols.http.h11_impl"]
)
START_SECONDS = 30.0


def _serve(say: Connection, log: str, environment: dict[str, str], settings: dict[str, Any]) -> None:
    os.environ.update(environment)
    with open(log, "a") as err:
        os.dup2(err.fileno(), 2)

    def ready(told: Ready) -> None:
        say.send(told)

    run_server(ServerConfig(port=0, http_port=0, **settings), ready)


class ForkedServer:
    """A server process; ``settings`` are those of ``ServerConfig``.

    Args:
        log: a file for what it writes.
        environment: variables for it alone; the process that it is forked from may be older than ours.
    """

    def __init__(
        self, log: os.PathLike[str], environment: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_serve, args=(theirs, str(log), dict(environment or {}), settings), daemon=True
        )
        self._process.start()
        theirs.close()
        with ours:
            assert ours.poll(START_SECONDS), "the server did not start"
            self.ready: Ready = ours.recv()
        self.address = self.ready.address
        self.pid = self.ready.pid

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.end(signal.SIGKILL)

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)
        self._process.join(30)
        assert self._process.exitcode is not None, "the server did not end"
        return self._process.exitcode

    def __enter__(self) -> ForkedServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.exitcode is None:
            self.kill()
