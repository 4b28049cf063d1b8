"""Memory of the simulated device: out of the host's reach, limited, given back, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

READ = """
import ctypes, torch, lmcache_sim
data = torch.arange(8, dtype=torch.uint8).to("sim")
print(bytes((ctypes.c_uint8 * 8).from_address(data.data_ptr())))
"""

SMALL = """
import torch, lmcache_sim
held = []
try:
    while True:
        held.append(torch.zeros(1 << 20, dtype=torch.uint8, device="sim"))
except torch.OutOfMemoryError as exc:
    print(len(held), str(exc).splitlines()[0])
held.clear()
torch.zeros(16 << 20, dtype=torch.uint8, device="sim")
torch.sim.synchronize()
print(torch.sim.memory_info()["reserved"])
"""


def test_the_host_cannot_touch_device_memory(run_python):
    done = run_python(READ, LMCACHE_SIM_PROTECT="1")
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == ""


def test_the_protection_can_be_turned_off(run_python):
    done = run_python(READ, LMCACHE_SIM_PROTECT="0")
    assert done.stdout.strip() == repr(bytes(range(8))), done.stderr


def test_a_full_device_says_so_and_serves_again_when_memory_is_freed(run_python):
    done = run_python(SMALL, LMCACHE_SIM_MEMORY="16MiB")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("16 sim:0 is out of memory: tried to allocate 1048576 bytes")
    assert int(second) == 0


def test_each_device_has_memory_of_its_own(sim):
    before = [sim.memory_allocated(d) for d in range(2)]
    data = torch.zeros(1 << 20, dtype=torch.uint8, device="sim:1")
    assert [sim.memory_allocated(d) - b for d, b in enumerate(before)] == [0, 1 << 20]
    assert data.device == torch.device("sim:1")
    assert torch.accelerator.memory_allocated(1) == sim.memory_allocated(1)


def arena_bytes() -> int:
    """What the host has given to all devices of this process."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "lmcache-sim-memory" in os.readlink(f"/proc/self/fd/{fd}"):
                total += os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def test_memory_is_the_hosts_again_when_it_is_freed(sim):
    torch.zeros(1, device="sim")
    sim.synchronize()
    sim.memory_info()  # ends what was freed by now
    before = arena_bytes()
    data = torch.ones(8 << 20, dtype=torch.uint8, device="sim")
    sim.synchronize()
    assert arena_bytes() - before >= 8 << 20
    del data
    sim.memory_info()
    assert arena_bytes() == before


def test_freed_memory_is_not_reused_before_queued_work_is_done(sim):
    data = torch.full((1 << 16,), 7, dtype=torch.uint8, device="sim")
    sim.synchronize()
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    allocated = sim.memory_allocated()
    with sim.current_stream().held():
        host.copy_(data, non_blocking=True)
        address = data.data_ptr()
        del data
        assert sim.memory_allocated() == allocated - (1 << 16)
        assert sim.memory_reserved() >= allocated
        others = [torch.empty(1 << 16, dtype=torch.uint8, device="sim") for _ in range(4)]
        assert address not in {other.data_ptr() for other in others}
    sim.synchronize()
    assert (host == 7).all()


def test_memory_of_another_stream_is_safe_without_record_stream(sim):
    stream = sim.Stream()
    data = torch.full((1 << 16,), 3, dtype=torch.uint8, device="sim")
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    sim.synchronize()
    with stream.held():
        with sim.stream(stream):
            host.copy_(data, non_blocking=True)
        del data
        torch.full((1 << 16,), 9, dtype=torch.uint8, device="sim")
        sim.current_stream().synchronize()
    stream.synchronize()
    assert (host == 3).all()


def test_statistics_count_what_lives(sim):
    before = sim.memory_info()
    data = [torch.zeros(5000, dtype=torch.uint8, device="sim") for _ in range(3)]
    info = sim.memory_info()
    assert info["allocations"] - before["allocations"] == 3
    assert info["allocated"] - before["allocated"] == 3 * 8192, "whole pages are counted"
    assert sim.mem_get_info() == (info["capacity"] - info["reserved"], info["capacity"])
    assert sim.max_memory_allocated() >= info["allocated"]
    assert torch.accelerator.get_memory_info() == sim.mem_get_info()
    del data
    assert sim.memory_info()["allocations"] == before["allocations"]


def test_pinned_memory_is_known_and_a_range_is_registered_once(sim):
    buffer = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(buffer)
    sim.host_register(address, 8192)
    with pytest.raises(RuntimeError, match="not registered yet"):
        sim.host_register(address + 4096, 4096)
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    assert view.is_pinned()
    sim.host_unregister(address)
    assert not view.is_pinned()
    with pytest.raises(RuntimeError, match="registered range"):
        sim.host_unregister(address)


def test_a_tensor_over_an_address_owns_nothing(sim):
    data = torch.arange(12, dtype=torch.int32).to("sim")
    view = sim.tensor_from_ptr(data.data_ptr() + 16, (2, 4), torch.int32, data.device)
    view += 100
    del view
    expected = torch.arange(12, dtype=torch.int32)
    expected[4:] += 100
    assert data.cpu().equal(expected)
    with pytest.raises(RuntimeError, match="expected a part of"):
        sim.tensor_from_ptr(data.data_ptr(), (13,), torch.int32, data.device)


def test_nothing_is_left_after_200_rounds(sim):
    def round_trip():
        data = torch.arange(64.0).to("sim")
        event = sim.Event()
        with sim.stream(sim.Stream()):
            copy = data.clone()
            event.record()
        event.synchronize()
        sim.current_stream().launch_host_func(lambda: None)
        assert (data + copy).sum().item() == 2 * sum(range(64))

    def counts():
        sim.synchronize()
        with open("/proc/self/maps") as maps:
            simulated = sum("lmcache-sim" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), simulated, sim.memory_info()["allocations"], arena_bytes()

    for _ in range(40):  # all streams of the pool are running then
        round_trip()
    before = counts()
    for _ in range(200):
        round_trip()
    assert counts() == before
