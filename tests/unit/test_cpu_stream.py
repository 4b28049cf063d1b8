"""The host's own asynchronous stream, and the events that order its work inside one process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.platform.cpu import CpuDeviceSpec
from lmcache.v1.platform.cpu.stream import CpuStream
from lmcache.v1.platform.cpu.stub_cpu_device import StubEvent, StubStream


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    made = CpuStream()
    yield made
    made.close()


def hold(stream: CpuStream) -> Callable[[], None]:
    """Work that lasts until what is returned is called."""
    gate = threading.Event()
    stream.launch_host_func(lambda _: gate.wait(20))
    return gate.set


def test_work_runs_in_order_on_another_thread(stream: CpuStream) -> None:
    done: list[Any] = []
    release = hold(stream)
    for n in range(100):
        stream.launch_host_func(done.append, n)
    stream.launch_host_func(lambda _: done.append(threading.current_thread().name))
    assert not stream.query()
    assert done == []
    release()
    stream.synchronize()
    assert done == [*range(100), stream.name]
    assert stream.query()


def test_threads_may_share_a_stream(stream: CpuStream) -> None:
    done: list[tuple[int, int]] = []
    threads = [
        threading.Thread(
            target=lambda t=t: [stream.launch_host_func(done.append, (t, n)) for n in range(200)]
        )
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert [[n for t, n in done if t == number] for number in range(4)] == [list(range(200))] * 4


def test_streams_are_told_apart_by_a_number_that_is_not_zero(stream: CpuStream) -> None:
    with CpuStream() as other:
        assert len({0, stream.ptr, other.ptr}) == 3
        assert (other.ptr, CpuDeviceSpec().get_stream_handle(other)) == (other.cuda_stream, other.ptr)


def test_waiting_for_a_stream_has_a_deadline_and_is_not_for_itself(stream: CpuStream) -> None:
    release = hold(stream)
    stream.launch_host_func(lambda _: None)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{stream.name}: 2 pieces of work are not done after 0.1 s"):
        stream.synchronize(0.1)
    with pytest.raises(TimeoutError, match="its work is not done"):
        stream.close(0.1)
    assert time.monotonic() - started < 5
    release()
    stream.close()
    with CpuStream() as other:
        other.launch_host_func(lambda _: other.synchronize())
        with pytest.raises(DeviceError, match="work on it cannot wait for it"):
            other.synchronize()


def test_what_work_raises_is_told_to_everybody_and_the_rest_is_dropped(stream: CpuStream) -> None:
    done: list[int] = []
    release = hold(stream)
    stream.launch_host_func(lambda _: 1 / 0)
    stream.launch_host_func(done.append, 1)
    release()
    for use in (
        stream.synchronize,
        stream.synchronize,
        stream.query,
        lambda: stream.launch_host_func(done.append, 2),
        stream.record_event,
    ):
        with pytest.raises(DeviceError, match=f"{stream.name}: earlier work failed: ZeroDivisionError"):
            use()
    assert done == []


def test_closing_runs_what_was_queued_ends_the_thread_and_takes_no_more() -> None:
    before = threading.active_count()
    done: list[int] = []
    with CpuStream() as stream:
        stream.launch_host_func(lambda _: time.sleep(0.05))
        stream.launch_host_func(done.append, 1)
    stream.close()
    assert done == [1]
    assert threading.active_count() == before
    with pytest.raises(DeviceError, match="is closed"):
        stream.launch_host_func(done.append, 2)


def test_a_stream_keeps_nothing_of_the_work_that_is_done(stream: CpuStream) -> None:
    class Tensor:
        pass

    tensor = Tensor()
    gone = weakref.ref(tensor)
    stream.launch_host_func(lambda _: None, tensor)
    del tensor
    stream.synchronize()
    limit = time.monotonic() + 5
    while gone() is not None and time.monotonic() < limit:
        gc.collect()
    assert gone() is None


def test_one_stream_waits_for_another(stream: CpuStream) -> None:
    done: list[str] = []
    with CpuStream() as other:
        release = hold(other)
        other.launch_host_func(done.append, "other")
        stream.wait_stream(other)
        stream.launch_host_func(done.append, "stream")
        assert not stream.query()
        release()
        stream.synchronize()
    assert done == ["other", "stream"]


def test_a_stub_event_is_complete_when_its_stream_gets_there(stream: CpuStream) -> None:
    event, idle = StubEvent(enable_timing=True), StubEvent(enable_timing=True)
    idle.record(StubStream())
    release = hold(stream)
    event.record(stream)
    assert not event.query()
    with pytest.raises(RuntimeError, match="cannot go to another process"):
        event.ipc_handle()
    for wait in (lambda: event.synchronize(0.05), lambda: event.wait(StubStream(), 0.05)):
        with pytest.raises(TimeoutError, match=r"not complete after 0\.05 s"):
            wait()
    release()
    StubStream().wait_event(event)
    assert event.query()
    assert idle.elapsed_time(event) > 0


def test_the_cpu_has_wrapper_and_events_and_stays_engine_driven() -> None:
    spec = CpuDeviceSpec()
    assert spec.ipc_wrapper_cls.device_type == "cpu"
    assert spec.event_ipc_backend is CpuDeviceSpec().event_ipc_backend
    assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    assert set(spec.missing_for_lmcache_driven()) <= {"create_cache_context"}
