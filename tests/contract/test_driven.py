"""lmcache-driven mode at a real server while nothing dies: the same bytes, the same objects, checked capabilities."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from helpers.driven import CHUNK, DRIVEN, a_process, a_rig, a_server, kv_mappings, paths
from helpers.rig import NULL_BLOCK, A, B, C, Rig, held, prompt
from helpers.server import RunningServer, dead_port, run_cli, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    LMCacheDrivenTransferContext,
    StoreItem,
    create_transfer_context,
)
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.platform.cpu import CpuDeviceSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

NAMES = (f"engine-{i}" for i in itertools.count())
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    with a_server() as server:
        yield server
        assert "Traceback" not in server.errors()
        assert server.end() == 0


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """A server on which a test leaves nothing: no lease, no pin, no mapping."""
    yield shared_server
    wait_for(lambda: held(shared_server) == {}, 10, f"all given back: {held(shared_server)}")
    wait_for(lambda: kv_mappings(shared_server.pid) == 0, 10, "nothing mapped")


def rig(server: RunningServer, **settings: Any) -> Rig:
    """An engine of its own model unless one is given."""
    name = next(NAMES)
    return a_rig(server, name, **({"model": name} | settings))


# ---------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("pad", [0, 128], ids=["tight", "padded"])
@pytest.mark.parametrize("groups", [1, 3], ids=["one group", "three groups"])
@pytest.mark.parametrize(
    "pages", [(256, 256), (256, 384, 384, 256)], ids=["equal pages", "pages of two sizes"]
)
def test_what_one_mode_stores_the_other_loads_byte_for_byte(
    server: RunningServer, pad: int, groups: int, pages: tuple[int, ...]
) -> None:
    shape: dict[str, Any] = {
        "groups": groups,
        "pad": pad,
        "page_bytes": pages,
        "model": f"{pad} {groups} {pages}",
    }
    with rig(server, **shape) as driven, rig(server, mode="engine_driven", **shape) as engine:
        assert paths(server) == ["device", "shared_memory"]
        assert driven.paths() == ["device"]
        assert kv_mappings(server.pid) == groups * len(pages)
        assert driven.store(prompt(), A) == 5 * groups
        scattered = [33, 22, 23, 24, 50, 49, 48, 60, 20, 61]
        assert engine.fetch("r", prompt(), scattered) == 5
        assert engine.store(prompt(160, 1000), A) == 5 * groups
        assert driven.fetch("r", prompt(160, 1000), scattered) == 5
        assert driven.fetch("own", prompt(), C) == 5
        assert driven.store(prompt(), A) == 0, "it is there already"
        assert driven.spoilt(sorted(set(range(64)) - {*A, *scattered, *C}))
        memories = [memory for mine in (driven, engine) for rank in mine.memories.values() for memory in rank]
        assert all(memory.padding_is_untouched() for memory in memories)


def test_the_objects_of_both_modes_are_the_same_bytes() -> None:
    stored = []
    for mode in (DRIVEN, "engine_driven"):
        with a_server() as server, rig(server, mode=mode, model="same", groups=2) as engine:
            assert engine.store(prompt(), A) == 10
            with rig(server, mode="engine_driven", model="same", groups=2, shm="off") as reader:
                assert reader.fetch("r", prompt(), B) == 5
                stored.append(
                    [m.read(layer, block) for m in reader.memories[0] for layer in (0, 1) for block in B]
                )
    assert stored[0] == stored[1]


def test_more_chunks_than_the_staging_holds_and_skips_at_every_block(server: RunningServer) -> None:
    with rig(server, num_blocks=128) as engine:
        tokens, source, target = prompt(16 * 30), list(range(1, 31)), list(range(60, 90))
        assert engine.store(tokens, source) == 15
        for skip in (0, 1, 2, 7, 8, 9, 29, 30):
            engine.memories[0][0].spoil(target)
            assert engine.lookup(f"skip {skip}", tokens) == 15
            assert engine.load(f"skip {skip}", target, skip=skip) == [True]
            assert engine.spoilt(target[:skip])
            assert engine.holds(tokens, target[skip:], first=skip)
            engine.end(f"skip {skip}")


def test_null_blocks_before_the_first_page_are_not_written_and_later_ones_refuse_the_load(
    server: RunningServer,
) -> None:
    with rig(server) as engine:
        engine.store(prompt(), A)
        assert engine.lookup("r", prompt()) == 5
        assert engine.load("r", [NULL_BLOCK] * 3 + B[3:]) == [True]
        assert engine.spoilt([NULL_BLOCK, *B[:3]])
        assert engine.holds(prompt(), B[3:], first=3)
        assert engine.lookup("middle", prompt()) == 5
        assert engine.load("middle", [*C[:5], NULL_BLOCK, *C[6:]]) == [False]
        assert engine.spoilt([NULL_BLOCK, *C])
        engine.compute(prompt(160, 500), A)
        assert engine.store(prompt(160, 500), [*A[:5], NULL_BLOCK, *A[6:]]) == 4, (
            "a chunk with a hole is no chunk"
        )
        engine.end("r")
        engine.end("middle")


def test_two_ranks_in_processes_of_their_own_hit_together(server: RunningServer) -> None:
    shape: dict[str, Any] = {"ranks": 2, "groups": 2, "model": "pair", "wait": 0}
    with (
        a_process(server, "pair", only=0, **shape) as zero,
        a_process(server, "pair", only=1, scheduler=False, **shape) as one,
    ):
        for rank in (zero, one):
            rank.call("wait_up", 60)
        assert paths(server) == ["device", "device"]
        assert zero.call("store", prompt(), A) == 10
        assert zero.call("lookup", "half", prompt()) == 0
        assert one.call("store", prompt(100), A[:6]) == 6
        with rig(server, ranks=2, groups=2, model="pair") as both:
            assert both.fetch("r", prompt(), B[:6]) == 3
            assert both.store(prompt(), A, rank=1) == 4
            assert both.fetch("again", prompt(), C) == 5
        zero.call("end", "half")
        for rank in (zero, one):
            rank.close()


def test_two_workers_of_one_rank_and_one_that_registers_twice(server: RunningServer) -> None:
    with rig(server, model="twins") as first:
        name = first.workers[0].client._hello.engine
        with a_rig(server, name, model="twins", scheduler=False) as second:
            assert paths(server) == ["device", "device"]
            assert kv_mappings(server.pid) == 4
            assert second.store(prompt(), A) == 5
            assert first.fetch("r", prompt(), B) == 5
        wait_for(lambda: kv_mappings(server.pid) == 2, 5, "the second one's memory is unmapped")
        assert first.fetch("still", prompt(), C) == 5
        client = first.workers[0].client
        before = kv_mappings(server.pid)
        for _ in range(3):
            first.workers[0]._announce(client, [group.namespace for group in first.workers[0].groups])
        wait_for(lambda: kv_mappings(server.pid) == before, 5, "one mapping each, as before")
        first.memories[0][0].spoil(B)
        assert first.fetch("after", prompt(), B) == 5
        assert len(paths(server)) == 1


def test_an_operator_sees_who_is_driven_and_what_the_server_moved(server: RunningServer) -> None:
    before = server.metrics()
    with rig(server, groups=2) as engine:
        assert engine.store(prompt(), A) == 10
        assert engine.fetch("r", prompt(), B) == 5
        told = run_cli("describe", "--host", server.address).stdout
        (row,) = [line for line in told.splitlines() if line.startswith("worker")]
        assert row.split()[3] == "device"
        assert "engine_driven, lmcache_driven" in told
    after = server.metrics()
    moved = {name: after[name] - before[name] for name in after if "device_" in name and "_total" in name}
    assert moved == {
        "lmcache_mp_device_stored_objects_total": 10,
        "lmcache_mp_device_loaded_objects_total": 10,
    }
    assert after["lmcache_mp_l1_write_chunks_total"] - before["lmcache_mp_l1_write_chunks_total"] == 10


def test_a_closed_worker_is_unmapped_and_its_objects_stay(server: RunningServer) -> None:
    with rig(server, model="gone") as engine:
        assert engine.store(prompt(), A) == 5
        assert kv_mappings(server.pid) == 2
    wait_for(lambda: kv_mappings(server.pid) == 0, 5)
    with rig(server, model="gone") as engine:
        assert engine.fetch("r", prompt(), B) == 5


# --------------------------------------------------------------------------------------- what a device must have


def context(mode: str, address: str = NOWHERE, device: str = "cpu") -> Any:
    from helpers.pages import PageMemory, layout

    pages = PageMemory(layout(), 8, tensors=True).pages
    pages.device = device
    return create_transfer_context(mode, address, "engine", [pages])


class _Ops:
    """A device without stream-ordered completion."""


@pytest.mark.parametrize(
    ("member", "without"),
    [
        ("ipc_wrapper_cls", property(lambda self: None)),
        ("event_ipc_backend", property(lambda self: None)),
        ("create_cache_context", None),
        ("record_completion_on_stream", None),
    ],
)
def test_a_device_that_lacks_something_is_refused_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, member: str, without: Any
) -> None:
    from lmcache.v1.platform.base.device_spec import DeviceSpec

    if member == "record_completion_on_stream":
        monkeypatch.setattr(CpuDeviceSpec, "get_ops", lambda self: _Ops())
    elif member == "create_cache_context":
        monkeypatch.setattr(CpuDeviceSpec, member, DeviceSpec.create_cache_context)
    else:
        monkeypatch.setattr(CpuDeviceSpec, member, without)
    with pytest.raises(
        ValueError, match=f"platform capability checks failed for cpu: {member}; use engine_driven"
    ):
        context(DRIVEN)
    assert isinstance(context("auto"), EngineDrivenTransferContext)


def test_all_that_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for member in ("ipc_wrapper_cls", "event_ipc_backend"):
        monkeypatch.setattr(CpuDeviceSpec, member, property(lambda self: None))
    with pytest.raises(ValueError, match="ipc_wrapper_cls, event_ipc_backend; use"):
        context(DRIVEN)


def test_a_device_type_that_nobody_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="no single backend serves device type 'nosuch'"):
        context(DRIVEN, device="nosuch")


def test_a_spec_that_says_no_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDeviceSpec, "is_lmcache_driven_available", lambda self: False)
    with pytest.raises(ValueError, match=r"is_lmcache_driven_available\(\) is False"):
        context(DRIVEN)


# ------------------------------------------------------------------------------------------------- the choice


def test_auto_asks_the_spec_and_the_server(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmcache.logging._said", set(), raising=False)
    assert isinstance(context("auto", server.address), EngineDrivenTransferContext), "the CPU's own answer"
    monkeypatch.setattr(CpuDeviceSpec, "default_mp_transfer_mode", lambda self: MPTransferMode.LMCACHE_DRIVEN)
    assert isinstance(context("auto", server.address), LMCacheDrivenTransferContext)
    assert isinstance(context("auto", f"tcp://127.0.0.1:{dead_port()}"), LMCacheDrivenTransferContext)
    with a_server("--supported-transfer-mode", "engine_driven") as old:
        with caplog.at_level(logging.INFO, "lmcache"):
            for _ in range(2):
                assert isinstance(context("auto", old.address), EngineDrivenTransferContext)
    said = [r.getMessage() for r in caplog.records if "serves engine_driven only" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("transfer mode auto is engine_driven on cpu")


def test_at_a_server_that_does_not_serve_the_mode_there_is_no_session_and_the_reason_says_so() -> None:
    with a_server("--supported-transfer-mode", "engine_driven") as server, rig(server, wait=0) as engine:
        client = engine.workers[0].client
        wait_for(lambda: "--supported-transfer-mode" in client.reason, 5)
        assert client.reason.startswith("transfer mode lmcache_driven: the server serves engine_driven only")
        assert not client.up
        assert engine.paths() == ["down"]
        assert engine.store(prompt(), A) == 0, "the engine runs uncached"
    with a_server("--supported-transfer-mode", DRIVEN) as server:
        with rig(server, mode="engine_driven", wait=0) as engine:
            client = engine.workers[0].client
            wait_for(lambda: "this server serves lmcache_driven only" in client.reason, 5)
        with rig(server) as engine:
            assert engine.store(prompt(), A) == 5


def test_a_server_that_hands_out_no_socket_is_refused_by_name() -> None:
    with a_server("--shm", "off") as server, rig(server, wait=0) as engine:
        client = engine.workers[0].client
        wait_for(lambda: "--shm off" in client.reason, 5)
        assert not client.up
        assert engine.store(prompt(), A) == 0


def test_a_server_without_torch_offers_engine_driven_and_refuses_the_other_in_one_line(tmp_path: Any) -> None:
    # As if torch were not installed: a finder before all others that knows nothing of it.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_cli(
        "server",
        "--l1-size-gb",
        "0.01",
        "--supported-transfer-mode",
        DRIVEN,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 3
    assert "--supported-transfer-mode lmcache_driven: needs torch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with a_server() as server, rig(server, wait=0) as engine:
            wait_for(lambda: "serves engine_driven only" in engine.workers[0].client.reason, 5)


def test_pages_that_move_are_refused(server: RunningServer) -> None:
    with rig(server) as engine:
        worker = engine.workers[0]
        hashes = chunk_hashes(prompt(), Scope(chunk_size=CHUNK))
        item = StoreItem(CHUNK, hashes, [A])
        assert worker.store([item], [replace(group) for group in worker.groups]) == 0
        assert worker.counters.dropped_stores == 5
        assert worker.store([item], worker.groups) == 5
