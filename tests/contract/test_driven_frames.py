"""Whatever a worker asks a server to move: it is refused before anything moves, and the server serves on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.driven import CHUNK, a_process, a_rig, a_server, kv_mappings
from helpers.rig import A, B, Rig, nothing_held, prompt
from helpers.server import RunningServer, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.attachment import attach
from lmcache.v1.platform.base import ipc_wire
from lmcache.v1.platform.cpu import shared_file
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, RequestFailed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SECONDS = 20.0
LEASES = itertools.count(1 << 40)
HASHES = chunk_hashes(prompt(), Scope(chunk_size=CHUNK))
few = settings(max_examples=max(10, settings().max_examples // 4))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with a_server() as running:
        yield running
        assert "Traceback" not in running.errors()
        assert running.metrics()['lmcache_mp_errors_total{code="internal"}'] == 0
        assert running.end() == 0


@pytest.fixture(scope="module")
def engine(server: RunningServer) -> Iterator[Rig]:
    """One that does everything right, all the while, and whose session the hostile requests come from."""
    with a_rig(server, "engine", model="frames", groups=2) as rig:
        assert rig.store(prompt(), A) == 10
        yield rig


@pytest.fixture
def channel(server: RunningServer, engine: Rig) -> Iterator[Channel]:
    """After each test nothing is held, nothing is lost, and the good one still gets its bytes."""
    made = Channel(server.address)
    stored, maps = server.state()["l1"]["objects"], kv_mappings(server.pid)
    yield made
    made.close()
    nothing_held(server)
    wait_for(lambda: kv_mappings(server.pid) == maps, 10, "nothing else is mapped")
    assert server.state()["l1"]["objects"] == stored
    engine.memories[0][0].spoil(B)
    engine.memories[0][1].spoil(B)
    assert engine.fetch("after", prompt(), B) == 5


def event(engine: Rig) -> bytes:
    exported: bytes = engine.workers[0]._recorded()  # type: ignore[attr-defined]
    return exported


@contextmanager
def a_session(channel: Channel, attached: bool = True, **fields: Any) -> Iterator[str]:
    """A worker's session, and by default a connection to the server's Unix socket, as every client has one."""
    hello = m.Hello(protocol_min=1, protocol_max=1, role="worker", **({"engine": "engine"} | fields))
    welcome = channel.call(hello, SECONDS)[0]
    assert isinstance(welcome, m.Welcome)
    lifeline = attach(welcome, want_pool=False, shm="off") if attached else None
    assert lifeline is None or lifeline.watched
    try:
        yield welcome.session
    finally:
        channel.call(m.Bye(session=welcome.session), SECONDS)
        if lifeline is not None:
            lifeline.close()


def fault(channel: Channel, request: m.Request) -> str:
    with pytest.raises(RequestFailed) as failed:
        channel.call(request, SECONDS)
    assert failed.value.code != "internal", failed.value
    return f"{failed.value.code}: {failed.value}"


def a_store(engine: Rig, **fields: Any) -> m.DeviceStore:
    """A good store of chunks that are not there yet, but for ``fields``."""
    fresh = b"".join(os.urandom(32) for _ in range(2))
    good: dict[str, Any] = {
        "session": engine.workers[0].client.session,
        "lease": next(LEASES),
        "hashes": [fresh, fresh],
        "blocks": [A[:4], A[:4]],
        "event": event(engine),
    }
    return m.DeviceStore(**(good | fields))


def a_load(engine: Rig, request: str, **fields: Any) -> m.DeviceLoad:
    """A good load of a lease that was looked up just now, but for ``fields``."""
    assert engine.lookup(request, prompt()) == 5
    good: dict[str, Any] = {
        "session": engine.workers[0].client.session,
        "lease": engine._hits[request][0],
        "blocks": [B, B],
        "skip": [0, 0],
        "event": event(engine),
    }
    return m.DeviceLoad(**(good | fields))


FAR = [64, 1 << 31, (1 << 63) - 1, -1, -(1 << 63)]


@pytest.mark.parametrize("bad", FAR)
@pytest.mark.parametrize("place", [0, 3])
def test_a_store_from_a_block_outside_the_cache_is_refused(
    engine: Rig, channel: Channel, bad: int, place: int
) -> None:
    blocks = A[:4]
    blocks[place] = bad
    assert f"block id {bad}: expected 0 to 63" in fault(channel, a_store(engine, blocks=[A[:4], blocks]))


@pytest.mark.parametrize("bad", FAR)
@pytest.mark.parametrize("place", [0, 9], ids=["in the first batch", "in the last batch"])
def test_a_load_to_a_block_outside_the_cache_is_refused_before_anything_moves(
    engine: Rig, channel: Channel, bad: int, place: int
) -> None:
    engine.memories[0][0].spoil(B)
    engine.memories[0][1].spoil(B)
    blocks = list(B)
    blocks[place] = bad
    said = fault(channel, a_load(engine, "bad", blocks=[B, blocks]))
    assert said.startswith("device: KV group 1: block id")
    assert engine.spoilt(B), "not even the first group has moved"
    engine.end("bad")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"blocks": [[1], [2]]}, "bad_request"),
        ({"blocks": [B]}, "bad_request"),
        ({"blocks": []}, "bad_request"),
        ({"blocks": [B, B, B]}, "bad_request"),
        ({"skip": [0]}, "bad_request"),
        ({"skip": []}, "bad_request"),
        ({"skip": [0, -1]}, "bad_request"),
        ({"lease": 7}, "lease_gone"),
        ({"session": "nobody"}, "unknown_session"),
        ({"event": b""}, "device"),
        ({"event": b"LMCe" + bytes(80)}, "device"),
        ({"event": os.urandom(77)}, "device"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(
    engine: Rig, channel: Channel, fields: dict[str, Any], code: str
) -> None:
    engine.memories[0][0].spoil(B)
    assert fault(channel, a_load(engine, "odd", **fields)).startswith(code)
    assert engine.memories[0][0].is_spoilt(B[0])
    engine.end("odd")


def test_skips_of_any_size_write_nothing_they_should_not(engine: Rig, channel: Channel) -> None:
    for memory in engine.memories[0]:
        memory.spoil(B)
    request = a_load(engine, "far", skip=[10, (1 << 63) - 1])
    assert isinstance(channel.call(request, SECONDS)[0], m.Moved)
    assert engine.spoilt(B)
    engine.end("far")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"blocks": [[1], [2]]}, "bad_request"),
        ({"blocks": [A[:4]]}, "bad_request"),
        ({"hashes": [bytes(64)]}, "bad_request"),
        ({"hashes": [bytes(63), bytes(64)]}, "bad_request"),
        ({"session": "nobody"}, "unknown_session"),
        ({"event": b""}, "device"),
        ({"event": os.urandom(90)}, "device"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused(
    engine: Rig, channel: Channel, fields: dict[str, Any], code: str
) -> None:
    assert fault(channel, a_store(engine, **fields)).startswith(code)


def test_a_lease_is_good_for_one_store(engine: Rig, channel: Channel) -> None:
    store = a_store(engine)
    assert isinstance(channel.call(store, SECONDS)[0], m.Moved)
    again = a_store(engine, lease=store.lease)
    assert fault(channel, again).startswith("lease_gone")
    channel.call(m.Abort(session=store.session, leases=[store.lease]), SECONDS)
    assert fault(channel, again).startswith("lease_gone"), "nor after it was given back"
    early = a_store(engine)
    channel.call(m.Abort(session=early.session, leases=[early.lease]), SECONDS)
    assert fault(channel, early).startswith("lease_gone"), "nor if the giving back came first"


def test_one_who_exported_nothing_moves_nothing(server: RunningServer, engine: Rig, channel: Channel) -> None:
    with a_rig(server, "plain", model="frames", groups=2, mode="engine_driven") as plain:
        mine = plain.workers[0].client.session
        assert fault(channel, a_store(engine, session=mine)).startswith("unregistered")
        assert fault(channel, a_load(engine, "theirs", session=mine)).startswith("unregistered")
        engine.end("theirs")


def damaged(wire: bytes) -> st.SearchStrategy[bytes]:
    """A descriptor that is nearly right, or not at all."""

    def changed(at: int, byte: int) -> bytes:
        data = bytearray(wire)
        data[at % len(data)] = byte
        return bytes(data)

    return st.one_of(
        st.binary(max_size=200),
        st.builds(changed, st.integers(0, 1 << 16), st.integers(0, 255)),
        st.integers(0, len(wire) - 1).map(lambda n: wire[:n]),
    )


def test_descriptors_of_any_bytes_map_nothing_but_what_was_exported(
    server: RunningServer, engine: Rig, channel: Channel
) -> None:
    """Each is registered by a session of its own, which ends with it."""
    worker = engine.workers[0]
    namespaces = [group.namespace for group in worker.groups]
    wires = list(worker._export)  # type: ignore[attr-defined]

    @few
    @given(st.lists(st.one_of(st.sampled_from(wires), damaged(wires[0])), min_size=4, max_size=4))
    def send(layers: list[bytes]) -> None:
        export = m.DeviceExport(groups=[layers[:2], layers[2:]])
        code, said = "", ""
        with a_session(channel) as mine:
            try:
                channel.call(
                    m.Register(session=mine, namespaces=namespaces, mapped=False, device=export), SECONDS
                )
            except RequestFailed as exc:
                code, said = exc.code, str(exc)
        assert code in ("", "device"), said
        assert "\n" not in said

    send()


@pytest.mark.parametrize(
    "groups", [[], [[]], [[b""], [b""]], [[b"", b""]], [[b""] * 3, [b""]], [[b"", b""], [b"", b""]]], ids=str
)
def test_an_export_that_does_not_go_with_the_layouts_is_refused(
    engine: Rig, channel: Channel, groups: list[list[bytes]]
) -> None:
    namespaces = [group.namespace for group in engine.workers[0].groups]
    export = m.DeviceExport(groups=groups)
    with a_session(channel) as mine:
        request = m.Register(session=mine, namespaces=namespaces, mapped=False, device=export)
        assert fault(channel, request).startswith(("bad_request", "device"))


def test_memory_of_another_geometry_is_refused(engine: Rig, channel: Channel) -> None:
    """The descriptors are right, and the layouts say something else of the pages."""
    import msgspec

    worker = engine.workers[0]
    wires = list(worker._export)  # type: ignore[attr-defined]
    assert ipc_wire.decode(wires[0]).tensors[0].shape == (64, 1, 256)
    lie = msgspec.structs.replace(worker.groups[0].namespace, page_bytes=(512, 384))
    export = m.DeviceExport(groups=[wires[:2]])
    with a_session(channel, engine="lies") as mine:
        request = m.Register(session=mine, namespaces=[lie], mapped=False, device=export)
        assert "makes 512 bytes of an object, registered are 1024" in fault(channel, request)


# ------------------------------------------------------------------------------------------------- whose memory


def test_memory_of_a_process_that_nobody_knows_is_refused(engine: Rig, channel: Channel) -> None:
    """The request port is open to whoever reaches it; only the Unix socket tells who somebody is."""
    namespaces = [group.namespace for group in engine.workers[0].groups]
    wires = list(engine.workers[0]._export)  # type: ignore[attr-defined]
    export = m.DeviceExport(groups=[wires[:2], wires[2:]])
    with a_session(channel, attached=False) as mine:
        request = m.Register(session=mine, namespaces=namespaces, mapped=False, device=export)
        assert fault(channel, request).startswith("not_attached")


def test_the_server_opens_nothing_for_one_process_that_is_another_s(
    server: RunningServer, engine: Rig, channel: Channel
) -> None:
    """Not even its own pool, which is a sealed memfd like any exported memory."""
    import msgspec

    entries = {entry.name: entry for entry in Path(f"/proc/{server.pid}/fd").iterdir()}
    fd = next(name for name, entry in entries.items() if "memfd:lmcache-l1" in os.readlink(entry))
    found = os.stat(entries[fd])
    theirs = shared_file.FileId(
        server.pid, int(fd), shared_file._start_time(server.pid) or 0, shared_file._pid_namespace(),
        found.st_dev, found.st_ino, found.st_size,
    )  # fmt: skip
    pages = ipc_wire.TensorMeta("uint8", (64, 1, 256), (256, 256, 1), 0, found.st_size)
    plane = {"file": msgspec.to_builtins(theirs), "tensor": msgspec.to_builtins(pages)}
    wire = ipc_wire.encode(ipc_wire.WireDescriptor("cpu", 1, (pages,), {"planes": [plane], "single": True}))
    layout = msgspec.structs.replace(engine.workers[0].groups[0].namespace, page_bytes=(256,))
    with a_session(channel, engine="thief") as mine:
        export = m.DeviceExport(groups=[[wire]])
        said = fault(channel, m.Register(session=mine, namespaces=[layout], mapped=False, device=export))
        assert said == (
            f"device: KV layer 0: the descriptor names memory of process {server.pid}, and process {os.getpid()}"
            " sent it; expected its own"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_s_engine_is_told_to_run_as_the_server_s(
    server: RunningServer, channel: Channel
) -> None:
    with a_process(server, "nobody", uid=65534, model="uids", wait=0) as other:
        said = "uid 65534 may not export memory to a server that runs as uid 0; run both as one user"
        wait_for(lambda: said in other.call("reasons"), SECONDS, "the reason says so")
