"""Whatever a worker asks a server to move: it is refused before anything moves, and the server serves on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.driven import CHUNK, A, B, a_rig, a_server, kv_mappings, nothing_held, prompt, status
from helpers.rig import Rig
from helpers.server import RunningServer, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.platform.base import ipc_wire
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
    stored, maps = status(server)["l1"]["objects"], kv_mappings(server.pid)
    yield made
    made.close()
    nothing_held(server)
    wait_for(lambda: kv_mappings(server.pid) == maps, 10, "nothing else is mapped")
    assert status(server)["l1"]["objects"] == stored
    engine.memories[0][0].spoil(B)
    engine.memories[0][1].spoil(B)
    assert engine.fetch("after", prompt(), B) == 5


def event(engine: Rig) -> bytes:
    exported: bytes = engine.workers[0]._recorded()  # type: ignore[attr-defined]
    return exported


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
    hello = m.Hello(protocol_min=1, protocol_max=1, role="worker", engine="engine", rank=0)

    @few
    @given(st.lists(st.one_of(st.sampled_from(wires), damaged(wires[0])), min_size=4, max_size=4))
    def send(layers: list[bytes]) -> None:
        welcome = channel.call(hello, SECONDS)[0]
        assert isinstance(welcome, m.Welcome)
        export = m.DeviceExport(groups=[layers[:2], layers[2:]])
        request = m.Register(session=welcome.session, namespaces=namespaces, mapped=False, device=export)
        code, said = "", ""
        try:
            channel.call(request, SECONDS)
        except RequestFailed as exc:
            code, said = exc.code, str(exc)
        assert code in ("", "device"), said
        assert "\n" not in said
        channel.call(m.Bye(session=welcome.session), SECONDS)

    send()


@pytest.mark.parametrize(
    "groups", [[], [[]], [[b""], [b""]], [[b"", b""]], [[b""] * 3, [b""]], [[b"", b""], [b"", b""]]], ids=str
)
def test_an_export_that_does_not_go_with_the_layouts_is_refused(
    engine: Rig, channel: Channel, groups: list[list[bytes]]
) -> None:
    namespaces = [group.namespace for group in engine.workers[0].groups]
    welcome = channel.call(
        m.Hello(protocol_min=1, protocol_max=1, role="worker", engine="engine", rank=0), SECONDS
    )[0]
    assert isinstance(welcome, m.Welcome)
    request = m.Register(
        session=welcome.session,
        namespaces=namespaces,
        mapped=False,
        device=m.DeviceExport(groups=groups),
    )
    assert fault(channel, request).startswith(("bad_request", "device"))
    channel.call(m.Bye(session=welcome.session), SECONDS)


def test_memory_of_another_geometry_is_refused(engine: Rig, channel: Channel) -> None:
    """The descriptors are right, and the layouts say something else of the pages."""
    import msgspec

    worker = engine.workers[0]
    wires = list(worker._export)  # type: ignore[attr-defined]
    assert ipc_wire.decode(wires[0]).tensors[0].shape == (64, 1, 256)
    welcome = channel.call(m.Hello(protocol_min=1, protocol_max=1, role="worker", engine="lies"), SECONDS)[0]
    assert isinstance(welcome, m.Welcome)
    lie = msgspec.structs.replace(worker.groups[0].namespace, page_bytes=(512, 384))
    request = m.Register(
        session=welcome.session, namespaces=[lie], mapped=False, device=m.DeviceExport(groups=[wires[:2]])
    )
    assert "makes 512 bytes of an object, registered are 1024" in fault(channel, request)
    channel.call(m.Bye(session=welcome.session), SECONDS)
