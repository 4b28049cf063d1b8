"""A real ``lmcache server`` in a process of its own, other commands, and a worker that needs no engine."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.v1.keys import Namespace, Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel

COMMAND = (sys.executable, "-m", "lmcache.cli.main")
READY_SECONDS = 60.0
END_SECONDS = 20.0
CALL_SECONDS = 10.0
_READY = re.compile(
    r"lmcache server ready: (?P<address>\S+) (?P<http>\S+) l1=(?P<l1_gib>\S+)GiB shm=(?P<shm>\S+)"
    r" chunk=(?P<chunk_size>\d+) pid=(?P<pid>\d+) reserve=(?P<reserve_seconds>\S+)s\n"
)


def wait_for(condition: Callable[[], Any], seconds: float = 10.0, what: str = "condition") -> Any:
    """Poll until ``condition`` gives something true; that. Fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return value


ZMTP_HEADER = 2  # bytes before a frame of fewer than 256


def arrived(port: int) -> int:
    """Bytes that wait to be read on the connections of a port of this host."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    mine = (row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01")
    return sum(int(row[4].split(":")[1], 16) for row in mine)


def run_cli(*argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``lmcache`` with ``argv`` to its end."""
    return _run([*COMMAND, *argv], settings)


def run_python(code: str, *argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python of its own."""
    return _run([sys.executable, "-c", code, *argv], settings)


def _run(command: list[str], settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    defaults: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "timeout": 60,
    }
    return subprocess.run(command, **(defaults | settings))


def refused(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on standard error of a command that must have failed with ``code``, and said no more."""
    assert done.returncode == code, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket's."""
    path = tempfile.mkdtemp(prefix="lmc-")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


@dataclass
class RunningServer:
    """Where a server is, and its process."""

    ready: dict[str, Any]
    process: subprocess.Popen[str]
    log: Path

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def http(self) -> str:
        return str(self.ready["http"])

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def http_port(self) -> int:
        return int(self.http.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.process.pid

    def get(self, path: str) -> tuple[int, str]:
        """HTTP status and body of GET ``path``."""
        return http_get(self.http + path)

    def state(self) -> dict[str, Any]:
        """What /status says. On a busy machine the server may once not answer itself in time."""

        def answered() -> dict[str, Any] | None:
            status, body = self.get("/status")
            return dict(json.loads(body)) if status == 200 else None

        state: dict[str, Any] = wait_for(answered, CALL_SECONDS, "the server tells its state")
        return state

    def metrics(self) -> dict[str, float]:
        """Series of /metrics with their labels, by name."""
        lines = (line for line in self.get("/metrics")[1].splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self.log.read_text()

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(END_SECONDS)


@contextmanager
def running_server(*flags: str, l1_gb: float = 0.05, prefix: Sequence[str] = ()) -> Iterator[RunningServer]:
    """A server with ``flags`` on free ports. It need not live to the end of the block. ``prefix`` is a command that
    becomes the one it is given."""
    command = [*prefix, *COMMAND, "server", "--l1-size-gb", str(l1_gb), "--port", "0", "--http-port", "0"]
    command += ["--format", "json", *flags]
    with tempfile.TemporaryDirectory(prefix="lmc-") as folder:
        log = Path(folder, "stderr")
        with open(log, "wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True
            )
        assert process.stdout is not None
        with process.stdout:
            try:
                readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
                line = process.stdout.readline() if readable else ""
                assert line, f"server did not start: {log.read_text()}"
                yield RunningServer(_parse_ready(line), process, log)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
                    try:
                        process.wait(END_SECONDS)
                    finally:
                        process.kill()
                        process.wait()


class Server:
    """One server address, on which a server runs or does not: it is killed and started at will."""

    def __init__(self, *flags: str, l1_gb: float = 0.5, port: int = 0) -> None:
        self.port = port or dead_port()
        self._flags = ("--http-port", str(dead_port()), *flags)
        self._l1_gb = l1_gb
        self._running: RunningServer | None = None
        self._end = ExitStack()

    @property
    def running(self) -> RunningServer:
        assert self._running is not None, "the server is not started"
        return self._running

    @property
    def pid(self) -> int:
        return self.running.pid

    def start(self) -> Server:
        context = running_server("--port", str(self.port), *self._flags, l1_gb=self._l1_gb)
        self._running = self._end.enter_context(context)
        return self

    def signal(self, number: int) -> None:
        self.running.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._running is not None:
            self.running.end(signal.SIGKILL)
            self._running = None
        self._end.close()

    def state(self) -> dict[str, Any]:
        return self.running.state()

    def registered(self) -> bool:
        """Whether a worker and a scheduler are in session."""
        return {"worker", "scheduler"} <= {session["role"] for session in self.state()["sessions"]}

    def idle(self) -> bool:
        """Whether no lease, no reservation and no request is left."""
        state = self.state()
        l1 = state["l1"]
        return not (l1["read_leases"] or l1["write_leases"] or l1["pinned_objects"] or state["requests"])

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _parse_ready(line: str) -> dict[str, Any]:
    """What a server said, in either format, that it is ready."""
    if line.startswith("{"):
        return dict(json.loads(line))
    found = _READY.fullmatch(line)
    assert found, line
    numbers = {"l1_gib": float, "chunk_size": int, "pid": int, "reserve_seconds": float}
    return {name: numbers.get(name, str)(value) for name, value in found.groupdict().items()}


def http_get(url: str, seconds: float = 5.0) -> tuple[int, str]:
    """HTTP status and body."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode()


@contextmanager
def taken_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def dead_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    with taken_port() as port:
        return port


@contextmanager
def channel_to(address: str) -> Iterator[Channel]:
    """A bare channel; closed at the end."""
    channel = Channel(address)
    try:
        yield channel
    finally:
        channel.close()


def hello(channel: Channel, **fields: Any) -> m.Welcome:
    """Open a session."""
    fields = {"protocol_min": m.PROTOCOL_MIN, "protocol_max": m.PROTOCOL, "role": "tool"} | fields
    welcome, _ = channel.call(m.Hello(**fields), CALL_SECONDS)
    assert isinstance(welcome, m.Welcome)
    return welcome


@contextmanager
def mapped(address: str, engine: str = "mapped") -> Iterator[None]:
    """While a client in this process, a worker of ``engine``, maps the pool of the server."""
    client = CacheClient(address, "worker", engine=engine)
    try:
        assert client.start(wait=CALL_SECONDS), client.reason
        assert client.attachment is not None
        assert client.attachment.pool is not None, client.attachment.reason
        yield
    finally:
        client.close()


def namespace(model: str = "model", chunk_size: int = 256, **fields: Any) -> Namespace:
    """A namespace of one small page per layer."""
    defaults: dict[str, Any] = {
        "revision": "r1", "engine": "test", "format": "test", "dtype": "float32", "block_size": 16,
        "kv_heads": 1, "head_size": 8, "page_bytes": (64,),
    }  # fmt: skip
    return Namespace(model=model, chunk_size=chunk_size, **(defaults | fields))


class Worker:
    """One rank of an engine that keeps its KV as plain bytes and sends them in frames."""

    _leases = itertools.count(1)

    def __init__(
        self,
        address: str,
        namespaces: Sequence[Namespace],
        engine: str = "engine",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.channel = Channel(address)
        self.namespaces = list(namespaces)
        self.welcome = hello(self.channel, role="worker", engine=engine, rank=rank, ranks=ranks)
        self.session = self.welcome.session
        self.ask(m.Register(session=self.session, namespaces=self.namespaces, mapped=False))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(LMCacheError):  # the server may have ended before
            self.channel.call(m.Bye(session=self.session), 1.0)
        self.channel.close()

    def ask(self, request: m.Request, payload: Sequence[bytes] = ()) -> m.Reply:
        return self.channel.call(request, CALL_SECONDS, payload)[0]

    def store(self, tokens: Sequence[int], **scope: Any) -> int:
        """Store every complete chunk of ``tokens`` for all groups; how many objects that published."""
        hashes = b"".join(chunk_hashes(tokens, Scope(chunk_size=self.welcome.chunk_size, **scope)))
        lease = os.getpid() << 32 | next(self._leases)
        reserved = self.ask(
            m.Reserve(session=self.session, lease=lease, hashes=[hashes] * len(self.namespaces))
        )
        assert isinstance(reserved, m.Reserved)
        sizes = [
            ns.object_bytes
            for ns, flat in zip(self.namespaces, reserved.slots, strict=True)
            for offset in flat[::2]
            if offset >= 0
        ]
        for index, size in enumerate(sizes):
            self.ask(m.Write(session=self.session, lease=lease, index=index), [bytes([index % 256]) * size])
        done = self.ask(m.Commit(session=self.session, lease=lease, indexes=list(range(len(sizes)))))
        assert isinstance(done, m.Ok)
        return done.count


def resident(pid: int) -> int:
    """Bytes of memory of a process that belong to no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until all threads obey: each does so in its own time."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        return {task.read_text().rpartition(")")[2].split()[0] for task in tasks} == {"T"}

    wait_for(stopped, what="every thread of the process stopped")
