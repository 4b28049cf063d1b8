"""A real ``lmcache server`` process: how it starts or refuses to, answers, withstands garbage, and ends."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.server import (
    CALL_SECONDS,
    ZMTP_HEADER,
    RunningServer,
    Worker,
    arrived,
    channel_to,
    hello,
    mapped,
    namespace,
    refused,
    run_cli,
    running_server,
    short_folder,
    stop_process,
    taken_port,
    wait_for,
)
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed

SHM = Path("/dev/shm")
TOKENS = list(range(1000))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One that no test of this module ends."""
    with running_server() as running:
        yield running


@pytest.fixture
def shm_name() -> Iterator[str]:
    """A name for a segment, which must not be there afterwards."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    assert not segment(name).exists()


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A path for the Unix socket, which must not be there afterwards."""
    with short_folder() as folder:
        yield str(folder / "s")
        assert list(folder.iterdir()) == []


def segment(name: str) -> Path:
    return SHM / f"lmcache-l1-{name}"


# ---- refusing to start

NEEDS_TORCH = "--supported-transfer-mode lmcache_driven: needs torch"
_DRIVEN = (3, "--supported-transfer-mode", "lmcache_driven", NEEDS_TORCH)
WITHOUT_TORCH = [] if importlib.util.find_spec("torch") else [_DRIVEN]  # where torch is, it starts a server

BAD = [
    (2, "--port", "99999", "--port 99999: expected 0..65535"),
    (2, "--port", "-1", "--port -1: expected 0..65535"),
    (2, "--http-port", "99999", "--http-port 99999: expected 0..65535"),
    (2, "--l1-size-gb", "0", "--l1-size-gb 0: expected a positive number of GiB"),
    (2, "--l1-size-gb", "-1", "--l1-size-gb -1: expected a positive number of GiB"),
    (2, "--l1-size-gb", "nan", "--l1-size-gb nan: expected a positive number of GiB"),
    (2, "--l1-size-gb", "inf", "--l1-size-gb inf: expected a positive number of GiB"),
    (2, "--l1-size-gb", "1e300", "--l1-size-gb 1e+300: expected a positive number of GiB"),
    (2, "--l1-size-gb", "1e-9", "--l1-size-gb 1e-09: expected at least"),
    (3, "--l1-size-gb", "1e6", "L1 pool: 1001953.12 GiB needed, "),
    (2, "--eviction-trigger-watermark", "7", "--eviction-trigger-watermark 7: expected a fraction of L1"),
    (2, "--eviction-trigger-watermark", "nan", "--eviction-trigger-watermark nan: expected a fraction"),
    (2, "--eviction-ratio", "-3", "--eviction-ratio -3: expected a fraction of L1"),
    (2, "--eviction-ratio", "nan", "--eviction-ratio nan: expected a fraction of L1"),
    (2, "--chunk-size", "100", "--chunk-size 100: expected a multiple of 16 tokens up to 1048576"),
    (2, "--chunk-size", "0", "--chunk-size 0: expected a multiple of 16 tokens up to 1048576"),
    (2, "--chunk-size", "1" + 24 * "0", "expected a multiple of 16 tokens up to 1048576"),
    (2, "--l2-adapter", 100_000 * "[", ": not JSON (maximum recursion depth"),
    (
        2,
        "--l2-adapter",
        '{"type": "disk", "path": "a\\u0000", "max_gb": 1}',
        "path='a\\x00': expected a directory",
    ),
    (
        2,
        "--eviction-policy",
        "CLOCK",
        "--eviction-policy 'CLOCK': expected one of LRU, LFU, FIFO, ARC, S3-FIFO, noop",
    ),
    (
        2,
        "--supported-transfer-mode",
        "warp",
        "--supported-transfer-mode='warp': expected one of auto, engine_driven",
    ),
    *WITHOUT_TORCH,
    (2, "--shm", "maybe", "--shm 'maybe': expected one of auto, off"),
    (2, "--shm", "off", "--shm off: contradicts --shm-name or --shm-socket"),
    (2, "--shm-name", "a/b", "--shm-name 'a/b': expected 1 to 64 of the characters"),
    (2, "--shm-socket", "@", "--shm-socket @: expected a path, or @NAME"),
    (3, "--shm-socket", "/no/such/folder/s", "--shm-socket /no/such/folder/s: cannot be bound (No such file"),
    (2, "--session-timeout", "nan", "--session-timeout nan: expected at least 5 seconds"),
    (2, "--host", "", "--host '': expected an address of this host"),
    (2, "--http-host", "", "--http-host '': expected an address of this host"),
    (3, "--host", "*", "--host *: "),
    (3, "--host", "192.0.2.1", "cannot bind tcp://192.0.2.1:"),
    (3, "--http-host", "192.0.2.1", "--http-port 0: cannot bind 192.0.2.1:0"),
    (3, "--http-host", "a..b", "--http-host a..b: "),
    (2, "--chunk-sise", "256", "unknown flag '--chunk-sise': did you mean --chunk-size?"),
]


@pytest.mark.parametrize(
    ("code", "flag", "value", "text"), BAD, ids=[f"{flag} {value[:40]}" for _, flag, value, _ in BAD]
)
def test_a_bad_setting_is_one_line_and_leaves_nothing(
    code: int, flag: str, value: str, text: str, shm_name: str, socket_path: str
) -> None:
    good = {
        "--l1-size-gb": "0.01",
        "--port": "0",
        "--http-port": "0",
        "--shm-name": shm_name,
        "--shm-socket": socket_path,
    }
    flags = [word for pair in (good | {flag: value}).items() for word in pair]
    line = refused(run_cli("server", *flags, timeout=30), code)
    assert text in line


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_in_use_is_one_line_and_leaves_nothing(flag: str, shm_name: str, socket_path: str) -> None:
    other = "--http-port" if flag == "--port" else "--port"
    with taken_port() as port:
        where = ["--shm-name", shm_name, "--shm-socket", socket_path]
        done = run_cli("server", "--l1-size-gb", "0.01", flag, str(port), other, "0", *where)
        line = refused(done, 3)
    assert line.startswith(f"lmcache server: {flag} {port}: cannot bind ")
    assert "Address already in use" in line
    assert f"choose another --{flag[2:].replace('port', 'host')} or {flag}" in line


def test_one_port_for_both_is_refused() -> None:
    line = refused(run_cli("server", "--l1-size-gb", "0.01", "--port", "7001", "--http-port", "7001"), 2)
    assert "--http-port 7001: the same as --port; choose another" in line


def test_more_memory_than_there_is_says_needed_and_available(shm_name: str) -> None:
    flags = ("--l1-size-gb", "1e6", "--port", "0", "--http-port", "0")
    assert "GiB available in memory; lower --l1-size-gb" in refused(run_cli("server", *flags), 3)
    assert "GiB available in " in refused(run_cli("server", *flags, "--shm-name", shm_name), 3)


# ---- ready


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        (resource.RLIMIT_NOFILE, 16, ("open files", "ulimit -n")),
        (resource.RLIMIT_FSIZE, 1 << 20, ("L1 pool", "--l1-size-gb")),
        (resource.RLIMIT_AS, 600 << 20, ("L1 pool", "ulimit -v")),
    ],
    ids=["open files", "file size", "address space"],
)
def test_a_limit_of_the_process_that_forbids_it_is_one_line(
    limit: int, value: int, words: tuple[str, str]
) -> None:
    done = run_cli(
        "server", "--l1-size-gb", "0.6", "--port", "0", "--http-port", "0",
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )  # fmt: skip
    line = refused(done, 3)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("form", ["terminal", "json"])
def test_ready_says_where_in_both_formats(form: str) -> None:
    with running_server("--chunk-size", "64", "--format", form) as running:
        assert running.ready | {"reserve_seconds": 0} == {
            "address": f"tcp://127.0.0.1:{running.port}",
            "http": f"http://127.0.0.1:{running.http_port}",
            "l1_gib": 0.05,
            "shm": "memfd",
            "chunk_size": 64,
            "pid": running.pid,
            "reserve_seconds": 0,
        }


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses, as /proc spells them, and ports on which a process listens."""
    links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.add((host, int(port, 16)))
    return found


def test_it_listens_on_loopback_only_unless_told_otherwise(server: RunningServer) -> None:
    loopback = struct.pack("=I", socket.htonl(0x7F000001))[::-1].hex().upper()
    assert listening(server.pid) == {(loopback, server.port), (loopback, server.http_port)}
    assert "no authentication" not in server.errors()
    with running_server("--host", "0.0.0.0", "--http-host", "0.0.0.0") as wide:
        assert listening(wide.pid) == {("00000000", wide.port), ("00000000", wide.http_port)}
        assert wide.errors().count("no authentication here; let only trusted hosts reach this port") == 2
        assert wide.get("/healthcheck")[0] == 200


def test_a_host_name_and_ipv6_work_as_addresses() -> None:
    with running_server("--host", "localhost", "--http-host", "localhost") as running:
        assert running.address.startswith("tcp://127.0.0.1:")
        assert running.get("/healthcheck")[0] == 200
        assert run_cli("ping", "--host", "localhost", "--port", str(running.port)).returncode == 0


def test_every_series_is_there_at_0_from_the_start() -> None:
    with running_server() as running:
        found = running.metrics()
    expected = {
        "requests_total", "lookups_requests_total", "lookup_requested_tokens_total",
        "lookup_hit_tokens_total", "l1_write_chunks_total", "frame_read_bytes_total",
        "frame_written_bytes_total", "undeliverable_replies_total", "l1_memory_usage_bytes", "l1_objects",
        "l1_read_leases", "l1_write_leases", "l1_evicted", "l1_allocation_failure", "sessions",
        'malformed_frames_total{fault="frames"}', 'malformed_frames_total{fault="message"}',
        'errors_total{code="protocol"}', 'errors_total{code="internal"}',
    }  # fmt: skip
    assert {name: found.get(f"lmcache_mp_{name}") for name in expected} == dict.fromkeys(expected, 0.0)
    assert found["lmcache_mp_l1_capacity_bytes"] > 50e6


def test_status_is_what_describe_shows(server: RunningServer) -> None:
    code, body = server.get("/status")
    assert code == 200
    state = json.loads(body)
    assert state["pid"] == server.pid
    assert state["l1"]["policy"] == "ARC"
    told = json.loads(run_cli("describe", "--host", server.address, "--format", "json").stdout)
    assert told["address"] == server.address
    assert set(told) == {"address", *state}
    assert told["epoch"] == state["epoch"]


# ---- health


def test_a_stopped_process_is_not_healthy_and_one_that_goes_on_is() -> None:
    with running_server() as running:
        stop_process(running.process.pid)
        began = time.monotonic()
        line = refused(run_cli("ping", "--host", running.address, "--timeout", "0.5"), 1)
        assert f"no cache server answers at {running.address} within 0.5 s" in line
        assert time.monotonic() - began < 5
        with pytest.raises(TimeoutError):
            running_get(running, seconds=0.5)
        running.process.send_signal(signal.SIGCONT)
        assert run_cli("ping", "--host", running.address).returncode == 0
        assert wait_for(lambda: running.get("/healthcheck") == (200, '{"healthy":true}'))


def running_get(running: RunningServer, seconds: float) -> bytes:
    with socket.create_connection(("127.0.0.1", running.http_port), seconds) as http:
        http.sendall(b"GET /healthcheck HTTP/1.1\r\nHost: x\r\n\r\n")
        return http.recv(100)


# ---- ending


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_clients_connected(
    signum: int, shm_name: str, socket_path: str
) -> None:
    with ExitStack() as stack:
        running = stack.enter_context(running_server("--shm-name", shm_name, "--shm-socket", socket_path))
        assert segment(shm_name).stat().st_mode & 0o777 == 0o600
        assert Path(socket_path).stat().st_mode & 0o777 == 0o600
        stack.enter_context(mapped(running.address))
        worker = stack.enter_context(Worker(running.address, [namespace()], engine="f"))
        assert worker.store(TOKENS) == 3
        half = stack.enter_context(socket.create_connection(("127.0.0.1", running.http_port)))
        half.sendall(b"GET /status HTTP/1.1\r\nHost:")
        began = time.monotonic()
        assert running.end(signum) == 0
        assert time.monotonic() - began < 8
        assert not segment(shm_name).exists()
        assert not Path(socket_path).exists()
        assert "Traceback" not in running.errors()


def test_a_request_that_has_arrived_is_answered_before_the_end() -> None:
    with running_server() as running, channel_to(running.address) as channel:
        hello(channel)
        stop_process(running.process.pid)
        futures = [channel.submit(m.Status(), CALL_SECONDS) for _ in range(16)]
        frames = 2 * ZMTP_HEADER + 8 + len(m.encode(m.Status()))
        wait_for(lambda: arrived(running.port) >= 16 * frames, what="all requests in the server's socket")
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGCONT)
        assert all(isinstance(future.result()[0], m.State) for future in futures)
        assert running.process.wait(20) == 0


# ---- several servers on one host


def test_a_stale_segment_of_a_killed_server_is_swept_and_a_live_one_s_is_not(
    shm_name: str, socket_path: str
) -> None:
    live, removed = f"{shm_name}-live", f"removed {segment(shm_name)}: its server is dead"
    with running_server("--shm-name", live) as alive, ExitStack() as stack:
        for _ in range(5):  # a server of a test that runs beside this one may sweep before ours
            with running_server("--shm-name", shm_name, "--shm-socket", socket_path) as dead:
                stack.enter_context(
                    mapped(dead.address)
                )  # a client that still maps the segment does not keep it
                assert dead.end(signal.SIGKILL) == -signal.SIGKILL
            assert Path(socket_path).exists()
            with running_server("--shm-socket", socket_path) as after:
                assert not segment(shm_name).exists()
                assert segment(live).exists()
                assert alive.get("/healthcheck")[0] == 200
                if removed in after.errors():
                    break
        else:
            raise AssertionError(f"no server of ours said in its log: {removed}")
        with running_server("--shm-name", shm_name):
            assert segment(shm_name).exists()
    assert not segment(live).exists()


def test_a_live_server_s_names_are_not_taken(shm_name: str, socket_path: str) -> None:
    flags = ("--l1-size-gb", "0.01", "--port", "0", "--http-port", "0")
    with running_server("--shm-name", shm_name, "--shm-socket", socket_path) as running:
        line = refused(run_cli("server", *flags, "--shm-name", shm_name), 3)
        assert f"{segment(shm_name)}: expected a free name" in line
        line = refused(run_cli("server", *flags, "--shm-socket", socket_path), 3)
        assert f"--shm-socket {socket_path}: cannot be bound (Address already in use)" in line
        assert segment(shm_name).exists()
        assert Path(socket_path).exists()
        with mapped(running.address):
            assert segment(shm_name).exists()


def held(address: str, tokens: list[int]) -> list[int]:
    """Chunks held, by namespace."""
    hashes = b"".join(chunk_hashes(tokens, Scope(chunk_size=256)))
    with channel_to(address) as channel:
        reply, _ = channel.call(m.Query(hashes=hashes), CALL_SECONDS)
    assert isinstance(reply, m.Holdings)
    return [row.chunks for row in reply.rows]


def test_two_servers_on_one_host_never_meet() -> None:
    with running_server() as one, running_server() as two:
        with Worker(one.address, [namespace()]) as first, Worker(two.address, [namespace()]) as second:
            assert first.store(TOKENS) == 3
            assert (held(one.address, TOKENS), held(two.address, TOKENS)) == ([3], [0])
            assert second.store(TOKENS[:256]) == 1
            assert (held(one.address, TOKENS), held(two.address, TOKENS)) == ([3], [1])
            assert first.welcome.epoch != second.welcome.epoch
            assert first.welcome.attach is not None
            assert second.welcome.attach is not None
            assert first.welcome.attach.socket != second.welcome.attach.socket
            with pytest.raises(RequestFailed) as caught:
                second.ask(m.Release(session=first.session, leases=[1]))
            assert caught.value.code == "unknown_session"
        assert one.end() == 0
        assert held(two.address, TOKENS) == [1]
