"""Memory and events of the simulated device between processes, and what the death of one does to the other."""

from __future__ import annotations

import gc
import os

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

# The other process has no torch: the driver needs none. Device 1 holds 10000 int32 from 0.
OWNER = """
data = driver.out(c_uint64, "malloc", 1, 40000)
stream = driver.out(c_uint64, "default_stream", 1)
host = (c_int32 * 10000)(*range(10000))
driver.call("memcpy_async", stream, data, addressof(host), 40000, 1)
driver.call("synchronize", 1)
room = (c_uint8 * 64)()
offset = driver.out(c_uint64, "ipc_export", data + 400, room)
say(bytes(room).hex()); say(offset)
while (order := hear()) and order != "end":
    if order == "sum":
        driver.call("memcpy_async", stream, addressof(host), data, 40000, 2)
        driver.call("synchronize", 1)
        say(sum(host))
    elif order == "free":
        driver.call("free", data)
        say("freed")
    elif order == "guards":
        try:
            driver.call("check_guards", 1)
            say("whole")
        except RuntimeError as exc:
            say(exc)
"""

EVENTS = """
stream = driver.out(c_uint64, "default_stream", 0)
event = driver.out(c_void_p, "event_create", 0)
driver.call("stream_pause", stream)
driver.call("event_record", event, stream)
say(driver.handle_of("event_export", event).hex())
order = hear()
if order == "destroy":
    driver.call("event_destroy", event)
driver.call("stream_resume", stream)
driver.call("synchronize", 0)
say("done")
hear()
"""

OPEN = """
try:
    base = driver.out(c_uint64, "ipc_open", driver.handle_buffer(bytes.fromhex(hear())))
    say(driver.out(driver.PointerInfo, "get_pointer_info", base).device)
    uuid = (c_uint8 * 16)()
    driver.call("device_uuid", 0, uuid)
    say(bytes(uuid).hex())
except RuntimeError as exc:
    say(exc)
"""


@pytest.fixture
def owner(sim, child):
    one = child(OWNER)
    one.handle, one.offset = bytes.fromhex(one.hear()), int(one.hear())
    return one


@pytest.fixture
def marker(sim, child):
    """A process with a stream that is held before the record of an exported event."""
    one = child(EVENTS)
    one.handle = bytes.fromhex(one.hear())
    return one


def opened(sim, handle):
    return sim.open_tensor(handle).view(torch.int32)


def test_both_processes_see_the_same_bytes(sim, owner):
    data = opened(sim, owner.handle)
    assert data.device == torch.device("sim:1")
    assert owner.offset == 400
    assert data.cpu().equal(torch.arange(10000, dtype=torch.int32))
    data[owner.offset // 4 :].zero_()
    sim.synchronize(1)
    owner.say("sum")
    assert int(owner.hear()) == sum(range(100))


def test_a_mapping_outlives_the_process_that_was_killed(sim, owner):
    data = opened(sim, owner.handle)
    owner.kill()
    assert data.cpu().equal(torch.arange(10000, dtype=torch.int32))
    data += 1
    assert data.sum().item() == sum(range(1, 10001))


def test_memory_of_a_process_that_has_ended_cannot_be_opened(sim, owner):
    owner.kill()
    with pytest.raises(RuntimeError, match="that process has ended"):
        sim.ipc_open(owner.handle)


def test_memory_that_its_owner_has_freed_cannot_be_opened(sim, owner):
    owner.say("free")
    owner.hear()
    with pytest.raises(RuntimeError, match="it has been freed there"):
        sim.ipc_open(owner.handle)


def test_a_stale_mapping_is_not_read(sim, owner):
    data = opened(sim, owner.handle)
    owner.say("free")
    owner.hear()
    with pytest.raises(RuntimeError, match="stale mapping"):
        data.cpu()


def test_bytes_past_the_end_of_foreign_memory_are_found_by_its_owner(sim, owner, kernels):
    data = opened(sim, owner.handle)
    kernels.overrun(sim.current_stream(1).sim_stream, data.data_ptr(), 40001)
    sim.synchronize(1)
    owner.say("guards")
    assert "0 bytes after the allocation of 40000 bytes" in owner.hear()
    owner.say("guards")
    assert owner.hear() == "whole"


def test_opened_twice_it_is_mapped_once_until_both_are_closed(sim, owner):
    first = sim.ipc_open(owner.handle)
    assert sim.ipc_open(owner.handle) == first
    assert sim.memory_info(1)["imported"] == 1
    sim.ipc_close(first)
    assert sim.memory_info(1)["imported"] == 1
    assert sim.tensor_from_ptr(first, (4,), torch.int32, 1).cpu().tolist() == [0, 1, 2, 3]
    sim.ipc_close(first)
    assert sim.memory_info(1)["imported"] == 0
    with pytest.raises(RuntimeError, match="not yet closed"):
        sim.ipc_close(first)


def test_memory_is_unmapped_only_when_queued_work_is_done(sim, owner):
    data = opened(sim, owner.handle)
    host = torch.zeros(10000, dtype=torch.int32)
    stream = sim.current_stream(1)
    with stream.held():
        host.copy_(data, non_blocking=True)
        del data
        gc.collect()
    stream.synchronize()
    assert host.equal(torch.arange(10000, dtype=torch.int32))


def test_a_process_that_opens_its_own_memory_gets_its_own_address(sim):
    data = torch.zeros(64, device="sim")
    handle, offset = sim.ipc_export(data[3:])
    base = sim.ipc_open(handle)
    assert (base, offset) == (data.data_ptr(), 12)
    sim.ipc_close(base)
    assert data.cpu().equal(torch.zeros(64)), "closing must not free what is its own"


def test_foreign_memory_cannot_be_exported_again(sim, owner):
    data = opened(sim, owner.handle)
    with pytest.raises(RuntimeError, match="belongs to another process"):
        sim.ipc_export(data)


@pytest.mark.parametrize("place", [0, 5, 8, 20, 40, 63])
def test_a_damaged_handle_is_refused(sim, owner, place):
    damaged = bytearray(owner.handle)
    damaged[place] ^= 0x40
    with pytest.raises(RuntimeError, match="none of a simulated device"):
        sim.ipc_open(bytes(damaged))
    with pytest.raises(ValueError, match="64"):
        sim.ipc_open(owner.handle[:-1])
    with pytest.raises(RuntimeError, match="none of a simulated device's event"):
        sim.Event.from_ipc_handle(1, owner.handle)


def test_a_device_that_the_opener_does_not_see_is_named(sim, owner, child):
    other = child(OPEN, LMCACHE_SIM_VISIBLE_DEVICES="0")
    other.say(owner.handle.hex())
    assert "machine's device 1, which this process does not see" in other.hear()


def test_ordinals_may_differ_where_the_uuid_is_the_same(sim, owner, child):
    other = child(OPEN, LMCACHE_SIM_VISIBLE_DEVICES="1")
    other.say(owner.handle.hex())
    assert other.hear() == "0"
    assert other.hear() == sim.get_device_properties(1).uuid.replace("-", "")


def test_a_stream_waits_for_the_event_of_another_process(sim, marker):
    event = sim.Event.from_ipc_handle("sim:0", marker.handle)
    stream = sim.Stream("sim:0")
    event.wait(stream)
    after = stream.record_event()
    assert not event.query()
    assert not after.query()
    marker.say("go")
    after.synchronize()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("who", ["stream", "host"])
def test_a_waiter_ends_with_an_error_when_the_owner_is_killed(sim, marker, who):
    event = sim.Event.from_ipc_handle("sim:0", marker.handle)
    data = torch.zeros(4, device="sim")
    sim.synchronize()
    stream = sim.Stream("sim:0")
    if who == "stream":
        event.wait(stream)
        with sim.stream(stream):
            data.fill_(1)
        after = stream.record_event()
    marker.kill()
    if who == "stream":
        with pytest.raises(RuntimeError, match="failed"):
            after.synchronize()
        with pytest.raises(
            RuntimeError, match=r"event of process \d+ was never reached: that process has ended"
        ):
            stream.synchronize()
        assert data.cpu().equal(torch.zeros(4)), "what was to follow the event must not have happened"
    with pytest.raises(RuntimeError, match="was never reached"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="was never reached"):
        event.query()


def test_an_event_that_was_reached_stays_so_when_its_owner_is_killed(sim, marker):
    event = sim.Event.from_ipc_handle("sim:0", marker.handle)
    marker.say("go")
    event.synchronize()
    marker.kill()
    assert event.query()
    event.synchronize()


def test_an_event_cannot_be_opened_when_its_owner_is_gone_or_has_destroyed_it(sim, marker, child):
    other = child(EVENTS)
    handle = bytes.fromhex(other.hear())
    other.say("destroy")
    assert other.hear() == "done"
    with pytest.raises(RuntimeError, match="it has been destroyed there"):
        sim.Event.from_ipc_handle("sim:0", handle)
    marker.kill()
    with pytest.raises(RuntimeError, match="that process has ended"):
        sim.Event.from_ipc_handle("sim:0", marker.handle)


def test_an_imported_event_cannot_be_recorded_nor_exported(sim, marker):
    event = sim.Event.from_ipc_handle("sim:0", marker.handle)
    with pytest.raises(RuntimeError, match="only its owner can record"):
        event.record()
    with pytest.raises(RuntimeError, match="only its owner can export"):
        event.ipc_handle()
    with pytest.raises(RuntimeError, match="they must agree"):
        sim.Event.from_ipc_handle("sim:1", marker.handle)


def test_nothing_is_left_after_200_rounds_of_opening(sim, owner, marker):
    def round_trip():
        data = opened(sim, owner.handle)
        event = sim.Event.from_ipc_handle("sim:0", marker.handle)
        assert not event.query()
        assert data[5].item() == 5

    def counts():
        sim.synchronize(1)
        with open("/proc/self/maps") as maps:
            simulated = sum("lmcache-sim" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), simulated, sim.memory_info(1)["imported"]

    round_trip()
    before = counts()
    for _ in range(200):
        round_trip()
    assert counts() == before
