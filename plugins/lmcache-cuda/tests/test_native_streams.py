"""Streams, events, completions, and memory that another process maps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from native_rig import KIND, device_memory, entry, environment, fake, native, read, refused, stream, write

LONG = 60


@pytest.fixture(autouse=True)
def fresh() -> None:
    fake.reset()
    native.drain_recorded_completions()
    native.drain_recorded_events()


# --------------------------------------------------------------------------------------------------------- streams
def test_a_stream_does_its_work_in_order_while_the_host_goes_on() -> None:
    with device_memory(16) as ptr, stream() as queue:
        with fake.held():
            native.memset_async(ptr, 1, 16, queue, 0)
            native.memset_async(ptr, 2, 8, queue, 0)
            assert not native.stream_query(queue)
        native.stream_synchronize(queue)
        assert native.stream_query(queue)
        assert read(ptr, 16) == b"\2" * 8 + b"\1" * 8


def test_the_default_stream_is_that_of_the_device() -> None:
    with device_memory(16, 1) as ptr:
        native.memset_async(ptr, 3, 16, 0, 1)
        native.stream_synchronize(0, 1)
        assert read(ptr, 16) == b"\3" * 16


def test_priorities_are_within_what_the_device_has() -> None:
    least, greatest = native.stream_priority_range(0)
    assert greatest < least
    native.stream_destroy(native.stream_create(0, greatest))
    assert refused(lambda: native.stream_create(0, greatest - 1)).code == 1


def test_waiting_for_a_stream_leaves_the_interpreter_to_others() -> None:
    went_on = threading.Event()
    with stream() as queue, device_memory(8) as ptr:
        with fake.held():
            native.memset_async(ptr, 1, 8, queue, 0)
            waiter = threading.Thread(target=lambda: (native.stream_synchronize(queue), went_on.set()))
            waiter.start()
            assert not went_on.is_set()
        assert went_on.wait(LONG)
        waiter.join()


# ---------------------------------------------------------------------------------------------------------- events
def test_an_event_orders_two_streams() -> None:
    with device_memory(8) as ptr, stream() as one, stream() as other:
        event = native.event_create(0)
        assert native.event_query(event)  # never recorded: complete
        with fake.held():
            native.memset_async(ptr, 1, 8, one, 0)
            native.event_record(event, one)
            native.stream_wait_event(other, event)
            native.memset_async(ptr, 2, 8, other, 0)
            assert not native.event_query(event)
        native.event_synchronize(event)
        native.stream_synchronize(other)
        assert read(ptr, 8) == b"\2" * 8
        native.event_destroy(event)


def test_events_that_time_tell_milliseconds() -> None:
    with stream() as queue:
        start, end = (native.event_create(0, timing=True) for _ in range(2))
        native.event_record(start, queue)
        fake.delay(3000)
        native.event_record(end, queue)
        native.event_synchronize(end)
        assert native.event_elapsed_ms(start, end) >= 3
    with pytest.raises(ValueError, match="at most one"):
        native.event_create(0, interprocess=True, timing=True)


def test_a_word_of_memory_orders_two_streams() -> None:
    with device_memory(16) as word, stream() as one, stream() as other:
        write(word, (5).to_bytes(8, "little") + bytes(8))
        native.stream_wait_u64_geq(other, word, 7)
        native.memset_async(word + 8, 9, 8, other, 0)
        native.stream_write_u64(one, word, 6)
        native.stream_synchronize(one)
        assert not native.stream_query(other)
        native.stream_write_u64(one, word, 8)
        native.stream_synchronize(other)
        assert read(word, 16) == (8).to_bytes(8, "little") + b"\x09" * 8


# ----------------------------------------------------------------------------------------------------- completions
def test_completions_are_due_once_the_stream_is_there() -> None:
    with stream() as queue, device_memory(8) as ptr:
        with fake.held():
            native.memset_async(ptr, 1, 8, queue, 0)
            native.record_completion_on_stream(queue, "stored", b"\0one")
            native.record_completion_on_stream(queue, "naïve", b"")
            assert native.drain_recorded_completions() == []
        native.stream_synchronize(queue)
    assert native.drain_recorded_completions() == [("stored", b"\0one"), ("naïve", b"")]
    assert native.drain_recorded_completions() == []


def test_events_for_observers_carry_the_time_and_copies_of_what_they_are_given() -> None:
    texts, numbers = {"a": "b"}, {"n": -(1 << 60)}
    before = time.time()
    with stream() as queue:
        native.record_event_on_stream(queue, "type", "session", texts, numbers)
        texts["a"] = "changed"
    [(kind, session, when, said, counted)] = native.drain_recorded_events()
    assert (kind, session, said, counted) == ("type", "session", {"a": "b"}, {"n": -(1 << 60)})
    assert before - 1 <= when <= time.time() + 1


def test_of_events_that_nobody_drains_the_latest_stay() -> None:
    dropped = native.dropped_events()
    with stream() as queue:
        for number in range((1 << 16) + 3):
            native.record_event_on_stream(queue, "t", "s", {}, {"n": number})
    events = native.drain_recorded_events()
    assert (len(events), events[0][4]["n"], native.dropped_events() - dropped) == (1 << 16, 3, 3)


@pytest.mark.parametrize("arguments", [("x", 1, b""), (0, 1, b""), (0, "k", "text")])
def test_what_is_recorded_has_types(arguments: Any) -> None:
    with pytest.raises(TypeError):
        native.record_completion_on_stream(*arguments)


def test_completions_of_many_threads_all_come_once() -> None:
    def record(name: int) -> None:
        with stream() as queue:
            for number in range(50):
                native.record_completion_on_stream(queue, str(name), bytes([number]))

    threads = [threading.Thread(target=record, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    drained = native.drain_recorded_completions()
    for name in range(4):
        assert [payload[0] for kind, payload in drained if kind == str(name)] == list(range(50))


FORKED = """
import os
from native_rig import native, stream
with stream() as queue:
    native.record_completion_on_stream(queue, "parent's", b"")
child = os.fork()
if not child:
    os._exit(len(native.drain_recorded_completions()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), native.drain_recorded_completions())
"""


def test_a_forked_process_begins_with_no_completions() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], env=environment(KIND), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.stdout == "0 [(\"parent's\", b'')]\n", done.stderr


# -------------------------------------------------------------------------------------------------- other processes
PEER = """
import os, socket, sys
from native_rig import native, read, write
line = lambda: sys.stdin.readline().split()
def say(word):
    print(word, flush=True)

def memory(handle, offset, size):
    base = native.ipc_open(0, bytes.fromhex(handle))
    at = base + int(offset)
    say(read(at, int(size)).hex())
    write(at, b"from the peer")
    native.ipc_close(0, base)
    say("closed")

def event(handle):
    event, queue = native.event_open(0, bytes.fromhex(handle)), native.stream_create(0)
    say("done" if native.event_query(event) else "pending")
    native.stream_wait_event(queue, event)
    say("waiting")
    native.stream_synchronize(queue)
    say("reached")

def descriptor(path, size, offset):
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(path)
        _, [fd], _, _ = socket.recv_fds(made, 1, 1)
    base = native.vmm_import_fd(0, fd, int(size))
    os.close(fd)
    say(read(base + int(offset), 4).hex())
    write(base + int(offset), b"peer")
    native.vmm_free(0, base)
    say("freed")

what, *arguments = line()
globals()[what](*arguments)
"""


class Peer:
    """Another process on the same driver, which is told what to open."""

    def __enter__(self) -> Peer:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER], env=environment(KIND), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        return self

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            assert self._process.wait(LONG) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]


def test_another_process_reads_and_writes_exported_memory() -> None:
    with device_memory(8192) as ptr, Peer() as peer:
        write(ptr + 100, b"from the owner")
        handle, offset, size = native.ipc_export(ptr + 100)
        assert (len(handle), offset, size) == (64, 100, 8192)
        peer.tell("memory", handle.hex(), offset, 14)
        assert bytes.fromhex(peer.hear()) == b"from the owner"
        assert peer.hear() == "closed"
        assert read(ptr + 100, 13) == b"from the peer"


def test_a_process_does_not_open_its_own_memory() -> None:
    with device_memory(64) as ptr:
        handle, _, _ = native.ipc_export(ptr)
        assert refused(lambda: native.ipc_open(0, handle)).code == 201


@pytest.mark.parametrize(
    "opens", [lambda handle: native.ipc_open(0, handle), lambda h: native.event_open(0, h)]
)
def test_a_handle_of_another_size_is_refused_before_the_driver_sees_it(opens: Any) -> None:
    with pytest.raises(ValueError, match="a handle of 63 bytes: expected 64"):
        opens(bytes(63))


def test_another_process_waits_for_an_exported_event() -> None:
    with device_memory(8) as ptr, stream() as queue, Peer() as peer:
        event = native.event_create(0, interprocess=True)
        with fake.held():
            native.memset_async(ptr, 1, 8, queue, 0)
            native.event_record(event, queue)
            peer.tell("event", native.event_export(event).hex())
            assert peer.hear() == "pending"
            assert peer.hear() == "waiting"
        assert peer.hear() == "reached"
        native.event_destroy(event)


def test_an_event_of_one_process_is_not_exported() -> None:
    event = native.event_create(0)
    assert refused(lambda: native.event_export(event)).code == 400
    native.event_destroy(event)


def test_another_process_maps_memory_by_its_descriptor(tmp_path: Any) -> None:
    assert native.vmm_supported(0)
    ptr = native.vmm_alloc(0, 3 << 20)
    write(ptr + 5000, b"mine")
    fd, size, offset = native.vmm_export_fd(ptr + 5000)
    assert (size, offset) == (4 << 20, 5000)
    with socket.socket(socket.AF_UNIX) as server, Peer() as peer:
        server.bind(str(tmp_path / "s"))
        server.listen()
        server.settimeout(LONG)
        peer.tell("descriptor", tmp_path / "s", size, offset)
        connection, _ = server.accept()
        with connection:
            socket.send_fds(connection, [b"x"], [fd])
        os.close(fd)
        assert bytes.fromhex(peer.hear()) == b"mine"
        assert peer.hear() == "freed"
    assert read(ptr + 5000, 4) == b"peer"
    native.vmm_free(0, ptr)
    with pytest.raises(ValueError, match="expected an address of vmm_alloc"):
        native.vmm_free(0, ptr)


def test_an_address_of_no_mapping_is_not_exported() -> None:
    with device_memory(64) as ptr:
        assert refused(lambda: native.vmm_export_fd(ptr)).code == 1


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_nothing_behind(call: str) -> None:
    released, unreserved = fake.calls(entry("cuMemRelease")), fake.calls(entry("cuMemAddressFree"))
    fake.fail(entry(call), 2)
    assert refused(lambda: native.vmm_alloc(0, 64)).call == entry(call)
    assert fake.calls(entry("cuMemRelease")) == released + 1
    assert fake.calls(entry("cuMemAddressFree")) == unreserved + 1


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_a_size_that_no_exporter_tells_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected the size that the exporter told"):
        native.vmm_import_fd(0, 0, nbytes)


def test_memory_whose_unmapping_fails_is_given_back_as_far_as_the_driver_lets_it() -> None:
    ptr = native.vmm_alloc(0, 64)
    release, unmap = entry("cuMemRelease"), entry("cuMemUnmap")
    before = fake.calls(release)
    fake.fail(unmap, 1)
    assert refused(lambda: native.vmm_free(0, ptr)).call == unmap
    assert fake.calls(release) == before + 1
