"""Pushes by NIXL (UCX, host memory) from host to host: whole, bounded in time, and nothing taken by the dead."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.netns import Host, two_hosts
from helpers.push_rounds import adapter_on, check_all, idle, kill_pushers, kill_receivers, pushing
from helpers.pusher import key_of, payload_of, put_of
from helpers.server import RunningServer, refused, run_cli, running_server, stop_process, wait_for
from lmcache.v1.multiprocess.peer.nixl import missing
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, Want
from lmcache.v1.storage.l2.envelope import ObjectInfo, check, checksum, pack

if why := missing():
    pytest.skip(f"tests of NIXL: {why}", allow_module_level=True)

PORT = 5555
ROUNDS = int(os.environ.get("LMCACHE_KILL_ROUNDS", "8"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(l1_gb=0.25) as server:
        yield server


def pool_objects(tag: str, sizes: list[int]) -> tuple[list[Put], mmap.mmap]:
    """Objects in a buffer such as a pool."""
    pool = mmap.mmap(-1, 64 << 20)
    view, at, puts = memoryview(pool), 4096, []
    for number, size in enumerate(sizes):
        view[at : at + size] = payload_of((tag, number), size)
        payload = view[at : at + size]
        info = ObjectInfo(key_of((tag, number)), size, checksum(payload))
        puts.append(Put(info.key, pack(info), payload))
        at += size
    return puts, pool


def test_what_is_pushed_by_nixl_is_there_byte_for_byte(server: RunningServer) -> None:
    before = server.metrics()["lmcache_mp_frame_written_bytes_total"]
    with adapter_on(server.address, transport="nixl") as adapter:
        puts, _ = pool_objects("pool", [1, 4095, 4097, 1 << 20, 9 << 20])
        lone = [put_of(("lone", n), size) for n, size in enumerate((1, 5000, 2 << 20))]  # read-only bytes
        for batch in (puts, lone):
            assert adapter.store(batch, Call(20)) == [True] * len(batch)
            wants = [Want(put.key, memoryview(bytearray(len(put.payload)))) for put in batch]
            for put, want, header in zip(batch, wants, adapter.load(wants, Call(20)), strict=True):
                assert header is not None
                check(header, put.key, want.payload)
                assert want.payload == put.payload
        assert "nixl" in adapter.describe()
        assert server.state()["peers"]["transport"] == "nixl"
    assert server.metrics()["lmcache_mp_frame_written_bytes_total"] == before
    idle(server)


def test_a_server_that_has_used_nixl_ends_as_any_other() -> None:
    with running_server(l1_gb=0.05) as server:
        with adapter_on(server.address, transport="nixl") as adapter:
            assert adapter.store([put_of("a")], Call(20)) == [True]
        assert server.end(signal.SIGTERM) == 0
        assert "NIXL INFO" not in server.errors()


def test_an_idle_server_spends_no_time_on_nixl(server: RunningServer) -> None:
    with adapter_on(server.address, transport="nixl") as adapter:
        assert adapter.store([put_of("idle")], Call(20)) == [True]
        idle(server)
        time.sleep(1.0)  # after that it is idle

        def spent() -> float:
            with open(f"/proc/{server.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        began, before = time.monotonic(), spent()
        time.sleep(2.0)
        assert spent() - before < 0.25 * (time.monotonic() - began)


def test_a_server_may_keep_writers_out_of_its_memory() -> None:
    with running_server("--peer-transport", "frames") as server:
        with adapter_on(server.address, transport="nixl") as adapter:
            with pytest.raises(AdapterError, match="--peer-transport frames"):
                adapter.store([put_of("a")], Call(20))
        with adapter_on(server.address, transport="auto") as adapter:
            assert adapter.store([put_of("a")], Call(20)) == [True]
            assert "frames" in adapter.describe()


def test_a_peer_without_nixl_is_an_error_only_where_nixl_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer whose environment has the same packages but NIXL."""
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if 'nixl' in n else f(n, *a)"
    line = f"import sys; {hide}; from lmcache.cli.main import main; sys.exit(main())"
    monkeypatch.setattr("helpers.server.COMMAND", (sys.executable, "-c", line))
    with running_server() as server:
        with adapter_on(server.address, transport="nixl") as adapter:
            with pytest.raises(AdapterError, match=r"on the peer: .*pip install .*nixl"):
                adapter.store([put_of("a")], Call(20))
        with adapter_on(server.address, transport="auto") as adapter:
            assert adapter.store([put_of("a")], Call(20)) == [True]


@pytest.mark.slow
def test_a_stopped_pusher_keeps_what_it_may_write_to_until_it_dies(hosts: tuple[Host, Host]) -> None:
    flags = ("--session-timeout", "5")
    with hosts[1].server(*flags, l1_gb=0.5, port=PORT) as server:
        with pushing(hosts[0], f"{hosts[1].far}:{PORT}", "nixl", "stopped") as process:
            for _ in range(20):  # until it is met with a lease open
                stop_process(process.pid)
                if server.state()["peers"]["open"]:
                    break
                process.send_signal(signal.SIGCONT)
                time.sleep(0.013)
            held = server.state()["peers"]
            assert held["open"], "never met in the middle of a push"
            end = time.monotonic() + 7  # longer than a session may be silent
            while time.monotonic() < end:
                assert server.state()["peers"]["open"] == held["open"]
                time.sleep(0.5)
        idle(server)
        with adapter_on(server.address) as reader:
            assert check_all(reader, "stopped") >= 3


def test_a_stopped_receiver_costs_a_pusher_no_more_than_its_deadline(hosts: tuple[Host, Host]) -> None:
    with hosts[1].server(l1_gb=0.25, port=PORT) as server:
        address = f"{hosts[1].near}:{PORT}"
        with adapter_on(address, transport="nixl", timeout_seconds=1.0) as adapter:
            assert adapter.store([put_of("first", 1 << 20)], Call(20)) == [True]
            stop_process(server.pid)
            began = time.monotonic()
            with pytest.raises(AdapterError):
                adapter.store([put_of("second", 1 << 20)], Call(2))
            assert time.monotonic() - began < 6
            server.process.send_signal(signal.SIGCONT)
            wait_for(lambda: adapter.store([put_of("second", 1 << 20)], Call(5)) == [True], 20)
            idle(server)


@pytest.mark.slow
def test_a_pusher_by_nixl_that_is_killed_leaves_nothing_phantom_wrong_or_taken(
    hosts: tuple[Host, Host],
) -> None:
    with hosts[1].server(l1_gb=0.5, port=PORT) as server:
        kill_pushers(hosts, server, PORT, "nixl", ROUNDS)


@pytest.mark.slow
def test_a_receiver_by_nixl_that_is_killed_is_found_again(hosts: tuple[Host, Host]) -> None:
    kill_receivers(hosts[1], PORT, "nixl", ROUNDS // 4, lambda: hosts[1].server(l1_gb=0.5, port=PORT))


def test_a_server_pushes_what_is_committed_to_it_by_nixl(hosts: tuple[Host, Host]) -> None:
    """The tier reads from the shared pool itself."""
    options: dict[str, Any] = {"type": "peer", "address": f"{hosts[1].far}:{PORT}", "transport": "nixl"}
    with hosts[1].server(port=PORT) as decode:
        with hosts[0].server("--l2-adapter", json.dumps(options)) as prefill:
            with adapter_on(prefill.address) as source:  # by another peer's push to it
                puts = [put_of(("through", n), 300_000) for n in range(8)]
                assert source.store(puts, Call(20)) == [True] * 8
            with adapter_on(decode.address) as reader:
                keys = [put.key for put in puts]
                wait_for(lambda: all(reader.contains(keys, Call(5))), 20)
                wants = [Want(put.key, memoryview(bytearray(300_000))) for put in puts]
                assert all(reader.load(wants, Call(5)))
                assert [bytes(want.payload) for want in wants] == [bytes(put.payload) for put in puts]
            assert decode.metrics()["lmcache_mp_frame_written_bytes_total"] == 0
            assert prefill.end() == 0


def test_asking_for_nixl_where_it_cannot_load_is_one_line() -> None:
    line = (
        "import importlib as i, sys; f = i.import_module\n"
        "def no(n, *a):\n"
        "    if 'nixl' in n and 'lmcache' not in n: raise ImportError('libucp.so.0: no such file')\n"
        "    return f(n, *a)\n"
        "i.import_module = no\n"
        "from lmcache.cli.main import main; sys.exit(main())"
    )
    options = json.dumps({"type": "peer", "address": "127.0.0.1", "transport": "nixl"})
    done = subprocess.run(
        [sys.executable, "-c", line, "server", "--l1-size-gb", "0.01", "--l2-adapter", options],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "libucp.so.0" in refused(done, 3)
    assert run_cli("--help").returncode == 0
