"""What workers and a real server promise each other when one of them is killed, stopped or started again."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.rig import QUICK, A, B, C, Rig, RigProcess, held, nothing_held, prompt
from helpers.server import RunningServer, dead_port, running_server, stop_process, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.transfer_context import engine_driven
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed, Unavailable

CHUNK = 32
PAGE = 16 << 10
PATHS = pytest.mark.parametrize("shm", ["require", "off"], ids=["shared memory", "frames"])
TIMEOUT = QUICK["control_timeout"]


@contextmanager
def a_server(*flags: str, l1_mib: float = 8) -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK), *flags, l1_gb=l1_mib / 1024) as server:
        yield server


def a_rig(server: RunningServer, engine: str = "engine", **settings: Any) -> Rig:
    return Rig(server.address, engine, **({"page_bytes": (PAGE, PAGE), "quick": True} | settings))


def a_process(server: RunningServer, engine: str = "engine", **settings: Any) -> RigProcess:
    return RigProcess(server.address, engine, **({"page_bytes": (PAGE, PAGE), "quick": True} | settings))


def seconds(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


# --------------------------------------------------------------------------------------------- killed clients


@PATHS
def test_a_worker_killed_in_a_store_publishes_nothing_and_its_memory_returns_at_once(shm: str) -> None:
    with a_server() as server, a_rig(server, "other", shm=shm) as other:
        with a_process(server, shm=shm) as victim:
            victim.pause_at_copy("store", prompt(), A)
            assert held(server).keys() == {"write_leases", "reserved_bytes"}
            assert other.lookup("r", prompt()) == 0
            other.end("r")
            victim.kill()
            wait_for(lambda: held(server) == {}, 10, "sooner than a silent session ends")
        assert server.state()["l1"]["used_bytes"] == 0
        assert server.state()["l1"]["stored"] == 0
        wait_for(lambda: {s["engine"] for s in server.state()["sessions"]} == {"other"})
        assert other.store(prompt(), A) == 5


def test_an_engine_killed_with_pins_and_loads_under_way_gives_them_back_at_once() -> None:
    with a_server() as server, a_rig(server, "other") as other:
        other.store(prompt(), A)
        with a_process(server) as victim:
            assert victim.call("lookup", "waiting", prompt()) == 5
            assert victim.call("lookup", "loading", prompt()) == 5
            victim.pause_at_copy("load", "loading", B)
            assert held(server) == {"read_leases": 2, "pinned_objects": 5, "requests": 2}
            victim.kill()
            wait_for(lambda: held(server) == {}, 10, "sooner than a silent session ends")
        assert other.fetch("r", prompt(), B) == 5


def test_a_worker_stopped_in_a_store_never_writes_to_another_object_s_memory() -> None:
    with (
        a_server("--session-timeout", "5", l1_mib=1) as server,
        a_rig(server, "other") as other,
        a_process(server, "maps", shm="require") as maps,
        a_process(server, "sends", shm="off") as sends,
    ):
        theirs = {maps: prompt(64, 100_000), sends: prompt(64, 200_000)}
        for sleeper, tokens in theirs.items():
            sleeper.pause_at_copy("store", tokens, A[:4])
            stop_process(sleeper.process.pid)

        def forgotten() -> bool:
            """The one without a mapping has lost its session; the other has been silent for as long."""
            return "sends" not in {s["engine"] for s in server.state()["sessions"]}

        wait_for(forgotten, 15)
        for i in range(1, 9):  # three times the pool
            other.store(prompt(160, i * 1000), A)
        assert server.state()["l1"]["evicted"] > 0
        stored = {}
        for sleeper in theirs:
            os.kill(sleeper.process.pid, signal.SIGCONT)
            stored[sleeper] = sleeper.go_on()
        assert stored == {maps: 2, sends: 0}, "through the mapping, the lease stayed its own"
        rights = [other.fetch(f"r{i}", prompt(160, i * 1000), B) for i in range(1, 9)]
        assert rights[-1] == 5
        for sleeper, tokens in theirs.items():
            assert other.fetch("r", tokens, C[:4]) == stored[sleeper]
        nothing_held(server)


# --------------------------------------------------------------------------------------------- killed servers


@pytest.mark.parametrize(
    ("shm", "how"),
    [("require", signal.SIGKILL), ("off", signal.SIGKILL), ("require", signal.SIGTERM)],
    ids=["mapped, killed", "in frames, killed", "mapped, told to end"],
)
def test_a_load_ends_right_or_reported_whenever_the_server_dies(shm: str, how: signal.Signals) -> None:
    with a_server() as server, a_process(server, shm=shm, pad=64) as engine:
        engine.call("store", prompt(), A)
        for request in ("in the copy", "before it"):
            assert engine.call("lookup", request, prompt()) == 5
        engine.pause_at_copy("load", "in the copy", B)
        server.process.send_signal(how)
        if how == signal.SIGKILL:
            server.process.wait(10)
        (delivered,) = engine.go_on()
        assert delivered == engine.call("holds", prompt(), B)
        assert delivered or shm == "off", "a copy under way has the pool for itself"
        server.process.wait(20)
        (delivered,) = engine.call("load", "before it", C)
        assert delivered == engine.call("holds", prompt(), C)
        assert engine.process.poll() is None, "no signal from memory that is gone"
        assert engine.call("store", prompt(160, 1000), A) == 0


def test_a_server_started_anew_serves_clients_that_were_not() -> None:
    with a_server() as first, a_rig(first, groups=2) as engine:
        port = str(first.port)
        engine.store(prompt(), A)
        assert engine.lookup("old", prompt()) == 5
        epochs = engine.epochs()
        first.end(signal.SIGKILL)
        with a_server("--port", port) as second:
            engine.wait_reopened(epochs, 5)
            assert engine.load("old", B) == [False], "slots of another epoch are refused"
            assert engine.spoilt(B)
            assert engine.lookup("new", prompt()) == 0
            assert engine.store(prompt(), A) == 10
            assert engine.fetch("warm", prompt(), C) == 5
            engine.end("old")
            engine.end("new")
            nothing_held(second)
            assert len(second.state()["sessions"]) == 2


def test_a_server_that_comes_after_its_clients_is_found() -> None:
    port = dead_port()
    with Rig(f"tcp://127.0.0.1:{port}", "early", quick=True, wait=0) as engine:
        assert engine.workers[0].store([]) == 0
        wait_for(lambda: all("no connection" in reason for reason in engine.reasons()), 5)
        with a_server("--port", str(port)):
            engine.wait_up(5)
            assert engine.store(prompt(), A) == 5
            assert engine.fetch("r", prompt(), B) == 5


def test_a_named_pool_s_server_starts_again_under_its_name_while_clients_still_map_the_old_one() -> None:
    name = f"test_{secrets.token_hex(6)}"
    with a_server("--shm-name", name) as first, a_rig(first) as engine:
        assert engine.paths() == ["shared_memory"]
        epochs = engine.epochs()
        first.end(signal.SIGKILL)
        with a_server("--shm-name", name, "--port", str(first.port)):
            engine.wait_reopened(epochs, 5)
            engine.store(prompt(), A)
            assert engine.fetch("r", prompt(), B) == 5


def test_a_dead_server_s_pool_is_let_go_so_that_its_memory_is_there_for_the_next() -> None:
    def pools_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lmcache-l1")

    gc.collect()  # whatever earlier tests left
    before = pools_mapped()
    with a_server() as server, a_rig(server) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        assert pools_mapped() == before + 1
        server.end(signal.SIGKILL)
        wait_for(lambda: pools_mapped() == before, 5, "no engine keeps the dead server's memory")
        assert engine.load("r", B) == [False]
        assert engine.store(prompt(), A) == 0
    with a_server() as server:
        engine = a_rig(server)
        assert pools_mapped() == before + 1
        engine.close()
        assert pools_mapped() == before, "nor does one that was closed"


# -------------------------------------------------------------------------------------------- stopped servers


@contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    stop_process(server.pid)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_stopped_server_costs_one_time_out_and_then_nothing() -> None:
    with a_server() as server, a_rig(server) as engine:
        engine.store(prompt(), A)
        with stopped(server):

            def lookup() -> None:
                with pytest.raises(Unavailable):
                    engine.lookup("r", prompt())

            assert seconds(lookup) < 5 * TIMEOUT
            assert seconds(lambda: [lookup() for _ in range(100)]) < 5 * TIMEOUT
            assert seconds(lambda: engine.store(prompt(160, 1000), A)) < 5 * TIMEOUT
            assert seconds(lambda: [engine.store(prompt(160, 1000), A) for _ in range(20)]) < 5 * TIMEOUT
        engine.end("r")
        engine.wait_up(5)
        nothing_held(server)
        assert engine.fetch("r", prompt(), B) == 5


@PATHS
def test_after_a_stop_all_leases_are_given_back_even_those_whose_answer_was_lost(shm: str) -> None:
    with a_server() as server, a_rig(server, shm=shm) as engine:
        engine.store(prompt(), A)
        sessions = [client.session for client in engine.clients]
        for request in ("ends during it", "loads during it"):
            assert engine.lookup(request, prompt()) == 5
        with stopped(server):
            engine.end("ends during it")  # sent, and maybe never read
            with pytest.raises(Unavailable):
                engine.lookup("answer lost", prompt())
            engine.end("answer lost")
            assert engine.load("loads during it", B) == [shm == "require"]
            engine.end("loads during it")  # while no call is let through
            assert engine.store(prompt(160, 1000), A) == 0
        engine.wait_up(5)
        assert [client.session for client in engine.clients] == sessions, "the sessions stand"
        nothing_held(server)
        assert engine.fetch("r", prompt(), C) == 5


def test_a_load_through_the_mapping_needs_no_answer_from_the_server() -> None:
    with a_server() as server, a_rig(server) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        with stopped(server):
            assert engine.load("r", B) == [True]
            assert engine.holds(prompt(), B)
        engine.end("r")
        nothing_held(server)


@PATHS
def test_a_copy_that_the_device_fails_leaves_nothing_held(shm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error goes on to whoever knows the device; the server's memory does not go with it."""

    def out_of_memory(*copy: Any) -> None:
        raise RuntimeError("device: out of memory")

    with a_server() as server, a_rig(server, shm=shm) as engine:
        for fault in (engine.store, lambda *prompt_and_blocks: engine.load("r", B)):
            if fault != engine.store:
                assert engine.store(prompt(), A) == 5
                assert engine.lookup("r", prompt()) == 5
            with monkeypatch.context() as patch:
                patch.setattr(engine_driven, "copy_pages", out_of_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    fault(prompt(), A)
        engine.end("r")
        nothing_held(server)
        assert engine.fetch("again", prompt(), B) == 5


@pytest.mark.parametrize("kind", ["lookup", "reserve"])
def test_a_lease_given_back_before_its_request_is_read_is_never_granted(kind: str) -> None:
    with a_server() as server, a_rig(server) as engine:
        engine.store(prompt(), A)
        client = engine.scheduler if kind == "lookup" else engine.workers[0].client
        assert client is not None
        lease, hashes = client.new_lease(), b"".join(chunk_hashes(prompt(), Scope(chunk_size=CHUNK)))
        given_back: Any = (m.Release if kind == "lookup" else m.Abort)(session=client.session, leases=[lease])
        client.call(given_back)
        request: m.Request = m.Reserve(session=client.session, lease=lease, hashes=[bytes(32)])
        if kind == "lookup":
            request = m.Lookup(session=client.session, request="r", lease=lease, hashes=hashes)
        with pytest.raises(RequestFailed) as refused:
            client.call(request)
        assert refused.value.code == "lease_gone"
        nothing_held(server)
