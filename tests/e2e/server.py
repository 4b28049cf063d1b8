"""A real ``lmcache server`` for the engine tests: on a port of its own, killed and started at will."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``condition`` holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class Server:
    """One server address, on which a server runs or does not."""

    def __init__(self, *flags: str, l1_gb: float = 0.5) -> None:
        self.http_port = free_port()
        self._extra = ["--http-port", str(self.http_port), "--l1-size-gb", str(l1_gb), *flags]
        self.use_port(free_port())
        self._process: subprocess.Popen[str] | None = None

    def use_port(self, port: int) -> None:
        """Serve on this port from the next start on."""
        self.port = port
        self._flags = ["--port", str(port), *self._extra]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Server:
        command = [sys.executable, "-m", "lmcache.cli.main", "server", *self._flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "ready" in line, f"server did not start: {line!r}"
        return self

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and wait for a clean end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(15) == 0
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def status(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.http_port}/status"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return dict(json.loads(answer.read()))

    def registered(self) -> bool:
        """Whether a worker and a scheduler are in session."""
        try:
            roles = {s["role"] for s in self.status()["sessions"]}
        except (OSError, urllib.error.URLError):
            return False
        return {"worker", "scheduler"} <= roles

    def idle(self) -> bool:
        """Whether no lease, no reservation and no request is left."""
        status = self.status()
        l1 = status["l1"]
        return not (l1["read_leases"] or l1["write_leases"] or l1["pinned_objects"] or status["requests"])

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            try:
                os.kill(self.pid, signal.SIGCONT)
            except ProcessLookupError:
                return
        self.kill()
