"""Device memory in two real processes, over the fake driver: the same bytes, and nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_cuda._native")

import standin
from peer import Peer, PeerFailed

from lmcache.errors import DeviceError
from lmcache_cuda import runtime
from lmcache_cuda.ipc import CudaIPCWrapper
from lmcache_cuda.ipc_ways import MAPPED, OFFERS, TorchHandle
from lmcache_cuda.mappings import Mapping, Mappings

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fake_cuda")]


@pytest.fixture(params=["raw", "vmm"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def beside() -> Iterator[Peer]:
    with Peer() as made:
        yield made


@pytest.fixture
def other(beside: Peer) -> Peer:
    """Another process, with nothing mapped: starting one takes seconds, so it is one for all tests."""
    beside.ask("close")
    return beside


def random(way: str, *shape: int) -> Any:
    return standin.device_tensor(torch.randint(0, 256, shape, dtype=torch.uint8), vmm=way == "vmm")


def sent(*wrappers: CudaIPCWrapper) -> list[str]:
    return [msgspec.msgpack.encode(wrapper.to_wire()).hex() for wrapper in wrappers]


def described(tensor: Any) -> list[Any]:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), raw.tolist()]


def test_views_of_every_kind_are_the_same_over_there(way: str, other: Peer) -> None:
    base = random(way, 8, 16, 32)
    views = [
        base,
        base[3],
        base[:, 4:9],
        base.transpose(0, 1)[2:7],
        base.view(-1).view(torch.bfloat16)[128:640].view(4, 128),
    ]
    wrappers = [CudaIPCWrapper.wrap(view) for view in views]
    assert other.ask("map", wires=sent(*wrappers)) == [described(view) for view in views]
    assert other.ask("mapped") == 1, "one allocation is mapped once, however many tensors lie in it"


def test_planes_of_a_layer_stay_apart_and_in_order(way: str, other: Peer) -> None:
    planes = [random(way, 4, 64), random(way, 4, 32)]
    wrapper = CudaIPCWrapper.wrap(planes)
    (seen,) = other.ask("map", wires=sent(wrapper))
    assert seen == [described(plane) for plane in planes]


def test_what_one_writes_the_other_sees_and_neighbours_are_left_alone(way: str, other: Peer) -> None:
    base = random(way, 4, 128)
    before = base.clone()
    wrapper = CudaIPCWrapper.wrap(base[2])
    other.ask("map", wires=sent(wrapper))
    base[2].fill_(3)
    assert other.ask("seen") == [described(base[2])]
    other.ask("fill", index=0, value=9)
    assert (base[2] == 9).all()
    assert torch.equal(base[[0, 1, 3]], before[[0, 1, 3]])


def test_a_mapping_ends_with_the_last_wrapper_and_tensor(way: str, other: Peer) -> None:
    tensor = random(way, 64)
    wrapper = CudaIPCWrapper.wrap(tensor)
    other.ask("map", wires=sent(wrapper))
    other.ask("map", wires=sent(wrapper))
    assert other.ask("mapped") == 1
    other.ask("close")
    assert other.ask("mapped") == 0


def test_an_allocation_is_offered_once_and_until_its_last_wrapper_is_closed_or_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "vmm")
    gc.collect()
    before = len(OFFERS)
    tensor = random("vmm", 64)
    one, two, three = (CudaIPCWrapper.wrap(tensor[at:]) for at in (0, 8, 16))
    tokens = {wrapper.to_wire()["planes"][0]["handle"]["token"] for wrapper in (one, two, three)}
    assert len(tokens) == 1
    one.close()
    one.close()
    assert len(OFFERS) == before + 1
    del two
    gc.collect()
    assert len(OFFERS) == before + 1
    del three
    gc.collect()
    assert len(OFFERS) == before


def test_a_wrapper_that_was_dropped_shares_nothing_of_what_comes_after_it(
    monkeypatch: pytest.MonkeyPatch, other: Peer
) -> None:
    """The driver gives an address again: what was shared at it must not be taken for what lies there now."""
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "vmm")
    for _ in range(8):
        tensor = random("vmm", 64)
        wrapper = CudaIPCWrapper.wrap(tensor)
        assert other.ask("map", wires=sent(wrapper))[-1] == described(tensor)
        del tensor, wrapper
        gc.collect()


def test_memory_whose_export_was_closed_is_refused_where_a_descriptor_is_needed(
    monkeypatch: pytest.MonkeyPatch, other: Peer
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "vmm")
    wrapper = CudaIPCWrapper.wrap(random("vmm", 64))
    wires = sent(wrapper)
    wrapper.close()
    with pytest.raises(PeerFailed, match=r"DeviceError: socket .* does not share this any more"):
        other.ask("map", wires=wires)
    assert other.process.poll() is None


def test_an_exporter_that_dies_leaves_readers_their_memory(way: str) -> None:
    with Peer() as exporter, Peer() as reader:
        exporter.ask("hold")  # it has a stream that will never end, too
        wire = exporter.ask("export", nbytes=256, value=11, vmm=way == "vmm")
        assert reader.ask("map", wires=[wire])[0][3] == [11] * 256
        exporter.kill()
        assert reader.ask("seen")[0][3] == [11] * 256


def test_memory_of_a_process_that_is_gone_is_an_error_in_one_line(way: str, other: Peer) -> None:
    with Peer() as exporter:
        wire = exporter.ask("export", nbytes=256, value=1, vmm=way == "vmm")
    with pytest.raises(PeerFailed, match=r"DeviceError: .+") as caught:
        other.ask("map", wires=[wire])
    assert "\n" not in str(caught.value)
    assert other.process.poll() is None


def test_what_was_imported_is_not_exported_again(way: str) -> None:
    with Peer() as exporter:
        wire = exporter.ask("export", nbytes=256, value=1, vmm=way == "vmm")
        wrapper = CudaIPCWrapper.from_wire(msgspec.msgpack.decode(bytes.fromhex(wire)))
        tensor = wrapper.to_tensor()
        with pytest.raises(ValueError, match="imported from another process cannot be exported again"):
            CudaIPCWrapper.wrap(tensor)
        wrapper.close()
        del tensor
        gc.collect()
        assert len(MAPPED) == 0


def test_another_device_than_the_named_one_is_never_taken(way: str, other: Peer) -> None:
    wrapper = CudaIPCWrapper.wrap(random(way, 64))
    data = msgspec.msgpack.decode(bytes.fromhex(sent(wrapper)[0]))
    data["planes"][0]["tensor"]["device"] = "GPU-of-nobody"
    with pytest.raises(PeerFailed, match=r"device GPU-of-nobody: this process sees .*CUDA_VISIBLE_DEVICES"):
        other.ask("map", wires=[msgspec.msgpack.encode(data).hex()])


def test_auto_takes_the_first_way_that_works_and_says_why_none_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CUDA_IPC", raising=False)
    assert CudaIPCWrapper.wrap(random("raw", 64)).to_wire()["planes"][0]["handle"]["type"] == "raw"
    assert CudaIPCWrapper.wrap(random("vmm", 64)).to_wire()["planes"][0]["handle"]["type"] == "vmm"

    def refused(*args: Any) -> Any:
        raise DeviceError("not this memory")

    class Native:
        ipc_export = vmm_export_fd = staticmethod(refused)

    tensor = random("raw", 64)
    monkeypatch.setattr(runtime, "native", lambda: Native)
    monkeypatch.setattr(runtime, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(runtime, "uuid_of", lambda ordinal: "GPU-1")
    with pytest.raises(
        DeviceError, match=r"torch: this torch .*; raw: not this memory; vmm: not.*use engine_driven"
    ):
        CudaIPCWrapper.wrap(tensor)


@pytest.mark.parametrize("value", [7, "tensor", [], [torch.zeros(2)], torch.zeros(0)])
def test_what_is_no_memory_of_a_gpu_is_refused(way: str, value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        CudaIPCWrapper.wrap(value)


def test_torch_handles_are_opened_with_what_torch_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is not to be had here: that the parts arrive where they belong is all that can be shown."""
    tensor = random("raw", 4, 64)
    given = (b"\2c" + b"h" * 64, 256, 64, b"/torch_7_8_9", 3, b"event", True)
    opened: list[Any] = []

    def from_torch(ordinal: int, handle: tuple[Any, ...]) -> Any:
        opened.append((ordinal, handle))
        return tensor.view(-1)

    monkeypatch.setenv("LMCACHE_CUDA_IPC", "torch")
    monkeypatch.setattr(runtime, "storage_to_torch", lambda tensor: given)
    monkeypatch.setattr(runtime, "storage_from_torch", from_torch)
    wire = sent(CudaIPCWrapper.wrap(tensor[1:3]))[0]
    seen = CudaIPCWrapper.from_wire(msgspec.msgpack.decode(bytes.fromhex(wire)))
    assert torch.equal(seen.to_tensor(), tensor[1:3])
    assert seen.to_tensor() is seen.to_tensor()
    assert opened == [(0, given)], "once: torch counts how often"


def test_torch_handles_of_another_make_are_left_to_the_next_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of expandable segments torch sends numbers of descriptors, to be taken out of the process that it names."""
    monkeypatch.delenv("LMCACHE_CUDA_IPC", raising=False)
    given = (b"\2e" + bytes(40), 64, 0, b"/torch_7_8_9", 3, b"event", True)
    monkeypatch.setattr(runtime, "storage_to_torch", lambda tensor: given)
    wrapper = CudaIPCWrapper.wrap(random("vmm", 64))
    assert wrapper.to_wire()["planes"][0]["handle"]["type"] == "vmm"


def test_memory_that_is_shorter_than_its_descriptor_says_is_refused(other: Peer, monkeypatch: Any) -> None:
    """A kernel that runs beyond it ends the server's context, and with it everybody's transfers."""
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "raw")
    wrapper = CudaIPCWrapper.wrap(random("raw", 64))
    data = msgspec.msgpack.decode(bytes.fromhex(sent(wrapper)[0]))
    much = 1 << 30
    data["planes"][0]["handle"]["allocation"] = data["planes"][0]["tensor"]["nbytes"] = much
    data["planes"][0]["tensor"]["shape"] = [much]
    with pytest.raises(PeerFailed, match=r"DeviceError: \d+ bytes of another process: the driver knows \d+"):
        other.ask("map", wires=[msgspec.msgpack.encode(data).hex()])
    assert other.ask("mapped") == 0


def test_memory_that_torch_opens_is_no_shorter_than_its_descriptor_says(monkeypatch: Any) -> None:
    tensor = random("raw", 64)
    handle = TorchHandle(b"\2c" + b"h" * 64, b"/torch_7_8_9", 3, b"event", True)
    monkeypatch.setattr(runtime, "storage_from_torch", lambda ordinal, handle: tensor)
    with pytest.raises(DeviceError, match="the driver knows"):
        handle.open(0, 0, 1 << 40)


def test_a_descriptor_that_names_another_process_than_the_socket_s_is_refused(
    other: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "vmm")
    wrapper = CudaIPCWrapper.wrap(random("vmm", 64))
    assert wrapper.exporter_pids == {os.getpid()}
    data = msgspec.msgpack.decode(bytes.fromhex(sent(wrapper)[0]))
    data["planes"][0]["handle"]["exporter"] = other.process.pid
    with pytest.raises(PeerFailed, match=rf"is {os.getpid()}: expected {other.process.pid}"):
        other.ask("map", wires=[msgspec.msgpack.encode(data).hex()])


def test_an_exporter_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    mappings = Mappings()

    def slow() -> Mapping:
        begun.set()
        assert goes_on.wait(60)
        return Mapping(1 << 20, 64, lambda ptr: None)

    kept: list[Mapping] = []
    twice = [threading.Thread(target=lambda: kept.append(mappings.open("slow", slow))) for _ in range(2)]
    for thread in twice:
        thread.start()
    assert begun.wait(60)
    kept.append(mappings.open("quick", lambda: Mapping(1 << 30, 64, lambda ptr: None)))
    goes_on.set()
    for thread in twice:
        thread.join(60)
    assert len({id(mapping) for mapping in kept}) == 2, "each is made once"
    with pytest.raises(DeviceError, match="nobody"):
        mappings.open("none", raises)
    assert mappings._making == {}


def raises() -> Any:
    raise DeviceError("nobody is there")
