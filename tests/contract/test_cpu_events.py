"""Events between processes on the CPU: what waits for one comes after it, and nobody waits for the dead."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.peer import Peer, memfd_descriptors, memfd_mappings
from lmcache.errors import DeviceError
from lmcache.v1.platform import get_event_ipc_backend
from lmcache.v1.platform.base.event_ipc import EventIPCBackend
from lmcache.v1.platform.cpu import event_ipc, event_slots, futex
from lmcache.v1.platform.cpu.event_ipc import CpuEvent, CpuEventIPCBackend
from lmcache.v1.platform.cpu.event_slots import SlotPool
from lmcache.v1.platform.cpu.shared_file import create_file
from lmcache.v1.platform.cpu.stream import CpuStream

#: A process with a stream that is slow to write into shared memory.
RECORDER = """
import time
from lmcache.v1.platform.cpu.event_ipc import CPU_EVENTS as events
from lmcache.v1.platform.cpu.shared_file import open_file, FileId
from lmcache.v1.platform.cpu.stream import CpuStream
stream = CpuStream()
def write(seconds, place, value):
    time.sleep(seconds)
    data[place] = value
def record(seconds, place=0, value=1):
    global event
    stream.launch_host_func(lambda _: write(seconds, place, value))
    event = events.create_event()
    events.record_event(event, stream)
    return events.export_event(event).hex()
"""


@pytest.fixture
def backend() -> CpuEventIPCBackend:
    return CpuEventIPCBackend(wait_seconds=20)


@pytest.fixture
def data() -> Any:
    return create_file(4096, "lmcache-test")


@pytest.fixture
def peer(data: Any) -> Iterator[Peer]:
    with Peer() as process:
        process.do(RECORDER + f"data = open_file({data.identity()!r})")
        yield process


def imported(backend: CpuEventIPCBackend, peer: Peer, call: str) -> CpuEvent:
    return backend.import_event(bytes.fromhex(peer.do(f"out = {call}")), "cpu")


# --- Order -------------------------------------------------------------------------------------------------


def test_a_wait_ends_after_the_other_process_s_work(
    backend: CpuEventIPCBackend, peer: Peer, data: Any
) -> None:
    for value in range(1, 6):
        event = imported(backend, peer, f"record(0.1, 0, {value})")
        assert not backend.query_event(event)
        assert data[0] == value - 1
        backend.wait_event(event, None)
        assert data[0] == value
        assert backend.query_event(event)


def test_a_wait_on_a_stream_holds_the_stream_and_not_the_host(
    backend: CpuEventIPCBackend, peer: Peer, data: Any
) -> None:
    event = imported(backend, peer, "record(1.5, 7, 42)")
    seen: list[int] = []
    with CpuStream() as stream:
        backend.wait_event(event, stream)
        stream.launch_host_func(lambda _: seen.append(data[7]))
        assert seen == [], "the host is here before the record has ended"
        stream.synchronize()
    assert seen == [42]


def test_a_stream_of_one_process_follows_that_of_another_and_back(
    backend: CpuEventIPCBackend, peer: Peer, data: Any
) -> None:
    with CpuStream() as stream:
        for n in range(20):
            theirs = imported(backend, peer, f"record(0.002, 1, {n})")
            backend.wait_event(theirs, stream)
            stream.launch_host_func(lambda _: data.__setitem__(2, data[1]))
            ours = backend.create_event()
            backend.record_event(ours, stream)
            back = backend.export_event(ours).hex()
            peer.do(
                f"twin = events.import_event(bytes.fromhex({back!r})); events.wait_event(twin, stream)\n"
                "stream.launch_host_func(lambda _: data.__setitem__(3, data[2])); stream.synchronize()"
            )
            assert data[3] == n


def test_a_completion_wakes_who_waits(
    backend: CpuEventIPCBackend, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if futex._CALL is None:
        pytest.skip("this machine's futex call is not known: waits poll")
    monkeypatch.setattr(event_ipc, "_SLICE", 15.0)
    event = imported(backend, peer, "record(0.3)")
    started = time.monotonic()
    backend.wait_event(event, None)
    assert time.monotonic() - started < 10


def test_a_query_never_blocks(backend: CpuEventIPCBackend, peer: Peer) -> None:
    event = imported(backend, peer, "record(1.0)")
    asked = 0
    while not backend.query_event(event):
        asked += 1
    assert asked > 20, "one that blocked would have been there for the end of the record"


def test_a_wait_is_for_the_last_record_when_it_is_called(backend: CpuEventIPCBackend) -> None:
    event = backend.create_event()
    with CpuStream() as stream, CpuStream() as waiter:
        gate = backend.create_event()
        ready = _Hold(stream)
        backend.record_event(event, None)
        backend.wait_event(event, waiter)  # complete: waits for nothing
        backend.record_event(event, stream)
        waiter.synchronize(5)
        backend.wait_event(event, waiter)
        backend.record_event(gate, waiter)
        assert not backend.query_event(event)
        assert not backend.query_event(gate)
        ready.release()
        backend.synchronize_event(gate)
        assert backend.query_event(event)


def test_an_event_that_was_never_recorded_is_complete(backend: CpuEventIPCBackend) -> None:
    event = backend.create_event("cpu")
    twin = backend.import_event(backend.export_event(event, "cpu"), "cpu")
    backend.wait_event(twin, None)
    backend.synchronize_event(twin, "cpu")
    assert backend.query_event(event)
    assert backend.query_event(twin)


@pytest.mark.parametrize("call", [None, lambda *args: -1], ids=["unknown machine", "refused"])
def test_order_is_kept_where_the_futex_call_is_missing(
    backend: CpuEventIPCBackend, peer: Peer, data: Any, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    monkeypatch.setattr(futex, "_CALL", None if call is None else (call, 0))
    monkeypatch.setattr(futex.ctypes, "get_errno", lambda: 38)  # ENOSYS
    event = imported(backend, peer, "record(0.2, 0, 5)")
    backend.wait_event(event, None)
    assert data[0] == 5


# --- What never completes ----------------------------------------------------------------------------------


def test_a_dead_recorder_is_an_error_soon_and_what_it_completed_stays_complete(
    backend: CpuEventIPCBackend, peer: Peer
) -> None:
    done = imported(backend, peer, "record(0)")
    backend.wait_event(done, None)
    pending = imported(backend, peer, "record(600)")
    stream = CpuStream()
    backend.wait_event(pending, stream)
    peer.kill(reap=False)
    started = time.monotonic()
    dead = f"of process {peer.pid}: the recorder died before completing"
    with pytest.raises(RuntimeError, match=dead):
        backend.wait_event(pending, None)
    with pytest.raises(RuntimeError, match=dead):
        backend.query_event(pending)
    with pytest.raises(DeviceError, match=dead):
        stream.synchronize()
    assert time.monotonic() - started < 10
    assert backend.query_event(done)
    stream.close()


def test_an_event_of_a_process_that_has_ended_is_not_imported(
    backend: CpuEventIPCBackend, peer: Peer
) -> None:
    handle = bytes.fromhex(peer.do("out = record(0)"))
    peer.end()
    with pytest.raises(RuntimeError, match=f"process {peer.pid}: the process has ended"):
        backend.import_event(handle, "cpu")


def test_a_wait_has_a_deadline() -> None:
    backend = CpuEventIPCBackend(wait_seconds=0.2)
    event = backend.create_event()
    with CpuStream() as stream:
        hold = _Hold(stream)
        backend.record_event(event, stream)
        for wait in (backend.wait_event, backend.synchronize_event):
            with pytest.raises(
                TimeoutError, match=rf"CPU event 1\.1 of process {os.getpid()}: not complete after 0.2 s"
            ):
                wait(event, None)
        hold.release()
    with pytest.raises(ValueError, match="wait_seconds=0"):
        CpuEventIPCBackend(wait_seconds=0)


def test_a_record_that_a_stream_drops_or_refuses_fails_for_who_waits(backend: CpuEventIPCBackend) -> None:
    event, late = backend.create_event(), backend.create_event()
    twin = backend.import_event(backend.export_event(event), "cpu")
    stream = CpuStream()
    hold = _Hold(stream)
    stream.launch_host_func(lambda _: 1 / 0)
    backend.record_event(event, stream)
    hold.release()
    with pytest.raises(RuntimeError, match="failed or was dropped by its stream"):
        backend.wait_event(twin, None)
    with pytest.raises(RuntimeError, match="failed or was dropped"):
        backend.query_event(event)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        backend.record_event(late, stream)
    with pytest.raises(RuntimeError, match="failed or was dropped"):
        backend.query_event(late)
    stream.close()


# --- Slots -------------------------------------------------------------------------------------------------


def test_a_late_record_never_completes_the_successor_in_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuEventIPCBackend()
    backend._pid, backend._pool = os.getpid(), SlotPool(slots_per_page=3)
    with CpuStream() as slow, CpuStream() as other:
        hold = _Hold(slow)
        first = backend.create_event()
        backend.record_event(first, slow)
        old = backend.import_event(backend.export_event(first), "cpu")
        del first  # still outstanding: its slot is not given on
        events = [backend.create_event() for _ in range(4)]
        assert len(backend._pool.pages) == 3
        assert not backend.query_event(old)
        hold.release()
        backend.synchronize_event(old)
        successor = next(
            e for e in iter(backend.create_event, None) if _same_slot(e, old) or events.append(e)
        )
        hold = _Hold(other)
        backend.record_event(successor, other)
        assert backend.query_event(old)
        assert not backend.query_event(successor)
        hold.release()
        backend.synchronize_event(successor)
        backend.synchronize_event(old)


@settings(max_examples=80)
@given(st.data())
def test_records_count_as_done_only_when_all_before_them_are(data: st.DataObject) -> None:
    slot = SlotPool(slots_per_page=2).take()
    open_records: dict[int, Any] = {}
    ended: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        if open_records and data.draw(st.booleans()):
            number = data.draw(st.sampled_from(sorted(open_records)))
            open_records.pop(number)()
            ended.add(number)
        else:
            open_records[len(ended) + len(open_records) + 1] = slot.record()
        prefix = next(n for n in range(len(ended) + 2) if n + 1 not in ended)
        assert slot[event_slots.COMPLETED] == prefix
        assert slot[event_slots.FAILED] == 0
        assert slot.quiescent == (not open_records)
    first = min(open_records, default=0)
    open_records.clear()  # dropped uncalled
    assert slot[event_slots.FAILED] == first
    assert slot.quiescent


def test_a_slot_with_a_failed_record_is_not_used_again() -> None:
    pool = SlotPool(slots_per_page=2)
    slot = pool.take()
    slot.record().fail()
    pool.give_back(slot)
    assert pool.take() is not slot


def test_ten_thousand_events_leak_nothing(backend: CpuEventIPCBackend, peer: Peer) -> None:
    peer.do("kept = [events.create_event() for _ in range(10)]")
    importer = CpuEventIPCBackend()
    for _ in range(10_000):
        event = backend.create_event("cpu")
        backend.record_event(event, None)
        twin = importer.import_event(backend.export_event(event, "cpu"), "cpu")
        importer.wait_event(twin, None)
    assert len(backend._pool.pages) == 1
    peer.do("for _ in range(10000):\n    record(0)\nstream.synchronize()")
    assert peer.do("out = len(events._pool.pages)") <= 11  # as many as were outstanding at once
    peer.do("del kept")
    del importer, twin, event
    gc.collect()
    assert len(memfd_descriptors()) == len(memfd_mappings()) * 2


def test_a_forked_process_has_pages_of_its_own_and_fails_nothing_of_its_parent(peer: Peer) -> None:
    code = """
import os, gc, threading
gate = threading.Event()
stream.launch_host_func(lambda _: gate.wait(20))
event = events.create_event()
events.record_event(event, stream)
read, write = os.pipe()
if not (pid := os.fork()):
    stream._queue.clear()  # what the parent has queued is dropped here
    gc.collect()
    mine = events.create_event()
    events.record_event(mine, None)
    try:
        events.record_event(event, None)
    except ValueError as exc:
        os.write(write, b"refused" if events.query_event(mine) else b"?")
    os._exit(0)
os.waitpid(pid, 0)
out = [os.read(read, 99).decode(), events.query_event(event)]
gate.set()
events.synchronize_event(event)
out.append(events.query_event(event))
"""
    assert peer.do(code) == ["refused", False, True]


# --- Handles -----------------------------------------------------------------------------------------------


def test_any_bytes_are_refused_or_name_an_event(backend: CpuEventIPCBackend) -> None:
    event = backend.create_event()
    backend.record_event(event, None)
    handle = backend.export_event(event)
    assert len(handle) == event_ipc._HANDLE.size
    refusals: list[str] = []

    @settings(max_examples=300)
    @given(
        st.binary(max_size=80)
        | st.lists(st.tuples(st.integers(0, len(handle) - 1), st.integers(0, 255)), max_size=2)
    )
    def fuzz(change: Any) -> None:
        raw = bytearray(handle) if isinstance(change, list) else bytearray(change)
        for at, value in change if isinstance(change, list) else ():
            raw[at] = value
        try:
            assert backend.query_event(backend.import_event(bytes(raw), "cpu"))
        except (ValueError, DeviceError) as exc:
            refusals.append(str(exc))

    fuzz()
    assert refusals
    assert [text for text in refusals if "\n" in text] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h[:-1], "expected 73 bytes of version 1, got 72"),
        (lambda h: h + b"\0", "got 74"),
        (lambda h: h[:4] + b"\2" + h[5:], r"begin with b'LMCe\\x02'"),
        (lambda h: h[:5] + b"\xff" * 8 + h[13:], "<= 9223372036854775807"),
        (lambda h: h[:61] + bytes(4) + h[65:], "slot 0 is not in a page"),
        (lambda h: h[:61] + b"\xff" * 4 + h[65:], "is not in a page of 65536 bytes"),
    ],
)
def test_a_handle_that_is_none_is_refused(
    backend: CpuEventIPCBackend, change: Callable[[bytes], bytes], says: str
) -> None:
    handle = backend.export_event(backend.create_event())
    with pytest.raises(ValueError, match=says):
        backend.import_event(change(handle), "cpu")


def test_other_memory_of_ours_is_not_taken_for_events(backend: CpuEventIPCBackend, data: Any) -> None:
    event = backend.create_event()
    stranger = CpuEvent(data, 1, 1, data.identity())
    with pytest.raises(DeviceError, match="holds no events"):
        backend.import_event(stranger.handle(), "cpu")
    assert backend.import_event(event.handle(), "cpu")


def test_an_imported_event_is_neither_recorded_nor_exported(backend: CpuEventIPCBackend, peer: Peer) -> None:
    event = imported(backend, peer, "record(0)")
    with pytest.raises(ValueError, match=f"cannot be recorded: process {peer.pid} created it"):
        backend.record_event(event, None)
    with pytest.raises(ValueError, match="not exported again"):
        backend.export_event(event, "cpu")


def test_the_probe_tries_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_event_ipc_backend("cpu")
    assert backend is get_event_ipc_backend("cpu:0")
    assert isinstance(backend, EventIPCBackend)
    for device in ("cpu", "cpu:0", None, 0, SimpleNamespace(type="cpu")):
        backend.check_event_support(device)
    with pytest.raises(RuntimeError, match="does not serve device cuda:0"):
        backend.check_event_support("cuda:0")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match="event IPC is not supported on 'cpu' here: shared memory of"):
        CpuEventIPCBackend().check_event_support("cpu")


class _Hold:
    """Work on a stream that lasts until released."""

    def __init__(self, stream: CpuStream) -> None:
        self._gate = threading.Event()
        stream.launch_host_func(lambda _: self._gate.wait(20))

    def release(self) -> None:
        self._gate.set()


def _same_slot(one: CpuEvent, other: CpuEvent) -> bool:
    return (one._file, one._index) == (other._file, other._index)
