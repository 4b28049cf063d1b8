"""Events in two real processes, over the fake driver: they order, tell the truth, and end with their owners."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_cuda._native")

import standin
from peer import Gate, Peer

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.event_ipc import EventIPCBackend
from lmcache_cuda import fd_socket, runtime, timeline
from lmcache_cuda.events import DriverEventBackend, make_event_backend
from lmcache_cuda.ipc import CudaIPCWrapper
from lmcache_cuda.timeline import PAGES, TimelineEventBackend
from lmcache_cuda.timeline_pages import PAGE_BYTES, HostPlace

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fake_cuda")]

KINDS = ("driver", "host", "device")


def make(kind: str, **settings: Any) -> Any:
    return DriverEventBackend() if kind == "driver" else TimelineEventBackend(PAGES[kind], **settings)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(kind: str) -> Any:
    made = make(kind)
    made.check_event_support("cpu")
    return made


@pytest.fixture
def stream() -> Any:
    return standin.Stream()


@pytest.fixture
def gate(stream: Any) -> Iterator[Gate]:
    """The stream holds what is queued on it until the gate is opened."""
    made = Gate()
    made.hold(stream)
    yield made
    made.open()
    stream.synchronize()


@pytest.fixture(scope="module")
def beside() -> Iterator[Peer]:
    with Peer() as made:
        yield made


@pytest.fixture
def other(kind: str, beside: Peer) -> Peer:
    """Another process with a backend of the same kind; one for all tests, since starting one takes seconds."""
    beside.ask("close")
    beside.ask("events", kind=kind)
    return beside


def recorded(backend: Any, stream: Any) -> Any:
    event = backend.create_event("cpu")
    backend.record_event(event, stream)
    return event


def eventually(condition: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# --- one process -------------------------------------------------------------------------------------------


def test_it_is_a_backend_of_the_contract(backend: Any) -> None:
    assert isinstance(backend, EventIPCBackend)
    with pytest.raises(RuntimeError, match="does not serve device another:0"):
        backend.check_event_support("another:0")


def test_an_event_that_was_never_recorded_is_complete_here_and_there(
    backend: Any, kind: str, other: Peer
) -> None:
    event = backend.create_event("cpu")
    assert backend.query_event(event) is True
    backend.synchronize_event(event, "cpu")
    assert backend.export_event(event, "cpu")


def test_an_event_completes_with_the_work_before_it_and_asking_does_not_wait(
    backend: Any, stream: Any, gate: Gate
) -> None:
    event = recorded(backend, stream)
    assert backend.query_event(event) is False
    gate.open()
    backend.synchronize_event(event, "cpu")
    assert backend.query_event(event) is True


def test_another_stream_waits_and_the_host_does_not(backend: Any, stream: Any, gate: Gate) -> None:
    event = recorded(backend, stream)
    second = standin.Stream()
    backend.wait_event(event, second)
    behind = recorded(backend, second)
    assert backend.query_event(behind) is False
    gate.open()
    backend.synchronize_event(behind, "cpu")


@pytest.mark.parametrize(
    "spoiled", [b"", b"\0", b"\xff" * 64, b"LMCe\x01", b"LMCt\x01", b"LMCt\x01\x95", b"LMCe\x01" + b"\0" * 63]
)
def test_a_spoiled_handle_is_refused(backend: Any, spoiled: bytes) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        backend.import_event(spoiled, "cpu")


def test_handles_differ_between_events_of_one_stream(backend: Any, stream: Any) -> None:
    handles = [backend.export_event(recorded(backend, stream), "cpu") for _ in range(8)]
    assert len(set(handles)) == 8


# --- two processes -----------------------------------------------------------------------------------------


def test_the_other_process_s_stream_waits_for_ours(
    backend: Any, stream: Any, other: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "raw")
    tensor = standin.device_tensor(torch.zeros(4096, dtype=torch.uint8))
    other.ask("map", wires=[msgspec.msgpack.encode(CudaIPCWrapper.wrap(tensor).to_wire()).hex()])
    result = torch.zeros(4096, dtype=torch.uint8)
    mirror = standin.device_tensor(result)
    for value in range(1, 6):
        other.ask("hold")
        other.ask("write", index=0, value=value)
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        assert backend.query_event(event) is False
        backend.wait_event(event, stream)
        standin.native().memcpy_async(mirror.data_ptr(), tensor.data_ptr(), 4096, stream.cuda_stream, 0)
        assert not stream.query(), "our copy runs before their work is done"
        other.ask("open")
        stream.synchronize()
        assert (mirror == value).all()
        assert backend.query_event(event) is True


def test_the_host_waits_for_the_other_process_s_event(backend: Any, other: Peer) -> None:
    other.ask("hold")
    event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
    other.tell("open")
    backend.synchronize_event(event, "cpu")
    other.answer()
    assert backend.query_event(event) is True


def test_ours_serves_the_other_process_too(backend: Any, kind: str, stream: Any) -> None:
    """The way back: what was recorded here is imported by a backend of another process."""
    event = recorded(backend, stream)
    handle = backend.export_event(event, "cpu")
    stream.synchronize()
    twin = make(kind)
    if kind != "host":
        return  # the driver opens none of this process's own handles; the tests above show the way across
    assert twin.query_event(twin.import_event(handle, "cpu")) is True


# --- counters ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "device"])
def pages(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_imported_record_is_neither_recorded_nor_exported(pages: str, stream: Any) -> None:
    backend = make(pages)
    with Peer() as other:
        other.ask("events", kind=pages)
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        with pytest.raises(ValueError, match="make one of your own"):
            backend.record_event(event, stream)
        with pytest.raises(ValueError, match="make one of your own"):
            backend.export_event(event, "cpu")


def test_a_backend_finds_its_own_records_by_their_handle(pages: str, stream: Any) -> None:
    backend = make(pages)
    gate = Gate()
    gate.hold(stream)
    twin = backend.import_event(backend.export_event(recorded(backend, stream), "cpu"), "cpu")
    assert backend.query_event(twin) is False
    gate.open()
    backend.synchronize_event(twin, "cpu")


def test_a_record_of_this_process_that_it_never_made_is_refused(pages: str, stream: Any) -> None:
    """It would be forced into the slot once the wait for it is late, and others would take that for their work."""
    backend = make(pages)
    handle = backend.export_event(recorded(backend, stream), "cpu")
    place, device, slot, value = msgspec.msgpack.decode(handle[5:])
    for forged in ([place, device, slot, value + 1], [place, device, slot + 1, 1]):
        with pytest.raises(ValueError, match="of this process: it has recorded"):
            backend.import_event(handle[:5] + msgspec.msgpack.encode(forged), "cpu")


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_page_that_its_owner_could_cut_short_is_not_mapped(seals: int) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    server = fd_socket.server()
    place = HostPlace(server.path, server.offer(fd))
    with pytest.raises(DeviceError, match="expected 32768 of a sealed memfd"):
        place.open(0)
    server.withdraw(place.token)


def test_an_owner_that_talks_on_its_connection_does_not_hide_its_death_by_that(tmp_path: Any) -> None:
    """What it has sent would be read for ever in the place of its end, and a stream would wait for it as long."""
    page, place = PAGES["host"](0)
    fd, connection = fd_socket.fetch(place.socket, place.token)
    connection.close()
    path = str(tmp_path / "liar.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as liar:
        liar.bind(path)
        liar.listen(1)

        def serve() -> None:
            peer, _ = liar.accept()
            with peer:
                peer.recv(16)
                socket.send_fds(peer, [b"+"], [fd])
                peer.send(b"still here")

        thread = threading.Thread(target=serve)
        thread.start()
        theirs = HostPlace(path, bytes(16)).open(0)
        thread.join(60)
    os.close(fd)
    assert theirs.is_foreign
    assert theirs.owner_is_gone()
    assert not page.owner_is_gone()


def test_a_page_of_a_plain_file_is_not_mapped(tmp_path: Any) -> None:
    fd = os.open(tmp_path / "page", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, PAGE_BYTES)
    server = fd_socket.server()
    place = HostPlace(server.path, server.offer(fd))
    with pytest.raises(DeviceError, match="seals 0: expected"):
        place.open(0)
    server.withdraw(place.token)


@pytest.mark.parametrize("call", ["stream_wait_u64_geq", "event_record"])
def test_a_wait_that_the_driver_refuses_leaves_no_stream_unwatched(
    pages: str, stream: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A stream that waits already is let go when the other process has died, even if nobody took the wait for made."""
    backend = make(pages, unseen_seconds=0.2)
    native = standin.native()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return refuse if name == call else getattr(native, name)

    def refuse(*args: Any) -> None:
        raise DeviceError(f"{call}: out of memory")

    with Peer() as other:
        other.ask("events", kind=pages)
        other.ask("hold")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "native", lambda: Refusing())
            with pytest.raises(DeviceError, match=call):
                backend.wait_event(event, stream)
        other.kill()
        stream.synchronize()


def test_more_streams_than_slots_are_served_while_some_are_idle(
    pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "SLOTS", 4)
    backend = make(pages)
    streams = [standin.Stream() for _ in range(9)]
    for stream in streams:
        event = recorded(backend, stream)
        backend.synchronize_event(event, "cpu")
        twin = backend.import_event(backend.export_event(event, "cpu"), "cpu")
        assert backend.query_event(twin) is True


def test_more_streams_under_way_than_slots_are_refused(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SLOTS", 3)
    backend = make(pages)
    gate = Gate()
    streams = [standin.Stream() for _ in range(3)]
    for stream in streams:
        gate.hold(stream)
    recorded(backend, streams[0])
    recorded(backend, streams[1])
    with pytest.raises(DeviceError, match="events of 2 streams are under way"):
        recorded(backend, streams[2])
    gate.open()
    for stream in streams:
        stream.synchronize()


def test_a_record_that_the_driver_refuses_moves_no_number(
    pages: str, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(pages)
    recorded(backend, stream)
    native = standin.native()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def stream_write_u64(self, *args: Any) -> None:
            raise DeviceError("cuStreamWriteValue64: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "native", lambda: Refusing())
        with pytest.raises(DeviceError, match="cuStreamWriteValue64"):
            recorded(backend, stream)
    event = recorded(backend, stream)
    backend.synchronize_event(event, "cpu")
    twin = backend.import_event(backend.export_event(event, "cpu"), "cpu")
    assert eventually(lambda: backend.query_event(twin))


def test_the_probe_tells_where_streams_cannot_write(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = standin.native()

    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def stream_write_u64(self, *args: Any) -> None:
            pass

        def stream_wait_u64_geq(self, *args: Any) -> None:
            pass

    monkeypatch.setattr(runtime, "native", lambda: Deaf())
    with pytest.raises(RuntimeError, match="not supported on cpu: the stream wrote 1, and the host reads 0"):
        make(pages).check_event_support("cpu")


def test_the_probe_tells_where_the_device_has_no_such_operations(
    pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = standin.native()

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def device_info(self, ordinal: int) -> Any:
            return {**native.device_info(ordinal), "mem_ops": False}

    monkeypatch.setattr(runtime, "native", lambda: Plain())
    with pytest.raises(RuntimeError, match="has no memory operations of streams"):
        make(pages).check_event_support("cpu")


def test_a_stream_that_waits_for_a_process_that_dies_goes_on_and_what_is_behind_it_is_void(
    stream: Any,
) -> None:
    backend = make("host")
    with Peer() as other:
        other.ask("events", kind="host")
        other.ask("hold")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        backend.wait_event(event, stream)
        behind = recorded(backend, stream)
        other.kill()
        with pytest.raises(
            RuntimeError, match="has ended before completing it; what is recorded behind it is void"
        ):
            backend.synchronize_event(behind, "cpu")
        stream.synchronize()
        sound = recorded(backend, standin.Stream())
        backend.synchronize_event(sound, "cpu")


def test_the_host_learns_that_the_recorder_has_died(stream: Any) -> None:
    backend = make("host")
    with Peer() as other:
        other.ask("events", kind="host")
        other.ask("hold")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        other.kill()
        with pytest.raises(RuntimeError, match="it has ended before completing it"):
            backend.synchronize_event(event, "cpu")
        with pytest.raises(RuntimeError, match="it has ended before completing it"):
            backend.wait_event(event, stream)


def test_what_was_complete_before_its_process_died_stays_complete(stream: Any) -> None:
    backend = make("host")
    with Peer() as other:
        other.ask("events", kind="host")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        other.ask("synchronize")
        other.kill()
    assert backend.query_event(event) is True
    backend.wait_event(event, stream)
    backend.synchronize_event(recorded(backend, stream), "cpu")


def test_where_death_cannot_be_seen_a_stream_waits_for_so_long_and_no_longer(stream: Any) -> None:
    backend = make("device", unseen_seconds=0.2)
    with Peer() as other:
        other.ask("events", kind="device")
        other.ask("hold")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        backend.wait_event(event, stream)
        behind = recorded(backend, stream)
        with pytest.raises(
            RuntimeError, match="did not complete it in time; what is recorded behind it is void"
        ):
            backend.synchronize_event(behind, "cpu")
        other.ask("open")


def test_a_host_waits_for_another_process_for_so_long_and_no_longer() -> None:
    backend = make("device", wait_seconds=0.2)
    with Peer() as other:
        other.ask("events", kind="device")
        other.ask("hold")
        event = backend.import_event(bytes.fromhex(other.ask("record")), "cpu")
        with pytest.raises(TimeoutError, match=r"not complete after 0\.2 s"):
            backend.synchronize_event(event, "cpu")
        other.ask("open")


# --- which one ---------------------------------------------------------------------------------------------

CHOICES = {
    ("auto", "0"): "driver",
    ("auto", "1"): "device",
    ("driver", "0"): "driver",
    ("host", "0"): "host",
    ("host", "1"): "host",
    ("device", "0"): "device",
    ("driver", "1"): None,
}


@pytest.mark.parametrize(("asked", "isolated"), CHOICES)
def test_the_policy_decides_which_events_are_used(
    monkeypatch: pytest.MonkeyPatch, asked: str, isolated: str
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_EVENTS", asked)
    monkeypatch.setenv("LMCACHE_CUDA_ISOLATED_IPC", isolated)
    expected = CHOICES[asked, isolated]
    if expected is None:
        with pytest.raises(DeviceError, match="need a shared /dev/shm; use host or device"):
            make_event_backend()
        return
    backend = make_event_backend()
    assert isinstance(backend, DriverEventBackend) == (expected == "driver")
    assert expected == "driver" or backend._make_page == PAGES[expected]
