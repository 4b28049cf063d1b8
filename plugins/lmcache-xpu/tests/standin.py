"""torch.xpu where there is none: queues and USM of the native module on the SYCL runtime's CPU device.

``install`` puts it in the place of ``lmcache_xpu.runtime``'s functions, which are all that names torch.xpu. Tensors are
torch's for the CPU; those of ``device_tensor`` lie in USM of the device.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from lmcache_xpu import native, runtime
from lmcache_xpu.spec import XpuDeviceSpec

_MODULE = native.load()
_QUEUE = _MODULE.queue_create(0)
"""torch's default queue; it lives as long as the process, as torch's do."""
_THREAD = threading.local()


def current_queue(device: Any = None) -> int:
    return int(getattr(_THREAD, "queue", 0) or _QUEUE)


@contextmanager
def queued_on(queue: int) -> Iterator[int]:
    """``torch.xpu.stream``."""
    before = getattr(_THREAD, "queue", 0)
    _THREAD.queue = queue
    try:
        yield queue
    finally:
        _THREAD.queue = before


class _Owned:
    """Memory that is freed with the last tensor in it."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
        self.memory.owner = self
        weakref.finalize(self, _MODULE.usm_free, ptr).atexit = False


def empty(shape: Any, dtype: Any, kind: str = "device") -> Any:
    """A tensor in USM of this kind; its contents are anything."""
    nbytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    owned = _Owned(_MODULE.usm_alloc(_QUEUE, nbytes, kind), nbytes)
    flat = torch.frombuffer(owned.memory, dtype=torch.uint8)
    return flat[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def device_tensor(value: Any, kind: str = "device") -> Any:
    """A tensor in USM with the bytes of ``value``."""
    made = empty(value.shape, value.dtype, kind)
    made.copy_(value)
    return made


def _kind(tensor: Any) -> str:
    return str(_MODULE.usm_kind(_QUEUE, tensor.data_ptr()))


class Waiting:
    """The native module, where the host may look at results, and free operands, as soon as a call returns.

    On a GPU what torch reads back waits for its queue, and memory that is freed goes to nobody before it; tensors of
    the host wait for nothing.
    """

    def __getattr__(self, name: str) -> Any:
        function = getattr(_MODULE, name)
        if name not in ("transfer", "copy_async"):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            _MODULE.queue_wait(current_queue())
            return result

        return call


@contextmanager
def installed(everything_is_device: bool = False) -> Iterator[None]:
    """Replace what needs torch.xpu. ``everything_is_device``: host tensors count as the device's.

    The CPU device reads and writes all memory of the process, so that they may.
    """
    waiting = Waiting()
    replaced = {
        "current_queue": current_queue,
        "is_on_device": (lambda tensor: True) if everything_is_device else (lambda t: _kind(t) == "device"),
        "is_pinned": lambda queue, tensor: _kind(tensor) == "host",
        "staged": lambda tensor, device: device_tensor(tensor.contiguous()),
    }
    before = {name: getattr(runtime, name) for name in replaced}
    load = native.load
    try:
        for name, value in replaced.items():
            setattr(runtime, name, value)
        if everything_is_device:
            native.load = lambda: waiting
        yield
    finally:
        native.load = load
        for name, value in before.items():
            setattr(runtime, name, value)


class Stream:
    """``torch.xpu.Stream``, on a queue of its own. To wait for another one blocks the host: that is no less."""

    def __init__(self, device: Any = None, queue: int = 0) -> None:
        self.sycl_queue = queue or _MODULE.queue_create(0)

    def synchronize(self) -> None:
        _MODULE.queue_wait(self.sycl_queue)

    wait_event = staticmethod(lambda event: event.synchronize())
    wait_stream = staticmethod(lambda other: other.synchronize())


class Event:
    """``torch.xpu.Event``: done when the whole of its stream is."""

    def record(self, stream: Stream) -> None:
        self._queue = stream.sycl_queue

    def query(self) -> bool:
        return bool(_MODULE.queue_is_idle(self._queue))

    def synchronize(self) -> None:
        _MODULE.queue_wait(self._queue)


XPU = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=lambda stream: queued_on(stream.sycl_queue),
    current_stream=lambda device=None: Stream(queue=current_queue()),
    device=lambda device: nullcontext(),
    set_device=lambda index: None,
)
"""``torch.xpu``."""


class StandinSpec(XpuDeviceSpec):
    """The wheel's spec for tensors of the host, which are the device's here."""

    device_type = "cpu"

    def _get_torch_module(self) -> Any:
        return XPU
