"""``torch.sim.Stream`` and ``torch.sim.Event``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from ctypes import c_double, c_uint64, c_void_p
from typing import Any

import torch

from lmcache_sim import _driver

__all__ = ["Event", "Stream", "current_stream", "default_stream", "index_of", "set_stream", "stream"]


def index_of(device: Any = None) -> int:
    """The ordinal that a device argument names: a device, an int, a string, or None for the current one."""
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    where = torch.device(device)
    if where.type != "sim":
        raise ValueError(f"device {where}: expected one of type 'sim'")
    return torch.accelerator.current_device_index() if where.index is None else where.index


# ------------------------------------------------------------------------------------------------ host callbacks
_numbers = itertools.count(1)
_callbacks: dict[int, Callable[[], Any]] = {}


@_driver.HOST_FN
def _run_callback(number: int, status: int) -> None:
    function = _callbacks.pop(number)
    if status == _driver.OK:
        function()


class Stream(torch.Stream):
    """A queue of work and the thread that does it. Streams come from a pool of 32 per device, as CUDA's do.

    Args:
        device: Where; the current device if None.
        priority: Accepted; all are alike.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **given: int) -> Stream:
        if "stream_id" in given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, torch.device("sim", index_of(device)), priority=priority)

    @property
    def sim_stream(self) -> int:
        """The stream for native code: ``lmcache_sim_stream``."""
        return ((self.device_index + 1) << 16) | self.stream_id

    def query(self) -> bool:
        """Whether all is done; never waits. Raises what failed."""
        return _driver.finished("stream_query", self.sim_stream)

    def synchronize(self) -> None:
        """Wait until all is done. Raises what failed, once; an illegal address stays until it is cleared."""
        _driver.call("stream_synchronize", self.sim_stream)

    def record_event(self, event: Any = None) -> Any:
        """Record an event here, a new one if None, and return it."""
        event = Event(self.device) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Go on only when the event's last record so far is reached. The host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Go on only when the other stream has done what is queued there by now."""
        self.wait_event(Stream.of(stream).record_event())

    def launch_host_func(self, function: Callable[[], Any]) -> None:
        """Call a function on the stream's thread, in order. It is dropped if work before it failed."""
        number = next(_numbers)
        _callbacks[number] = function
        try:
            _driver.call("host_func", self.sim_stream, _run_callback, number)
        except RuntimeError:
            del _callbacks[number]
            raise

    def set_delay(self, microseconds: int) -> None:
        """Wait so long before each kernel, copy and callback of this stream."""
        _driver.call("stream_set_delay", self.sim_stream, microseconds)

    def sleep(self, microseconds: int) -> None:
        """Queue a pause."""
        _driver.call("stream_sleep", self.sim_stream, microseconds)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While the body runs, the stream begins nothing; what it has begun it ends."""
        _driver.call("stream_pause", self.sim_stream)
        try:
            yield
        finally:
            _driver.call("stream_resume", self.sim_stream)

    @classmethod
    def of(cls, stream: torch.Stream) -> Stream:
        """The same stream as this class."""
        if isinstance(stream, cls):
            return stream
        if stream.device.type != "sim":
            raise ValueError(f"stream of {stream.device}: expected one of a 'sim' device")
        return cls._numbered(stream.device_index, stream.stream_id)

    @classmethod
    def _numbered(cls, device: int, number: int) -> Stream:
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return cls(stream_id=number, device_index=device, device_type=kind)

    @classmethod
    def from_handle(cls, handle: int) -> Stream:
        """The stream that a native handle names."""
        device = _driver.LIB.lmcache_sim_stream_device(handle)
        if device < 0:
            raise ValueError(_driver.LIB.lmcache_sim_last_error().decode())
        return cls._numbered(device, handle & 0xFFFF)


class Event:
    """A point in a stream's work. Time is always kept.

    Args:
        device: Where it will be recorded; the current device if None.
        enable_timing, blocking, interprocess: Accepted; each event can do all of these.
    """

    def __init__(
        self,
        device: Any = None,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._event: int = _driver.out(c_void_p, "event_create", index_of(device))

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        """An event of another process, to be waited for and queried; it cannot be recorded.

        Raises:
            RuntimeError: Its process has ended, it was destroyed there, or it is of another device.
        """
        event = cls.__new__(cls)
        event._event = 0
        event._event = _driver.out(c_void_p, "event_import", _driver.handle_buffer(handle))
        if event.device.index != index_of(device):
            raise RuntimeError(
                f"event of {event.device} imported for device sim:{index_of(device)}: they must agree"
            )
        return event

    @property
    def device(self) -> torch.device:
        """The device of the event."""
        return torch.device("sim", _driver.LIB.lmcache_sim_event_device(self._event))

    @property
    def event_id(self) -> int:
        """The event for native code: ``lmcache_sim_event``."""
        return self._event

    def ipc_handle(self) -> bytes:
        """64 bytes that another process of this user gives to ``from_ipc_handle`` while this event lives."""
        return _driver.handle_of("event_export", self._event)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark the point that the stream (the current one if None) has in its queue now."""
        _driver.call("event_record", self._event, self._on(stream).sim_stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make the stream (the current one if None) wait for the last record so far."""
        _driver.call("stream_wait_event", self._on(stream).sim_stream, self._event)

    def query(self) -> bool:
        """Whether the last record is reached; true if there is none. Never waits. Raises what failed."""
        return _driver.finished("event_query", self._event)

    def synchronize(self) -> None:
        """Wait on the host. Raises what failed."""
        _driver.call("event_synchronize", self._event)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; both must have been reached."""
        return float(_driver.out(c_double, "event_elapsed", self._event, end._event))

    def _on(self, stream: torch.Stream | None) -> Stream:
        return current_stream(self.device) if stream is None else Stream.of(stream)

    def __del__(self, destroy: Any = _driver.LIB.lmcache_sim_event_destroy) -> None:
        if getattr(self, "_event", 0):
            destroy(self._event)


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread on a device (the current one if None)."""
    return Stream.of(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream that is there from the start. It orders nothing for the others."""
    return Stream.from_handle(_driver.out(c_uint64, "default_stream", index_of(device)))


def set_stream(stream: torch.Stream) -> None:
    """Make it this thread's current stream, and its device the current device."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:
    """A context in which the stream is current; nothing changes if it is None."""
    return contextlib.nullcontext() if stream is None else stream
