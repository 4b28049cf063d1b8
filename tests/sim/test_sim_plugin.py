"""What the plugin does beside what the conformance kit asks of it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim


@pytest.fixture
def ops(sim: Any) -> Any:
    from lmcache.v1.platform import resolve_device_ops

    return resolve_device_ops("sim")


def test_native_code_answers_the_transfers_and_is_of_this_abi(ops: Any) -> None:
    from lmcache.v1.platform.base.op_contract import NATIVE_ABI

    report = ops.binding_report()
    assert report.abi == NATIVE_ABI
    assert report.refused == {}
    assert {"multi_layer_block_kv_transfer", "multi_layer_kv_transfer", "single_layer_kv_transfer"} <= {
        *report.bound
    }


def test_copies_by_address_go_both_ways(ops: Any, sim: Any) -> None:
    host = torch.arange(1000, dtype=torch.int32)
    back = torch.zeros(1000, dtype=torch.int32)
    there = torch.zeros(1000, dtype=torch.int32, device="sim")
    ops.lmcache_memcpy_async(there.data_ptr(), host.data_ptr(), 4000, 0, 0, 1)
    ops.lmcache_memcpy_async(back.data_ptr(), there.data_ptr(), 4000, 1, 0, 1)
    sim.synchronize()
    assert torch.equal(back, host)


def test_a_copy_that_goes_the_wrong_way_is_refused(ops: Any, sim: Any) -> None:
    host, there = torch.ones(8), torch.zeros(8, device="sim")
    with pytest.raises(ValueError, match="expected"):
        ops.lmcache_memcpy_async(there, host, 32, 1, 0, 1)
    with pytest.raises(ValueError, match="nbytes=33"):
        ops.lmcache_memcpy_async(there, host, 33, 0, 0, 1)
    with pytest.raises(TypeError):
        ops.lmcache_memcpy_async(there, host.data_ptr(), 32, 0, 0, 1)
    sim.synchronize()
    assert not there.cpu().any()


def test_slots_go_to_an_object_on_the_host_and_back(ops: Any, sim: Any) -> None:
    pages = torch.arange(6 * 4 * 8, dtype=torch.int16).view(6, 4, 8)
    layers = [pages.to("sim"), (pages + 1000).to("sim")]
    pointers = torch.tensor([layer.data_ptr() for layer in layers]).to("sim")
    slots = torch.tensor([23, -1, 0, 9]).to("sim")
    kv = torch.full((1, 2, 4, 8), -7, dtype=torch.int16)
    ops.multi_layer_kv_transfer(kv, pointers, slots, "sim", 24, 1, 3, 4)
    sim.synchronize()
    wanted = torch.stack([pages.view(24, 8), pages.view(24, 8) + 1000])[None][:, :, [23, 0, 0, 9]]
    wanted[:, :, 1] = -7
    assert torch.equal(kv, wanted)


def test_a_block_id_beyond_the_pages_fails_the_stream_and_moves_nothing(ops: Any, sim: Any) -> None:
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc

    pages, obj = torch.ones(4, 2, 8, device="sim"), torch.zeros(1, 1, 4, 8, device="sim")
    desc = PageBufferShapeDesc(1, 1, 4, 2, 1, 8, 4)
    arguments = ("sim", 1, desc, 4, 3)
    with pytest.raises(ValueError, match="block id 4: expected 0 to 3"):
        ops.multi_layer_block_kv_transfer([pages.data_ptr()], [obj.data_ptr()], [0, 4], *arguments)
    ids = torch.tensor([0, 4]).to("sim")
    ops.multi_layer_block_kv_transfer([pages.data_ptr()], [obj.data_ptr()], ids, *arguments)
    with pytest.raises(RuntimeError, match="block id is out of range"):
        sim.synchronize()
    assert not obj.cpu().any()


def test_a_completion_behind_work_that_failed_is_not_told(ops: Any, sim: Any) -> None:
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc

    pages, obj = torch.ones(4, 2, 8, device="sim"), torch.zeros(1, 1, 4, 8, device="sim")
    ids = torch.tensor([9]).to("sim")
    desc = PageBufferShapeDesc(1, 1, 4, 2, 1, 8, 4)
    handle = sim.current_stream().sim_stream
    ops.multi_layer_block_kv_transfer([pages.data_ptr()], [obj.data_ptr()], ids, "sim", 1, desc, 4, 3)
    ops.record_completion_on_stream(handle, "test", b"never")
    with pytest.raises(RuntimeError):
        sim.synchronize()
    ops.record_completion_on_stream(handle, "test", b"told")
    sim.synchronize()
    assert ops.drain_recorded_completions() == [("test", b"told")]


def test_events_for_observers_come_with_their_time_in_order(ops: Any, sim: Any) -> None:
    handle = sim.current_stream().sim_stream
    for number in range(3):
        ops.record_event_on_stream(handle, "t", "s", {"a": "b"}, {"n": number})
    sim.synchronize()
    drained = ops.drain_recorded_events()
    assert [(kind, session, texts, numbers) for kind, session, _, texts, numbers in drained] == [
        ("t", "s", {"a": "b"}, {"n": number}) for number in range(3)
    ]
    times = [event[2] for event in drained]
    assert times == sorted(times)


def test_pinned_memory_is_registered_with_the_driver_and_only_once(sim: Any) -> None:
    from lmcache_sim_plugin.pinning import SimPinMemoryBackend

    backend = SimPinMemoryBackend()
    memory = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert not tensor.is_pinned()
    assert backend.pin_memory(address, 1 << 16)
    assert tensor.is_pinned()
    assert not backend.pin_memory(address + 4096, 4096), "part of it is pinned"
    assert backend.unpin_memory(address)
    assert not tensor.is_pinned()
    assert not backend.locked


def test_memory_that_is_not_there_is_not_pinned(sim: Any) -> None:
    from lmcache_sim_plugin.pinning import SimPinMemoryBackend

    there = torch.zeros(4096, device="sim")
    assert not SimPinMemoryBackend().pin_memory(4096, 4096)
    assert there.numel() == 4096


def test_a_handle_that_does_not_fit_its_memory_is_refused(sim: Any) -> None:
    from lmcache_sim_plugin.ipc import SimIPCWrapper

    from lmcache.errors import DeviceError

    tensor = torch.zeros(4096, dtype=torch.uint8, device="sim")
    wire = dict(SimIPCWrapper.wrap(tensor).to_wire())
    (plane,) = wire["planes"]
    beyond = {**wire, "planes": [{**plane, "start": 1 << 20}]}
    with pytest.raises(DeviceError, match="does not fit"):
        SimIPCWrapper.from_wire(beyond).to_tensor()
    for change in ({"handle": b"short"}, {"start": -1}, {"more": 1}):
        with pytest.raises(ValueError, match=r".+"):
            SimIPCWrapper.from_wire({**wire, "planes": [{**plane, **change}]})
    assert torch.equal(SimIPCWrapper.from_wire(wire).to_tensor().cpu(), tensor.cpu())
