"""Real Redis servers, each in a process and a folder of its own: plain, with TLS, or several as a cluster."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from helpers.server import dead_port, wait_for
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.registry import build

PROGRAMS = ("redis-server", "valkey-server")
START_SECONDS = 20.0
_CLUSTER = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "2000",
    "--cluster-require-full-coverage",
    "no",
)


@dataclass
class RedisServer:
    """A server on a port of 127.0.0.1. ``kill`` and ``start`` may follow each other."""

    folder: Path
    port: int
    flags: tuple[str, ...] = ()
    password: str = ""
    tls: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        return f"{'rediss' if self.tls else 'redis'}://{user}127.0.0.1:{self.port}"

    def start(self) -> None:
        program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
        assert program, f"none of {', '.join(PROGRAMS)} is on PATH: apt-get install redis-server"
        port = ("--port", "0", "--tls-port") if self.tls else ("--port",)
        command = [program, *port, str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--enable-debug-command", "yes", *self.flags]
        if self.password:
            command += ["--requirepass", self.password]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(self._answers, START_SECONDS, f"a Redis server answers; {self.folder / 'log'}")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with suppress(redis.RedisError, OSError), self.client() as client:
            return bool(client.ping())
        return False

    def client(self, **settings: Any) -> redis.Redis:
        """A client of one's own, for a look behind the adapter."""
        return redis.Redis.from_url(self.url, **(self.tls | {"protocol": 2, "socket_timeout": 10} | settings))

    def tell(self, *words: Any) -> Any:
        """The answer to one command."""
        with self.client() as client:
            return client.execute_command(*words)

    def hangs(self) -> bool:
        """Whether it gives no answer for a tenth of a second."""
        with self.client(socket_timeout=0.1) as client:
            try:
                client.ping()
            except redis.TimeoutError:
                return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def redis_server(*flags: str, password: str = "", tls: bool = False) -> Iterator[RedisServer]:
    """A server that has started; killed at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-redis-")))
        extra, settings = _certificates(folder) if tls else ((), {})
        server = RedisServer(folder, dead_port(), (*flags, *extra), password, settings)
        stack.callback(server.kill)
        server.start()
        yield server


@contextmanager
def adapter_on(url: str, **options: Any) -> Iterator[StorageAdapter]:
    """The adapter on a server; closed at the end."""
    adapter = build({"type": "redis", "url": url, **options})
    try:
        yield adapter
    finally:
        adapter.close()


def _certificates(folder: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An authority, the server's certificate, and a client's, which the server asks for."""
    import trustme  # the benchmarks start servers, too, and need none

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, issued in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("client", authority.issue_cert("lmcache")),
    ):
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    flags = ("--tls-cert-file", str(folder / "server.pem"), "--tls-key-file", str(folder / "server.key"),
             "--tls-ca-cert-file", str(folder / "ca.pem"))  # fmt: skip
    names = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key"}
    return flags, {name: str(folder / file) for name, file in names.items()}


@contextmanager
def redis_cluster(masters: int = 3) -> Iterator[Sequence[RedisServer]]:
    """Masters that share the 16384 slots evenly."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for _ in range(masters):
            while (port := dead_port()) > 55_000:  # its bus listens 10000 above
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-redis-")))
            server = RedisServer(folder, port, _CLUSTER)
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        for index, server in enumerate(servers):
            server.tell("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            bounds = (16_384 * index // masters, 16_384 * (index + 1) // masters - 1)
            server.tell("CLUSTER", "ADDSLOTSRANGE", *bounds)
            server.tell("CLUSTER", "MEET", "127.0.0.1", servers[0].port)

        want = {b"cluster_state:ok", b"cluster_slots_ok:16384", b"cluster_known_nodes:%d" % masters}

        def whole() -> bool:
            told = [bytes(server.tell("CLUSTER", "INFO")).split() for server in servers]
            return all(want <= set(info) for info in told)

        wait_for(whole, START_SECONDS, "the nodes of the cluster know each other")
        yield servers
