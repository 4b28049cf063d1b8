"""What is asked of torch.cuda, against a module that answers as torch does."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache_cuda import driver, runtime

UUIDS = ["1b0a-0", "1b0a-1", "1b0a-2"]


class FakeTorch(SimpleNamespace):
    """Some devices, the second current; ``as_tensor`` views memory, or copies it where it is told to."""

    def __init__(self, uuids: list[str], copies: bool = False) -> None:
        super().__init__()
        self.version = SimpleNamespace(hip=None, cuda="13.0")
        self.uint8 = "uint8"
        self.made: list[Any] = []
        self.cuda = SimpleNamespace(
            current_device=lambda: 1,
            device_count=lambda: len(uuids),
            get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
            current_stream=lambda index: SimpleNamespace(cuda_stream=1000 + index),
        )
        self.copies = copies

    def device(self, kind: Any, index: int | None = None) -> Any:
        if isinstance(kind, str) and index is None:
            kind, _, text = kind.partition(":")
            index = int(text) if text else None
        if not isinstance(kind, str):
            return kind
        return _Device(kind, index)

    def as_tensor(self, memory: Any, device: Any) -> Any:
        interface = memory.__cuda_array_interface__
        ptr = interface["data"][0] + (4096 if self.copies else 0)
        self.made.append(memory)
        return SimpleNamespace(data_ptr=lambda: ptr, device=device, memory=memory)

    def empty(self, size: int, dtype: Any, device: Any) -> Any:
        return ("empty", size, dtype, device)


class _Device(tuple):
    __slots__ = ()

    def __new__(cls, kind: str, index: int | None) -> _Device:
        return super().__new__(cls, (kind, index))

    @property
    def index(self) -> int | None:
        return self[1]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch(UUIDS)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def test_a_device_is_an_index_a_name_or_the_current_one(torch: FakeTorch) -> None:
    assert [runtime.ordinal_of(device) for device in (0, "cuda:2", "cuda", None)] == [0, 2, 1, 1]
    assert runtime.current_stream("cuda:2") == (2, 1002)
    assert runtime.current_stream() == (1, 1001)


def test_a_device_is_found_by_its_uuid_and_never_guessed(
    monkeypatch: pytest.MonkeyPatch, torch: FakeTorch
) -> None:
    assert [runtime.ordinal_of_uuid(uuid) for uuid in UUIDS] == [0, 1, 2]
    with pytest.raises(
        DeviceError, match="device 1b0a-9: this process sees 1b0a-0, 1b0a-1, 1b0a-2; let both"
    ):
        runtime.ordinal_of_uuid("1b0a-9")
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(["same", "same"]))
    with pytest.raises(DeviceError, match="device same: this process sees same, same"):
        runtime.ordinal_of_uuid("same")
    monkeypatch.setitem(sys.modules, "torch", FakeTorch([]))
    with pytest.raises(DeviceError, match="this process sees none"):
        runtime.ordinal_of_uuid("any")


def test_memory_is_handed_to_torch_where_it_is_with_what_keeps_it(torch: FakeTorch) -> None:
    owner = object()
    view = runtime.bytes_at(1 << 20, 64, 1, owner)
    assert view.data_ptr() == 1 << 20
    assert view.memory.owner is owner
    interface = view.memory.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == ((64,), "|u1", (1 << 20, False))
    assert runtime.bytes_at(1 << 20, 0, 1)[1] == 0


def test_a_copy_in_place_of_a_view_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(UUIDS, copies=True))
    with pytest.raises(DeviceError, match=r"torch sees them on .*, or copies them"):
        runtime.bytes_at(1 << 20, 64, 1)


def test_the_build_of_torch_decides_on_the_driver(monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(driver, "load", asked.append)
    runtime.native.cache_clear()
    try:
        runtime.native()
        torch.version.hip = "7.0"
        runtime.native.cache_clear()
        runtime.native()
    finally:
        runtime.native.cache_clear()
    assert asked == ["cuda", "rocm"]


@pytest.mark.torch
def test_real_torch_takes_an_array_interface_without_a_copy_of_its_own_fields() -> None:
    """The fields that torch reads of the interface, by numpy's protocol of the same form, on host memory."""
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("torch")
    memory = (ctypes.c_uint8 * 8)(*range(8))
    made = runtime._Memory(ctypes.addressof(memory), 8, memory)
    host = SimpleNamespace(__array_interface__={**made.__cuda_array_interface__})
    host.__array_interface__.pop("stream")
    assert numpy.asarray(host).tolist() == list(range(8))
