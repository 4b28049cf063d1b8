"""Engines that lie: no Redis where one should be, an S3 that answers nonsense, values that were exchanged.

Each costs bounded time and one line that can be printed, and nothing wrong is served.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from helpers.redis_server import redis_server
from helpers.server import dead_port, running_server, wait_for
from helpers.tier_load import Stranger
from lmcache.errors import StartupError
from lmcache.testing.adapters.objects import new_key, new_object
from lmcache.v1.keys import object_key
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l2.adapter import AdapterError, Call, StorageAdapter, Want
from lmcache.v1.storage.l2.registry import build

SOON = 3.0
CALL_SECONDS = 0.5
SIZE = 100_000

NONSENSE = [
    b":abc\r\n",
    b"*1\r\n" * 3000 + b":1\r\n",
    b"$99999999999999999999\r\n",
    b":" + b"9" * 5000 + b"\r\n",
    b"$-5\r\n",
    b"*-7\r\n",
    b"\xff\xfe\r\n",
    b"-MOVED x\r\n",
    b"-\x1b[31m" + b"E" * 60_000 + b"\r\n",
    b"$3\r\nabcXX",
]


@contextmanager
def saying(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """The address of what answers each packet."""

    def serve(peer: socket.socket) -> None:
        with peer:
            try:
                while said := peer.recv(1 << 16):
                    peer.sendall(answer(said))
            except OSError:  # the client has had enough
                return

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(SOON)


def verbs(adapter: StorageAdapter) -> Sequence[Callable[[], Any]]:
    key, put = new_key(), new_object(SIZE)
    return (
        lambda: adapter.contains([key], Call(CALL_SECONDS)),
        lambda: adapter.load([Want(key, memoryview(bytearray(SIZE)))], Call(CALL_SECONDS)),
        lambda: adapter.store([put], Call(CALL_SECONDS)),
        lambda: adapter.delete([key], Call(CALL_SECONDS)),
        lambda: adapter.headers([key], Call(CALL_SECONDS)),
        lambda: adapter.clear(Call(CALL_SECONDS)),
    )


def check_line(told: str) -> None:
    assert told.isprintable(), told
    assert len(told) < 600
    assert "s3cret" not in told


def check_verbs(adapter: StorageAdapter) -> None:
    """Every one ends in time, by an answer, which whoever asks takes for a hint, or by an error."""
    for verb in verbs(adapter):
        start = time.monotonic()
        try:
            answer = verb()
            assert isinstance(answer, int) or len(answer) == 1
        except AdapterError as exc:
            check_line(str(exc))
        assert time.monotonic() - start < SOON


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("answer", NONSENSE, ids=lambda a: repr(a[:12]))
def test_what_is_no_redis_ends_the_start_in_one_line(answer: bytes, cluster: bool) -> None:
    with saying(lambda _: answer) as address, pytest.raises(StartupError) as told:
        build(
            {"type": "redis", "url": f"redis://:s3cret@{address}", "cluster": cluster, "connect_seconds": 0.3}
        )
    check_line(str(told.value))


def test_a_cluster_that_is_away_ends_the_start_in_one_line() -> None:
    with pytest.raises(StartupError, match="start it, or set") as told:
        build({"type": "redis", "url": f"redis://127.0.0.1:{dead_port()}", "cluster": True})
    check_line(str(told.value))


@pytest.mark.parametrize("piece", ["32MiB", "64KiB"])
@pytest.mark.parametrize("answer", NONSENSE, ids=lambda a: repr(a[:12]))
def test_a_redis_that_answers_nonsense_costs_a_call_its_time_and_one_line(answer: bytes, piece: str) -> None:
    def say(said: bytes) -> bytes:
        if b"SETINFO" in said or b"PING" in said:
            return b"+PONG\r\n" if b"PING" in said else b"+OK\r\n" * said.count(b"*")
        return answer

    with saying(say) as address:
        adapter = build({"type": "redis", "url": f"redis://{address}", "piece": piece})
        check_verbs(adapter)
        adapter.close()


class Liar(BaseHTTPRequestHandler):
    """An S3 that begins honestly."""

    protocol_version = "HTTP/1.1"
    mode = "honest"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, body, headers = 200, bytes(SIZE + 100), {"ETag": '"x"'}
        headers["Last-Modified"] = "Wed, 21 Oct 2015 07:28:00 GMT"
        if self.mode == "honest":
            code, body = 404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>"
        elif self.mode == "forbidden":
            code, body = (
                403,
                b"<Error><Code>Denied</Code><Message>\x1b[31m" + b"x" * 9000 + b"</Message></Error>",
            )
        elif self.mode == "broken":
            code, body = 500, b"oops\n" * 10_000
        elif self.mode == "not there":
            code, body = 404, b"<html>"
        elif self.mode == "around":
            code, body, headers["Location"] = 307, b"", self.path
        elif self.mode == "endless":
            headers["Content-Length"] = str(SIZE + 100)
            body = b""
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: 5000 if self.mode == "short" else None])
        self.close_connection = self.mode == "short"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """The client has hung up, as it may."""


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageAdapter]:
    monkeypatch.setenv("LIAR_KEY", "s3cret")
    with Server(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        spec = {"type": "s3", "url": "s3://b/kv", "endpoint": f"http://127.0.0.1:{server.server_port}"}
        more = {"region": "r", "allow_http": True, "access_key_env": "LIAR_KEY", "secret_key_env": "LIAR_KEY"}
        monkeypatch.setattr(Liar, "mode", "honest")
        adapter = build(spec | more)
        yield adapter
        adapter.close()
        server.shutdown()


@pytest.mark.parametrize("mode", ["forbidden", "broken", "not there", "around", "endless", "short", "other"])
def test_an_s3_that_lies_costs_a_call_its_time_and_one_line(
    liar: StorageAdapter, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(Liar, "mode", mode)
    check_verbs(liar)


@pytest.mark.parametrize("mode", ["forbidden", "broken", "not there", "around"])
def test_an_s3_that_takes_nothing_is_an_error_of_the_store(
    liar: StorageAdapter, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(Liar, "mode", mode)
    with pytest.raises(AdapterError):
        liar.store([new_object(SIZE)], Call(SOON))


def test_a_value_that_was_exchanged_for_another_s_is_not_served_and_goes() -> None:
    with redis_server() as redis:
        with running_server("--l2-adapter", json.dumps({"type": "redis", "url": redis.url})) as server:
            with Stranger(server.address, "e") as stranger:
                mine, other = (stranger.hashes(range(start, start + 256)) for start in (0, 5000))
                assert stranger.store(mine) == stranger.store(other) == 1
                wait_for(lambda: redis.tell("DBSIZE") == 2, what="both are written behind")
                stranger.ask(m.Clear(tiers=["l1"]))
                names = [
                    f"lmcache:{object_key(stranger.namespace.digest(), h[0]).hex()}" for h in (mine, other)
                ]
                redis.tell("COPY", names[1], names[0], "REPLACE")
                assert stranger.find(mine) == 0
                assert stranger.find(other) == 1
                (row,) = stranger.ask(m.Status()).fields["l2"]
                assert row["quarantined"] == 1
                wait_for(lambda: redis.tell("EXISTS", names[0]) == 0, what="it is removed")
