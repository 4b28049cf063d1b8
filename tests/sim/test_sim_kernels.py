"""Native kernels on the simulated device: what they may do, and what is caught when they do something else."""

from __future__ import annotations

import itertools
import time

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim


@pytest.fixture
def data(sim):
    return torch.arange(100, dtype=torch.uint8).to("sim")


def handle(sim):
    return sim.current_stream().sim_stream


def test_a_kernel_runs_on_its_stream_in_order(sim, kernels, data):
    stream = sim.Stream()
    with stream.held():
        for _ in range(3):
            assert kernels.add_one(stream.sim_stream, data.data_ptr(), 50, 50) == 0
        assert not stream.query()
    stream.synchronize()
    expected = torch.arange(100, dtype=torch.uint8)
    expected[:50] += 3
    assert data.cpu().equal(expected)


def test_a_handle_that_is_no_stream_is_refused(sim, kernels, data):
    assert kernels.add_one(0, data.data_ptr(), 1, 1) != 0
    assert kernels.add_one(12345, data.data_ptr(), 1, 1) != 0
    with pytest.raises(ValueError, match="stream handle"):
        sim.Stream.from_handle(0xDEADBEEF)


def test_a_range_that_leaves_its_allocation_is_an_illegal_address_until_it_is_cleared(sim, kernels, data):
    before = data.cpu()
    assert kernels.add_one(handle(sim), data.data_ptr() + 50, 51, 51) == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"illegal address.*leaves its allocation"):
            sim.synchronize()
    with pytest.raises(RuntimeError, match="illegal address"):
        data + 1
    sim.clear_error()
    assert data.cpu().equal(before), "a refused kernel must not have written"


def test_an_address_outside_of_all_allocations_is_an_illegal_address(sim, kernels, data):
    assert kernels.add_one(handle(sim), data.data_ptr() + (1 << 30), 1, 1) == 0
    with pytest.raises(RuntimeError, match="in no allocation"):
        sim.synchronize()


@pytest.mark.parametrize("address", [8, None], ids=["wild", "untranslated"])
def test_a_kernel_that_faults_ends_with_an_error_not_with_the_process(sim, kernels, data, address):
    assert kernels.poke(handle(sim), address or data.data_ptr()) == 0
    with pytest.raises(RuntimeError, match="illegal address"):
        sim.synchronize()


def test_nothing_runs_after_an_illegal_address(sim, kernels, data):
    before = data.cpu()
    stream = sim.Stream()
    with stream.held():
        kernels.poke(stream.sim_stream, 8)
        kernels.add_one(stream.sim_stream, data.data_ptr(), 10, 10)
        event = stream.record_event()
    with pytest.raises(RuntimeError, match="failed"):
        event.synchronize()
    sim.clear_error()
    assert data.cpu().equal(before)


def test_a_kernels_own_failure_is_reported_once(sim, kernels, data):
    called = []
    stream = sim.Stream()
    with stream.held():
        kernels.give_up(stream.sim_stream)
        stream.launch_host_func(lambda: called.append(1))
        event = stream.record_event()
    with pytest.raises(RuntimeError, match="work before the event failed"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="this kernel gives up"):
        stream.synchronize()
    stream.synchronize()
    assert called == [], "what follows a failure must not be told that all is well"
    kernels.add_one(stream.sim_stream, data.data_ptr(), 1, 1)
    stream.record_event(event)
    event.synchronize()


@pytest.mark.parametrize("extra", [1, 4096])
def test_bytes_written_past_the_end_are_found(sim, kernels, data, extra):
    assert kernels.overrun(handle(sim), data.data_ptr(), 100 + extra) == 0
    with pytest.raises(
        RuntimeError, match="guard of sim:0 damaged: 0 bytes after the allocation of 100 bytes"
    ):
        sim.check_guards()
    sim.check_guards()


def test_bytes_written_before_the_start_are_found(sim, kernels):
    blocks = [torch.zeros(4096, dtype=torch.uint8, device="sim") for _ in range(16)]
    starts = sorted(block.data_ptr() for block in blocks)
    low = next(a for a, b in itertools.pairwise(starts) if b - a == 3 * 4096)  # a neighbour follows
    # From the end of the lower one over its guard into the header of the upper one.
    assert kernels.overrun(handle(sim), low, 2 * 4096 + 100) == 0
    with pytest.raises(RuntimeError, match="guard of sim:0 damaged"):
        sim.check_guards()


def test_damage_is_found_when_the_memory_is_gone_already(sim, kernels):
    data = torch.zeros(64, dtype=torch.uint8, device="sim")
    assert kernels.overrun(handle(sim), data.data_ptr(), 65) == 0
    sim.synchronize()
    del data
    with pytest.raises(RuntimeError, match="allocation of 64 bytes"):
        sim.check_guards()


def test_bytes_that_a_kernel_moves_over_the_link_take_their_time(sim, kernels, data):
    host = torch.zeros(100, dtype=torch.uint8)
    sim.set_link(gigabytes_per_second=2e-6)  # 100 bytes in 50 ms
    begin = time.monotonic()
    assert kernels.to_host(handle(sim), host.data_ptr(), data.data_ptr(), 100) == 0
    sim.synchronize()
    assert time.monotonic() - begin >= 0.05
    assert host.equal(torch.arange(100, dtype=torch.uint8))
