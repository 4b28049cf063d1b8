"""torch.cuda where there is none: streams and memory of the native module over the fake driver, tensors of the host.

``install`` puts it in the place of ``lmcache_cuda.runtime``'s functions, which are all that names torch.cuda. What is
tested is everything else. The fake driver's memory is the host's, so a tensor of the host may lie in it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lmcache_cuda import driver, runtime

_THREAD = threading.local()
PINNED: set[int] = set()
"""Addresses of host tensors that count as page-locked."""


class Stream:
    """A stream of the native module, as torch.cuda would have it."""

    def __init__(self, ordinal: int = 0, high_priority: bool = False) -> None:
        low, high = native().stream_priority_range(ordinal)
        self.device_index = ordinal
        self.priority = high if high_priority else low
        self.cuda_stream: int = native().stream_create(ordinal, self.priority)

    def synchronize(self) -> None:
        native().stream_synchronize(self.cuda_stream, self.device_index)

    def query(self) -> bool:
        return bool(native().stream_query(self.cuda_stream, self.device_index))


def kind() -> str:
    """The driver that tests run on: "cuda", or "rocm" by LMCACHE_FAKE_KIND."""
    return os.environ.get("LMCACHE_FAKE_KIND", "cuda")


@lru_cache(maxsize=1)
def fake() -> Any:
    """The controls of the fake driver, which is put into this process."""
    sys.path.insert(0, str(Path(__file__).parent / "fake"))
    import fakedriver

    return fakedriver.load(kind())


def native() -> Any:
    fake()
    return driver.load(kind())


@contextmanager
def queued_on(stream: Any) -> Iterator[Any]:
    """``torch.cuda.stream``."""
    before = getattr(_THREAD, "stream", None)
    _THREAD.stream = stream
    try:
        yield stream
    finally:
        _THREAD.stream = before


def _current_stream(device: Any = None) -> tuple[int, int]:
    stream = getattr(_THREAD, "stream", None)
    return (0, 0) if stream is None else (stream.device_index, stream.cuda_stream)


def _uuid_of(ordinal: int) -> str:
    return str(uuid.UUID(bytes=bytes(native().device_info(ordinal)["uuid"])))


def _ordinal_of(device: Any) -> int:
    return device if isinstance(device, int) else 0


def _bytes_at(ptr: int, nbytes: int, ordinal: int, owner: Any = None) -> Any:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Owned:
    def __init__(self, ptr: int, free: Any) -> None:
        weakref.finalize(self, free, 0, ptr).atexit = False


def device_tensor(value: Any, vmm: bool = False) -> Any:
    """A tensor in the fake driver's device memory with the bytes of ``value``."""
    nbytes = max(1, value.numel() * value.element_size())
    alloc, free = ("vmm_alloc", "vmm_free") if vmm else ("mem_alloc", "mem_free")
    ptr = getattr(native(), alloc)(0, nbytes)
    there = _bytes_at(ptr, nbytes, 0, _Owned(ptr, getattr(native(), free)))
    there[: value.numel() * value.element_size()].copy_(value.contiguous().view(-1).view(torch.uint8))
    return there.view(value.dtype).view(value.shape)


def _is_on_device(tensor: Any) -> bool:
    try:
        native().address_range(tensor.data_ptr(), 0)
    except RuntimeError:
        return False
    return True


class Waiting:
    """The native module, where the host may look at results, and free operands, as soon as a call returns.

    On a GPU what torch reads back waits for its stream, and memory that is freed goes to nobody before it; tensors of
    the host wait for nothing.
    """

    _WAITED = ("cachegen_", "rotary", "slot_transfer", "block_transfer", "memcpy")

    def __getattr__(self, name: str) -> Any:
        function = getattr(native(), name)
        if not name.startswith(self._WAITED):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            native().stream_synchronize(_current_stream()[1], 0)
            return result

        return call


def _no_torch_handles(*args: Any) -> Any:
    raise RuntimeError("this torch has no CUDA")


def install(everything_is_device: bool = False) -> None:
    """Replace what needs torch.cuda. ``everything_is_device``: host tensors count as the device's."""
    replaced = {
        "DEVICE_TYPE": "cpu",
        "native": native,
        "kind": kind,
        "current_ordinal": lambda: _current_stream()[0],
        "current_stream": _current_stream,
        "device_count": lambda: native().device_count(),
        "ordinal_of": _ordinal_of,
        "uuid_of": _uuid_of,
        "new_stream": Stream,
        "bytes_at": _bytes_at,
        "is_on_device": (lambda tensor: True) if everything_is_device else _is_on_device,
        "is_pinned": lambda tensor: tensor.data_ptr() in PINNED,
        "ids_for_upload": lambda values: torch.tensor(values, dtype=torch.int64),
        "upload": lambda values, ordinal: device_tensor(torch.tensor(values, dtype=torch.int64)),
        "staged": lambda tensor, ordinal: device_tensor(tensor),
        "storage_to_torch": _no_torch_handles,
        "storage_from_torch": _no_torch_handles,
    }
    if everything_is_device:
        replaced["native"] = Waiting
        replaced["device_count"] = lambda: 1
    for name, value in replaced.items():
        setattr(runtime, name, value)
