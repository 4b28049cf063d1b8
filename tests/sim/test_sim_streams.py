"""Streams, events and the link of the simulated device. Times are bounded from below only."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim


def test_a_non_blocking_copy_to_the_device_waits_for_its_stream(sim):
    host = torch.ones(8)
    device = torch.zeros(8, device="sim")
    with sim.current_stream().held():
        device.copy_(host, non_blocking=True)
        host.fill_(5)  # as the copy has not begun, it takes this
        assert not sim.current_stream().query()
    assert device.cpu().equal(torch.full((8,), 5.0))


def test_a_non_blocking_copy_to_the_host_waits_for_its_stream(sim):
    device = torch.ones(8, device="sim")
    host = torch.zeros(8).pin_memory()
    assert host.is_pinned()
    sim.synchronize()
    with sim.current_stream().held():
        host.copy_(device, non_blocking=True)
        assert host.equal(torch.zeros(8))
    sim.current_stream().synchronize()
    assert host.equal(torch.ones(8))


def test_the_host_memory_of_a_queued_copy_lives_until_it_is_done(sim):
    device = torch.zeros(1 << 16, dtype=torch.uint8, device="sim")
    with sim.current_stream().held():
        device.copy_(torch.full((1 << 16,), 9, dtype=torch.uint8), non_blocking=True)
        junk = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(20)]
    assert (device.cpu() == 9).all()
    assert len(junk) == 20


def test_kernels_of_torch_do_not_wait_either(sim):
    device = torch.zeros(4, 3, device="sim")
    index = torch.tensor([2, 0], device="sim")
    rows = torch.ones(2, 3, device="sim")
    sim.synchronize()
    with sim.current_stream().held():
        device.fill_(4)
        device.index_copy_(0, index, rows)
        picked = device.index_select(0, index)
        assert not sim.current_stream().query()
    assert picked.cpu().equal(torch.ones(2, 3))
    assert device.cpu()[1].equal(torch.full((3,), 4.0))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_delay_delays_completion_and_its_event(sim, everywhere):
    stream = sim.Stream()
    with sim.stream(stream):
        device = torch.zeros(8, device="sim")
        stream.synchronize()
        sim.set_delay(100_000) if everywhere else stream.set_delay(100_000)
        begin = time.monotonic()
        device.fill_(1)
        event = stream.record_event()
        assert not event.query()
        assert not stream.query()
        event.synchronize()
        assert time.monotonic() - begin >= 0.1
        stream.set_delay(0)


def test_a_query_never_waits(sim):
    stream = sim.Stream()
    with stream.held():
        event = stream.record_event()
        done = threading.Event()

        def ask():
            answers.extend([event.query(), stream.query()])
            done.set()

        answers = []
        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(30), "a query waited for the stream"
        assert answers == [False, False]


def test_an_event_orders_two_streams(sim):
    one, two = sim.Stream(), sim.Stream()
    data = torch.zeros(4, device="sim")
    sim.synchronize()
    event = sim.Event()
    with one.held():
        with sim.stream(one):
            data.fill_(1)
            event.record()
        with sim.stream(two):
            event.wait()
            copy = torch.empty(4, device="sim")
            copy.copy_(data)
            after = two.record_event()
        assert not after.query()
    after.synchronize()
    assert copy.cpu().equal(torch.ones(4))


def test_a_wait_is_for_the_record_that_was_there_when_it_was_asked(sim):
    one, two = sim.Stream(), sim.Stream()
    event = one.record_event()
    one.synchronize()
    with one.held():
        with two.held():
            two.wait_event(event)
            event.record(one)
        two.synchronize()  # would never end if it waited for the second record
        assert not event.query()
    event.synchronize()


def test_an_event_recorded_again_elsewhere_is_not_reached_before_its_first_record(sim):
    one, two = sim.Stream(), sim.Stream()
    event = sim.Event()
    with one.held():
        event.record(one)
        event.record(two)
        two.synchronize()
        assert not event.query()
    event.synchronize()


def test_an_event_that_was_never_recorded_is_complete(sim):
    event = sim.Event()
    assert event.query()
    event.synchronize()
    sim.current_stream().wait_event(event)
    sim.synchronize()


def test_a_stream_waits_for_another_with_torchs_own_classes(sim):
    one, two = torch.Stream("sim"), torch.Stream("sim")
    data = torch.zeros(4, device="sim")
    sim.synchronize()
    with sim.Stream.of(one).held():
        with one:
            data.fill_(3)
        two.wait_stream(one)
        with two:
            copy = torch.empty(4, device="sim").copy_(data)
        assert not two.query()
    two.synchronize()
    assert copy.cpu().equal(torch.full((4,), 3.0))


def test_torchs_own_event_works_on_the_device(sim):
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream()
    begin.record(stream)
    sim.current_stream().sleep(20_000)
    end.record(stream)
    end.synchronize()
    assert begin.query()
    assert begin.elapsed_time(end) >= 20


def test_elapsed_time_is_at_least_the_time_between(sim):
    stream = sim.current_stream()
    begin = stream.record_event()
    stream.sleep(20_000)
    end = stream.record_event()
    with pytest.raises(RuntimeError, match="must have been reached"):
        with stream.held():
            begin.elapsed_time(stream.record_event(sim.Event()))
    end.synchronize()
    assert begin.elapsed_time(end) >= 20


@pytest.mark.parametrize("how", ["stream", "torch_stream", "device", "accelerator"])
def test_a_host_callback_runs_when_the_stream_reaches_it(sim, how):
    """However the host waits, it must let the callback have the interpreter."""
    stream = sim.default_stream()
    seen = []
    data = torch.zeros(4, device="sim")
    sim.synchronize()
    with stream.held():
        data.fill_(2)
        stream.launch_host_func(lambda: seen.append(threading.current_thread().name))
        stream.launch_host_func(lambda: seen.append("second"))
        assert seen == []
    waits = {
        "stream": stream.synchronize,
        "torch_stream": lambda: torch.Stream.synchronize(stream),
        "device": sim.synchronize,
        "accelerator": torch.accelerator.synchronize,
    }
    waits[how]()
    assert len(seen) == 2
    assert seen[1] == "second"
    assert seen[0] != threading.current_thread().name


def test_a_streams_handle_names_it_again(sim):
    stream = sim.Stream("sim:1", priority=-1)
    assert sim.Stream.from_handle(stream.sim_stream) == stream
    assert stream.device == torch.device("sim:1")
    assert stream.native_handle == stream.sim_stream
    assert sim.default_stream(1).sim_stream != sim.default_stream(0).sim_stream


def test_the_current_stream_belongs_to_a_thread_and_a_device(sim):
    stream = sim.Stream("sim:0")
    seen = []
    with sim.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join()
        assert sim.current_stream() == stream
        assert sim.current_stream(1) == sim.default_stream(1)
    assert seen == [sim.default_stream(0)]
    assert sim.current_stream() == sim.default_stream(0)


def test_a_copy_between_devices_is_ordered_with_both(sim):
    data = torch.zeros(4, device="sim:0")
    other = torch.zeros(4, device="sim:1")
    for device in range(2):
        sim.synchronize(device)
    with sim.current_stream(0).held():
        data.fill_(6)
        other.copy_(data)
        doubled = torch.empty(4, device="sim:1")
        doubled.copy_(other)
        assert not sim.current_stream(1).query()
    assert doubled.cpu().equal(torch.full((4,), 6.0))


def test_a_copy_takes_at_least_what_the_link_allows(sim):
    data = torch.zeros(1_000_000, dtype=torch.uint8)
    device = torch.empty(1_000_000, dtype=torch.uint8, device="sim")
    sim.set_link(gigabytes_per_second=0.02)  # 50 ms
    begin = time.monotonic()
    device.copy_(data)
    assert time.monotonic() - begin >= 0.05
    begin = time.monotonic()
    device.cpu()
    assert time.monotonic() - begin >= 0.05


def test_two_streams_share_the_link(sim):
    data = torch.zeros(1_000_000, dtype=torch.uint8)
    streams = [sim.Stream(), sim.Stream()]
    targets = [torch.empty(1_000_000, dtype=torch.uint8, device="sim") for _ in streams]
    sim.synchronize()
    sim.set_link(gigabytes_per_second=0.02)
    begin = time.monotonic()
    for stream, target in zip(streams, targets, strict=True):
        with sim.stream(stream):
            target.copy_(data, non_blocking=True)
    sim.synchronize()
    assert time.monotonic() - begin >= 0.1


def test_the_links_latency_is_added_to_every_kernel(sim):
    data = torch.zeros(4, device="sim")
    sim.synchronize()
    sim.set_link(latency_microseconds=20_000)
    begin = time.monotonic()
    for _ in range(3):
        data.fill_(1)
    sim.synchronize()
    assert time.monotonic() - begin >= 0.06
