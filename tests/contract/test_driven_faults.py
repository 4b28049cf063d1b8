"""lmcache-driven mode when a worker or the server is killed, stopped or started again: no leak, no stale page."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helpers.driven import a_process, a_rig, a_server, descriptors, kv_mappings, paths, stopped
from helpers.peer import check_nothing_left, segments
from helpers.rig import A, B, C, Rig, held, nothing_held, prompt
from helpers.server import RunningServer, wait_for
from lmcache.v1.multiprocess.transfer_context import lmcache_driven
from lmcache.v1.multiprocess.transfer_context.worker_transfer import PagesUnsafe
from lmcache.v1.protocol.channel import Unavailable

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EVENTS = "/memfd:lmcache-events (deleted)"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One that every test leaves as it was: whatever died, nothing of it stays."""
    with a_server() as running:
        with a_rig(running, "first") as first:  # torch is imported, all is warm
            first.store(prompt(), A)
            first.fetch("r", prompt(), B)
        yield running
        assert "Traceback" not in running.errors()
        assert running.end() == 0


@pytest.fixture(autouse=True)
def _no_name_is_left() -> Iterator[None]:
    before = segments()
    yield
    check_nothing_left(before)


# ----------------------------------------------------------------------------------------------- killed workers


@pytest.mark.parametrize(
    ("point", "method"), [("ask", "store"), ("answer", "store"), ("ask", "load"), ("", "idle")]
)
def test_of_a_killed_worker_the_server_keeps_neither_lease_nor_mapping_nor_descriptor(
    server: RunningServer, point: str, method: str
) -> None:
    with a_rig(server, "other", model=f"{point} {method}") as other:
        other.store(prompt(), A)
        nothing_held(server)
        fds, maps = descriptors(server.pid), kv_mappings(server.pid)
        stored = server.state()["l1"]["stored"]
        with a_process(server, "victim", model=f"{point} {method}") as victim:
            assert kv_mappings(server.pid) == maps + 2
            if method == "load":
                assert victim.call("lookup", "r", prompt()) == 5
                victim.pause_at(point, "load", "r", B)
                assert held(server)["read_leases"] == 1
            elif method == "store":
                victim.pause_at(point, "store", prompt(160, 1000), A)
            victim.kill()
            wait_for(lambda: held(server) == {}, 5, "leases and pins given back")
            wait_for(lambda: kv_mappings(server.pid) == maps, 5, "its memory is unmapped")
        assert server.state()["l1"]["stored"] == stored, "what nobody committed is not published"
        assert other.lookup("r", prompt(160, 1000)) == 0
        other.end("r")
        assert other.fetch("next", prompt(), C) == 5
        with a_rig(server, "victim", model=f"{point} {method}") as again:
            assert again.fetch("r", prompt(), B) == 5
    wait_for(lambda: kv_mappings(server.pid) == maps - 2, 5)
    left = descriptors(server.pid) - fds - Counter({EVENTS: 1})
    assert not left, "all but a page of its events, which goes when the next process brings one"


def test_a_store_whose_worker_gives_up_before_the_commit_is_not_published(server: RunningServer) -> None:
    with a_rig(server, model="given up") as engine:
        worker = engine.workers[0]

        def lose(handle: bytes) -> None:
            raise lmcache_driven.LMCacheError("the event cannot be had")

        worker._wait = lose  # type: ignore[attr-defined]
        assert engine.store(prompt(), A) == 0
        del worker._wait  # type: ignore[attr-defined]
        nothing_held(server)
        assert engine.lookup("r", prompt()) == 0
        engine.end("r")
        assert engine.store(prompt(), A) == 5
        assert engine.fetch("r", prompt(), B) == 5


def test_a_worker_that_dies_while_its_memory_is_being_mapped_leaves_nothing(server: RunningServer) -> None:
    fds = descriptors(server.pid)
    for _ in range(3):
        with a_process(server, "early", wait=0) as victim:
            time.sleep(0.05)
            victim.kill()
    wait_for(lambda: kv_mappings(server.pid) == 0, 5)
    wait_for(lambda: server.state()["sessions"] == [], 5)
    wait_for(lambda: descriptors(server.pid) == fds, 5, f"{descriptors(server.pid)} {fds}")


# ---------------------------------------------------------------------------------------------- a stopped server


def test_a_load_that_a_stopped_server_does_not_answer_is_fenced_and_the_engine_lives(
    server: RunningServer,
) -> None:
    with a_rig(server, model="late") as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        with stopped(server):
            threading.Timer(3.0, lambda: os.kill(server.pid, signal.SIGCONT)).start()
            began = time.monotonic()
            assert engine.load("r", B) == [False], "reported, and the server has said that it writes no more"
            assert 2.5 < time.monotonic() - began < 10
        whole = [engine.memories[0][0].read(layer, block) for layer in (0, 1) for block in B]
        engine.end("r")
        engine.wait_up()
        nothing_held(server)
        assert [engine.memories[0][0].read(layer, block) for layer in (0, 1) for block in B] == whole
        assert engine.fetch("again", prompt(), C) == 5


def test_only_a_server_that_neither_answers_nor_dies_makes_pages_unsafe(server: RunningServer) -> None:
    with a_rig(server, model="mute", limits={"fence_timeout": 2.0}) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        with stopped(server):
            began = time.monotonic()
            with pytest.raises(
                PagesUnsafe, match=r"for 2 s it does not answer and is not dead.*restart this engine"
            ):
                engine.load("r", B)
            assert 2 < time.monotonic() - began < 8
        engine.end("r")
        engine.wait_up()
        nothing_held(server)
        assert engine.spoilt(B) or engine.holds(prompt(), B), (
            "in this very test it has written, or it has not"
        )


def test_a_load_that_was_never_sent_needs_no_fence(server: RunningServer) -> None:
    with a_rig(server, model="unsent", limits={"fence_timeout": 30.0}) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("one", prompt()) == 5
        with stopped(server):
            client = engine.workers[0].client
            with pytest.raises(Unavailable):
                client.call(lmcache_driven.m.Ping(session=client.session))
            began = time.monotonic()
            assert engine.load("one", B) == [False]
            assert time.monotonic() - began < 10, "sooner than any fence"
        engine.end("one")
        engine.wait_up()
        nothing_held(server)


def test_of_a_store_that_a_stopped_server_did_not_see_through_only_what_is_right_is_published(
    server: RunningServer,
) -> None:
    with a_process(server, model="stopped") as engine, a_rig(server, "other", model="stopped") as other:
        for point, tokens in (("ask", prompt()), ("answer", prompt(160, 1000))):
            engine.pause_at(point, "store", tokens, A)
            with stopped(server):
                assert engine.go_on() == 0
                # The engine goes on, and what it stored from is another prompt's soon.
                engine.call("compute", prompt(160, 9000), A)
            wait_for(lambda: engine.call("up"), 10)
            other.wait_up()
            nothing_held(server)
            # Before the worker's word that the pages were kept nothing is published; after it they were right.
            assert other.fetch(point, tokens, B) in ([0] if point == "ask" else [0, 5])
            engine.call("store", tokens, A)
            assert other.fetch(f"{point} again", tokens, B) == 5


# ------------------------------------------------------------------------------------------ a server that ends


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_a_worker_registers_again_by_itself_and_what_was_before_is_refused(how: signal.Signals) -> None:
    with a_server() as first, a_rig(first, model="again", groups=2) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("old", prompt()) == 5
        epochs = engine.epochs()
        began = time.monotonic()
        assert first.end(how) == (0 if how == signal.SIGTERM else -9)
        assert time.monotonic() - began < 8
        assert engine.load("old", B) == [False], "a dead server needs no fence"
        assert time.monotonic() - began < 8
        assert engine.spoilt(B)
        assert engine.store(prompt(), A) == 0
        with a_server("--port", str(first.port)) as second:
            engine.wait_reopened(epochs, 30)
            assert paths(second) == ["device"]
            assert kv_mappings(second.pid) == 4
            assert engine.lookup("old 2", prompt()) == 0
            assert engine.store(prompt(), A) == 10
            assert engine.fetch("new", prompt(), C) == 5
            engine.end("old")
            engine.end("old 2")
            nothing_held(second)
            engine.close()
            wait_for(lambda: kv_mappings(second.pid) == 0, 5)


def test_a_server_killed_in_the_middle_costs_the_transfer_only() -> None:
    with ExitStack() as running:
        server = running.enter_context(a_server())
        engine = running.enter_context(a_process(server, model="middle"))
        for point, method in (("ask", "store"), ("answer", "store"), ("ask", "load")):
            engine.call("store", prompt(), A)
            if method == "load":
                assert engine.call("lookup", "r", prompt()) == 5
                engine.pause_at(point, "load", "r", B)
            else:
                engine.pause_at(point, "store", prompt(160, 1000), A)
            server.end(signal.SIGKILL)
            assert engine.go_on() in (0, [False])
            if method == "load":
                assert engine.call("spoilt", B)
            server = running.enter_context(a_server("--port", str(server.port)))
            wait_for(lambda s=server: paths(s) == ["device"], 30)
            engine.call("wait_up", 30)
            assert engine.call("store", prompt(), A) == 5
            assert engine.call("fetch", "next", prompt(), C) == 5


def test_a_server_that_dies_while_it_maps_the_memory_is_given_up_at_once() -> None:
    """Its first mapping imports torch, which takes long enough to be hit in the middle."""
    with a_server() as first, a_rig(first, wait=0) as engine:
        wait_for(lambda: any(s["role"] == "worker" for s in first.state()["sessions"]), 10)
        first.end(signal.SIGKILL)
        worker = engine.workers[0].client
        wait_for(lambda: "ended" in worker.reason or "no connection" in worker.reason, 5, worker.reason)
        with a_server("--port", str(first.port)):
            engine.wait_up(30)
            assert engine.store(prompt(), A) == 5


def test_closing_a_worker_whose_server_does_not_answer_is_quick() -> None:
    with a_server() as server:
        engine: Rig = a_rig(server, wait=0)
        wait_for(lambda: any(s["role"] == "worker" for s in server.state()["sessions"]), 10)
        with stopped(server):
            began = time.monotonic()
            engine.close()
            assert time.monotonic() - began < 8
