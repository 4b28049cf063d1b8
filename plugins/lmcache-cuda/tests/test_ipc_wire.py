"""What travels for a tensor: decoded strictly, whatever the sender says, and opening nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lmcache.errors import ConfigError
from lmcache.v1.platform.base.ipc_wire import TensorMeta
from lmcache_cuda import ipc
from lmcache_cuda.ipc import CudaIPCWrapper, ways_to_try
from lmcache_cuda.ipc_ways import Plane, RawHandle, TorchHandle, VmmHandle, Wire

META = TensorMeta("bfloat16", (2, 3), (4, 1), 8, 4096, "GPU-1")
HANDLES = {
    "torch": TorchHandle(b"\2c" + b"h" * 64, b"/torch_41_9_0", 16, b"e" * 64, True),
    "raw": RawHandle(b"h" * 64, 8192),
    "vmm": VmmHandle("/run/lmcache/1.sock", b"t" * 16, 8192, 42),
}


def wire(way: str) -> dict[str, Any]:
    plane = Plane(META, HANDLES[way], 512)
    raw = msgspec.msgpack.encode(CudaIPCWrapper(Wire((plane,), True)).to_wire())
    found: dict[str, Any] = msgspec.msgpack.decode(raw)
    return found


@pytest.mark.parametrize("way", HANDLES)
def test_a_descriptor_survives_the_way_and_opens_nothing(way: str) -> None:
    made = CudaIPCWrapper.from_wire(wire(way))
    assert made.planes == (META,)
    assert made == CudaIPCWrapper.from_wire(wire(way))
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made.to_tensor()


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        node: Any = data
        *way, last = path.split(".")
        for step in way:
            node = node[int(step) if step.isdigit() else step]
        node[int(last) if last.isdigit() else last] = value

    return change


BAD = {
    "no planes": ("raw", _set("planes", [])),
    "planes are no list": ("raw", _set("planes", 7)),
    "too many planes": ("raw", lambda data: data.update(planes=data["planes"] * 65)),
    "an unknown field": ("raw", _set("planes.0.handle.extra", 1)),
    "an unknown field of the plane": ("raw", _set("planes.0.run", "sh")),
    "an unknown way": ("raw", _set("planes.0.handle.type", "pickle")),
    "a way that is no text": ("raw", _set("planes.0.handle.type", 1)),
    "a short handle": ("raw", _set("planes.0.handle.handle", b"h" * 63)),
    "a long handle": ("raw", _set("planes.0.handle.handle", b"h" * 65)),
    "a handle of text": ("raw", _set("planes.0.handle.handle", "h" * 64)),
    "a storage beyond its allocation": ("raw", _set("planes.0.start", 4097)),
    "a negative start": ("raw", _set("planes.0.start", -1)),
    "a start that is no integer": ("raw", _set("planes.0.start", 1.5)),
    "a negative size": ("raw", _set("planes.0.handle.allocation", -1)),
    "a device by index": ("raw", _set("planes.0.tensor.device", 0)),
    "an unknown type of elements": ("raw", _set("planes.0.tensor.dtype", "object")),
    "a view beyond its storage": ("raw", _set("planes.0.tensor.shape", [2, 3000])),
    "single is no truth value": ("raw", _set("single", 1)),
    "a socket that is no absolute path": ("vmm", _set("planes.0.handle.socket", "lmcache.sock")),
    "a socket with a zero byte": ("vmm", _set("planes.0.handle.socket", "/run/a\0b")),
    "a socket with a line behind it": ("vmm", _set("planes.0.handle.socket", "/run/a.sock\n")),
    "a socket's path that is too long": ("vmm", _set("planes.0.handle.socket", "/" + "a" * 107)),
    "a token that is too short": ("vmm", _set("planes.0.handle.token", b"t" * 15)),
    "no share": ("torch", _set("planes.0.handle.share", b"")),
    "a share that is too long": ("torch", _set("planes.0.handle.share", b"h" * 4097)),
    "a share of torch's that names descriptors of a process": (
        "torch",
        _set("planes.0.handle.share", b"\2e" + b"h" * 64),
    ),
    "a counter that is no file of torch's": ("torch", _set("planes.0.handle.counter", b"/lmcache-l1")),
    "a counter with a folder": ("torch", _set("planes.0.handle.counter", b"/torch_1_2_3/../x")),
    "a counter with a zero byte": ("torch", _set("planes.0.handle.counter", b"/torch_1_2_3\0")),
    "no counter": ("torch", _set("planes.0.handle.counter", b"")),
    "a count beyond torch's file": ("torch", _set("planes.0.handle.counter_offset", 10_000)),
    "a process of no number": ("vmm", _set("planes.0.handle.exporter", -1)),
    "a process that is not told": ("vmm", _set("planes.0.handle.exporter", 0)),
    "wait is no truth value": ("torch", _set("planes.0.handle.wait", None)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_descriptor_is_refused(name: str) -> None:
    way, change = BAD[name]
    data = wire(way)
    change(data)
    with pytest.raises(ValueError, match=r"descriptor of GPU memory|IPC payload"):
        CudaIPCWrapper.from_wire(data)


@pytest.mark.parametrize(("way", "pids"), [("torch", {41}), ("raw", set()), ("vmm", {42})])
def test_a_descriptor_tells_whose_memory_it_is_where_anything_in_it_does(way: str, pids: set[int]) -> None:
    assert CudaIPCWrapper.from_wire(wire(way)).exporter_pids == pids


def test_with_isolated_processes_no_number_of_one_is_taken_for_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_ISOLATED_IPC", "1")
    assert CudaIPCWrapper.from_wire(wire("vmm")).exporter_pids == frozenset()
    data = wire("vmm")
    data["planes"][0]["handle"]["exporter"] = 0
    CudaIPCWrapper.from_wire(data)
    with pytest.raises(ValueError, match="torch's handles are not taken with LMCACHE_CUDA_ISOLATED_IPC=1"):
        CudaIPCWrapper.from_wire(wire("torch"))


@pytest.mark.torch
def test_torch_names_its_files_with_the_process_as_is_looked_for() -> None:
    torch = pytest.importorskip("torch")
    name = torch.zeros(1).untyped_storage()._share_filename_cpu_()[1]
    assert TorchHandle(b"\2c" + b"h" * 64, name, 0, b"", False).exporter == os.getpid()


POLICY = {
    ("auto", "0"): ("torch", "raw", "vmm"),
    ("auto", "1"): ("raw", "vmm"),
    ("torch", "0"): ("torch",),
    ("raw", "0"): ("raw",),
    ("raw", "1"): ("raw",),
    ("vmm", "0"): ("vmm",),
    ("vmm", "1"): ("vmm",),
    ("torch", "1"): None,
}


@pytest.mark.parametrize(("asked", "isolated"), POLICY)
def test_the_policy_decides_which_ways_are_tried(
    monkeypatch: pytest.MonkeyPatch, asked: str, isolated: str
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", asked)
    monkeypatch.setenv("LMCACHE_CUDA_ISOLATED_IPC", isolated)
    expected = POLICY[asked, isolated]
    if expected is None:
        with pytest.raises(ConfigError, match="need a shared /dev/shm; use raw or vmm"):
            ways_to_try()
    else:
        assert ways_to_try() == expected


def test_the_first_way_is_what_is_taken_unless_something_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("LMCACHE_CUDA_IPC", "LMCACHE_CUDA_ISOLATED_IPC"):
        monkeypatch.delenv(variable, raising=False)
    assert ipc.ways_to_try()[0] == "torch"
