"""Storage engines other than Redis, as real processes: an S3 server, and the master of a Mooncake Store."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.server import dead_port, wait_for

START_SECONDS = 30.0


@dataclass
class Engine:
    """A process that listens on a port of 127.0.0.1; what it says is in ``log``."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(self._listens, START_SECONDS, f"{self.command} listens; {self.log}")

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def _running(command: list[str], port: int) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="lmc-engine-") as folder:
        engine = Engine(command, port, Path(folder, "log"))
        try:
            engine.start()
            yield engine
        finally:
            engine.kill()


@contextmanager
def s3_server(bucket: str) -> Iterator[Engine]:
    """moto's S3 with one bucket. It lets everybody in who signs a request."""
    port = dead_port()
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port) as engine:
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=30):
            yield engine


@contextmanager
def mooncake_master() -> Iterator[Engine]:
    """A master without any memory: clients lend it."""
    beside = Path(sys.executable).with_name("mooncake_master")
    program = str(beside) if beside.exists() else shutil.which("mooncake_master")
    assert program, "mooncake_master is not there: pip install lmcache[mooncake]"
    port = dead_port()
    command = [program, f"--rpc_port={port}", f"--metrics_port={dead_port()}", "--logtostderr"]
    with _running(command, port) as engine:
        yield engine
