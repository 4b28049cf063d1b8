"""The native module on a fake driver, in the process of the tests.

LMCACHE_FAKE_KIND says which driver: "cuda", "rocm", or "old", a CUDA driver without batched copies. "Device" memory
is the host's, so tensors of the host serve as operands of kernels.
"""

from __future__ import annotations

import array
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fake"))

import fakedriver

from lmcache.errors import DeviceError, LayoutError

native = pytest.importorskip(
    "lmcache_cuda._native",
    reason="lmcache-cuda is not built; pip install plugins/lmcache-cuda",
    exc_type=ImportError,
)

KIND = os.environ.get("LMCACHE_FAKE_KIND", "cuda")
ROCM = KIND == "rocm"
H2D, D2H = 0, 1

fake = fakedriver.load(KIND)
native.set_error_type(DeviceError, LayoutError)
native.use("rocm" if ROCM else "cuda")

#: The driver's name of an entry that both have, by that of CUDA.
HIP_NAMES = {
    "cuMemAlloc_v2": "hipMalloc",
    "cuMemFree_v2": "hipFree",
    "cuMemcpyAsync": "hipMemcpyAsync",
    "cuMemHostRegister_v2": "hipHostRegister",
    "cuLaunchKernel": "hipModuleLaunchKernel",
    "cuLaunchHostFunc": "hipLaunchHostFunc",
    "cuModuleLoadData": "hipModuleLoadData",
    "cuEventRecord": "hipEventRecord",
    "cuMemMap": "hipMemMap",
    "cuMemUnmap": "hipMemUnmap",
    "cuMemSetAccess": "hipMemSetAccess",
    "cuMemRelease": "hipMemRelease",
    "cuMemAddressFree": "hipMemAddressFree",
}


def entry(cuda: str) -> str:
    """The name of the driver's function in the driver of these tests."""
    return HIP_NAMES[cuda] if ROCM else cuda


def environment(kind: str | None = None, **more: str) -> dict[str, str]:
    """Of a process that finds the fake driver as it would find the real one; None: no driver at all."""
    path = [str(Path(native.__file__).parents[1]), str(Path(__file__).parent), *sys.path]
    kept = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH",)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if kind is not None:
        kept["LD_LIBRARY_PATH"] = str(fakedriver.folder(kind))
        kept["LMCACHE_FAKE_KIND"] = kind
    return {**kept, **more}


@contextmanager
def stream(device: int = 0) -> Iterator[int]:
    made = native.stream_create(device)
    try:
        yield made
    finally:
        native.stream_synchronize(made)
        native.stream_destroy(made)


@contextmanager
def device_memory(nbytes: int, device: int = 0) -> Iterator[int]:
    made = native.mem_alloc(device, nbytes)
    try:
        yield made
    finally:
        native.mem_free(device, made)


def table(values: Sequence[int], form: str, keep: list[Any]) -> tuple[Any, dict[str, int]]:
    """Integers in one of the forms that a Table has, and how many where that must be said."""
    if form == "list":
        return list(values), {}
    memory = array.array("q", values)
    if form == "buffer":
        return memory, {}
    keep.append(memory)
    return memory.buffer_info()[0], {"count": len(values)}


def read(ptr: int, nbytes: int) -> bytes:
    return ctypes.string_at(ptr, nbytes)


def write(ptr: int, data: bytes) -> None:
    ctypes.memmove(ptr, data, len(data))


def refused(call: Callable[[], Any]) -> DeviceError:
    """The error of a call that the driver fails."""
    with pytest.raises(DeviceError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value
