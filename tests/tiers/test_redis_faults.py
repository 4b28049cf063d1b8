"""The Redis adapter when the server refuses, is full, hangs or dies: bounded in time, with the reason, and back."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.redis_server import RedisServer, adapter_on, redis_server
from helpers.server import wait_for
from lmcache.errors import ConfigError, StartupError
from lmcache.testing.adapters.objects import new_key, new_object, read, write
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Want
from lmcache.v1.storage.l2.registry import build

SECONDS = 10.0
SOON = 2.5  # a call of half a second has long ended, on a busy machine too


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


def failure(ask: Callable[[], Any]) -> tuple[str, float]:
    """The one line of an AdapterError, and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises(AdapterError) as caught:
        ask()
    assert "\n" not in str(caught.value)
    return str(caught.value), time.monotonic() - start


# ---- who may


def test_a_wrong_password_ends_the_start_in_one_line_that_does_not_show_it() -> None:
    with redis_server(password="right") as server:
        for url in (server.url.replace("right", "wr0ng"), server.url.replace(":right@", "")):
            with pytest.raises(StartupError) as caught:
                build({"type": "redis", "url": url})
            assert "wr0ng" not in str(caught.value)
            assert "\n" not in str(caught.value)
            assert any(word in str(caught.value) for word in ("invalid", "Authentication", "NOAUTH"))


def test_a_password_comes_from_the_url_or_a_variable_and_is_never_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "s3cret")
    with redis_server(password="s3cret") as server:
        bare = server.url.replace(":s3cret@", "")
        for url, options in ((server.url, {}), (bare, {"password_env": "CACHE_PASSWORD"})):
            with adapter_on(url, **options) as adapter:
                put = new_object(1000)
                write(adapter, [put], SECONDS)
                assert "s3cret" not in adapter.describe()
                assert f"127.0.0.1:{server.port}" in adapter.describe()
                server.kill()
                told, _ = failure(lambda adapter=adapter, put=put: adapter.contains([put.key], Call(SECONDS)))
                assert "s3cret" not in told
                server.start()


def test_a_variable_that_is_not_set_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"password_env='NOT_THERE'.*export NOT_THERE"):
        build({"type": "redis", "url": "redis://127.0.0.1:1", "password_env": "NOT_THERE"})


def test_an_unknown_authority_is_refused_and_accepted_only_on_demand() -> None:
    with redis_server(tls=True) as server:
        client = {
            "cert_file": str(server.folder / "client.pem"),
            "key_file": str(server.folder / "client.key"),
        }
        with pytest.raises(StartupError, match="certificate"):
            build({"type": "redis", "url": server.url, **client})
        with adapter_on(server.url, verify=False, **client) as adapter:
            write(adapter, [new_object(10)], SECONDS)


# ---- whether it is there


def test_a_server_that_is_not_there_ends_the_start_unless_it_is_not_required(tmp_path: Path) -> None:
    with redis_server() as server:
        server.kill()
        with pytest.raises(StartupError, match="start it, or set"):
            build({"type": "redis", "url": server.url})
        with adapter_on(server.url, required=False) as adapter:
            put = new_object(1000)
            told, seconds = failure(lambda: adapter.store([put], Call(SECONDS)))
            assert str(server.port) in told
            assert seconds < SOON
            server.start()
            write(adapter, [put], SECONDS)


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_server_that_dies_in_the_middle_is_an_error_and_its_successor_is_used(way: str) -> None:
    with redis_server() as server, adapter_on(server.url, threads=1) as adapter:
        put = new_object(30_000_000)
        if way == "load":
            write(adapter, [put], SECONDS)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        told: list[str] = []

        def ask() -> None:
            want = Want(put.key, memoryview(bytearray(len(put.payload))))
            call = Call(60.0)
            told.append(
                failure(lambda: adapter.store([put], call) if way == "store" else adapter.load([want], call))[
                    0
                ]
            )

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: _waits_for(server.port), what="the request is on its way")
        server.kill()
        thread.join(SOON)
        assert told, "the call did not return"
        server.start()
        assert read(adapter, put.key, len(put.payload), SECONDS) is None
        write(adapter, [put], SECONDS)


def _waits_for(port: int) -> bool:
    """Whether a connection to the port of this host has bytes that the server has not read."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    mine = (row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01")
    return any(int(row[4].split(":")[1], 16) for row in mine)


# ---- whether it answers


def test_a_server_that_hangs_costs_the_call_its_time_and_no_answer_comes_to_the_next(
    server: RedisServer,
) -> None:
    with adapter_on(server.url) as adapter:
        first, second = new_object(100_000), new_object(100_000)
        write(adapter, [first, second], SECONDS)
        sleeper = threading.Thread(target=server.tell, args=("DEBUG", "SLEEP", "1.5"))
        sleeper.start()
        wait_for(server.hangs, what="the server sleeps")
        want = Want(first.key, memoryview(bytearray(100_000)))
        told, seconds = failure(lambda: adapter.load([want], Call(0.4)))
        assert "in time" in told
        assert seconds < SOON
        call = Call(60.0)
        threading.Timer(0.1, call.cancel).start()
        start = time.monotonic()
        assert adapter.load([want], call) == [None]
        assert time.monotonic() - start < SOON
        sleeper.join(SECONDS)
        assert read(adapter, second.key, 100_000, SECONDS) == bytes(second.payload)
        assert read(adapter, first.key, 100_000, SECONDS) == bytes(first.payload)


@contextmanager
def answering(*answers: bytes, gap: float = 0.0) -> Iterator[str]:
    """The url of what is no Redis: to a GET it says ``answers``, ``gap`` seconds apart, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = threading.Event()

        def serve() -> None:
            while not end.is_set():
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    while said := peer.recv(65_536):
                        if b"GET" in said:
                            for answer in answers:
                                if end.wait(gap):
                                    return
                                peer.sendall(answer)
                            break
                        peer.sendall(b"+PONG\r\n" if b"PING" in said else b"+OK\r\n" * said.count(b"*"))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        end.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(SECONDS)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"$100050\r\n" + bytes(500), "closed the connection"),
        (b"$12", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "expected a reply of RESP 2"),
        (b":17\r\n", "expected a value"),
        (b"$many\r\n", "expected a number"),
        (b"x" * 200_000, "a line without end"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "LOADING"),
    ],
)
def test_an_answer_that_is_cut_short_or_none_at_all_is_an_error_with_the_reason(
    answer: bytes, told: str
) -> None:
    with answering(answer) as url, adapter_on(url) as adapter:
        want = Want(new_key(), memoryview(bytearray(100_000)))
        text, seconds = failure(lambda: adapter.load([want], Call(SECONDS)))
        assert told in text
        assert seconds < SOON


def test_a_server_that_trickles_is_not_waited_for_beyond_the_deadline() -> None:
    with answering(b"$100050\r\n", *[b"x"] * 1000, gap=0.05) as url, adapter_on(url) as adapter:
        want = Want(new_key(), memoryview(bytearray(100_000)))
        text, seconds = failure(lambda: adapter.load([want], Call(0.5)))
        assert "in time" in text
        assert 0.4 < seconds < SOON


# ---- whether it has room


def test_a_full_server_is_an_error_with_its_reason_and_is_used_again_when_it_has_room() -> None:
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        with adapter_on(server.url) as adapter:
            puts = [new_object(2_000_000) for _ in range(4)]
            told, _ = failure(lambda: [adapter.store([put], Call(SECONDS)) for put in puts])
            assert "OOM" in told
            assert server.tell("DBSIZE") < 4
            server.tell("CONFIG", "SET", "maxmemory", "0")
            write(adapter, puts, SECONDS)


@pytest.mark.parametrize("piece", ["64MB", "64KiB"])
def test_a_value_that_is_too_big_for_the_server_is_an_error_and_leaves_nothing(piece: str) -> None:
    with (
        redis_server("--proto-max-bulk-len", "1mb") as server,
        adapter_on(server.url, piece=piece) as adapter,
    ):
        big, small = new_object(8_000_000), new_object(500_000)
        told, seconds = failure(lambda: adapter.store([big], Call(SECONDS)))
        assert any(
            word in told for word in ("invalid bulk length", "maximum allowed size", "connection lost")
        ), told
        assert seconds < SOON
        assert server.tell("DBSIZE") == 0
        write(adapter, [small], SECONDS)


def test_errors_of_some_objects_are_answers_about_those_alone(server: RedisServer) -> None:
    with adapter_on(server.url, key_prefix="some:", piece="1MiB") as adapter:
        foreign, good = new_object(3_000_000), new_object(1000)
        server.tell("RPUSH", "some:" + foreign.key.hex(), "a list")
        wants = [Want(put.key, memoryview(bytearray(len(put.payload)))) for put in (foreign, good)]
        write(adapter, [good], SECONDS)
        assert [header is not None for header in adapter.load(wants, Call(SECONDS))] == [False, True]
        assert adapter.load(wants[:1], Call(SECONDS)) == [None]
        write(adapter, [foreign], SECONDS)
        assert read(adapter, foreign.key, 3_000_000, SECONDS) == bytes(foreign.payload)


# ---- what an operator may ask for


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": "http://127.0.0.1"}, "redis://HOST:PORT"),
        ({"url": "redis://127.0.0.1:6379?decode_responses=1"}, "without a query"),
        ({"url": "redis://127.0.0.1:port"}, "redis://HOST:PORT"),
        ({"url": "redis://127.0.0.1/3", "cluster": True}, "without a database"),
        ({"url": "unix:///run/redis.sock", "cluster": True}, "cluster"),
        ({"url": "redis://127.0.0.1", "verify": False}, "only with a url rediss://"),
        ({"url": "rediss://127.0.0.1", "cert_file": "x"}, "both or none"),
        ({"url": "redis://127.0.0.1", "key_prefix": "{a}"}, "no braces"),
        ({"url": "redis://127.0.0.1", "piece": 1000}, "at least 64KiB"),
        ({"url": "redis://127.0.0.1", "password": "s3cret"}, "no such option 'password'"),
        ({"url": "redis://127.0.0.1", "ttl_seconds": -1}, "ttl_seconds"),
        ({}, "url: missing"),
    ],
)
def test_a_bad_option_is_one_line_that_says_what_is_accepted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"type": "redis", **options})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)
