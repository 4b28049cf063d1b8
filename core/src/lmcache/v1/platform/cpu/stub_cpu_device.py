"""A stand-in for ``torch.<device>`` on hosts without an accelerator.

It has the part of a torch device module that device-neutral code uses. Work on the CPU is done when a call
returns, so the stub's streams are empty and an event recorded on one is complete. Events know the streams
that do hold work, too (``CpuStream``, or anything with ``launch_host_func``). ``is_available()`` is False: code
that wants an accelerator must not mistake this for one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

__all__ = [
    "STUB_CPU_DEVICE",
    "StubCPUDevice",
    "StubDeviceProperties",
    "StubEvent",
    "StubStream",
    "enqueue",
]

_DEADLINE = 30.0
_UUID = "00000000-0000-0000-0000-000000000000"
_IPC_HANDLE = b"lmcache-stub-cpu-event"


@dataclass(frozen=True)
class StubDeviceProperties:
    """Properties of the stub; zero memory, because the host's memory is not a device's to give."""

    name: str = "StubCPU"
    uuid: str = _UUID
    total_memory: int = 0
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 0


def enqueue(stream: Any, callback: Callable[[Any], Any]) -> None:
    """Call ``callback(None)`` when ``stream`` gets there: at once where it is not one that holds work."""
    launch = getattr(stream, "launch_host_func", None)
    if launch is None:
        callback(None)
    else:
        launch(callback, None)


class StubEvent:
    """An event for use inside this process; ``CpuEventIPCBackend`` has those that order processes.

    Complete as long as it was not recorded, and then when the stream of its last record gets there.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._timed = enable_timing
        self._at = 0.0
        self._reached: threading.Event | None = None

    def record(self, stream: Any = None) -> None:
        self._reached = reached = threading.Event()

        def arrive(_: object) -> None:
            self._at = time.perf_counter()
            reached.set()

        enqueue(stream, arrive)

    def wait(self, stream: Any = None, timeout: float = _DEADLINE) -> None:
        """Let later work on ``stream`` wait. On a stream that holds no work this blocks the host."""
        reached = self._reached
        if reached is not None and not reached.is_set():
            enqueue(stream, lambda _: _wait(reached, timeout))

    def query(self) -> bool:
        return self._reached is None or self._reached.is_set()

    def synchronize(self, timeout: float = _DEADLINE) -> None:
        """Block the host until complete; TimeoutError after ``timeout`` seconds."""
        if self._reached is not None:
            _wait(self._reached, timeout)

    def elapsed_time(self, end_event: StubEvent) -> float:
        """Milliseconds from this event's record to the other's; both need ``enable_timing``."""
        if not (self._timed and end_event._timed):
            raise ValueError("elapsed_time needs two events made with enable_timing=True")
        return (end_event._at - self._at) * 1e3

    def ipc_handle(self) -> bytes:
        """Constant bytes, which stand for a complete event; RuntimeError while this one is not."""
        if not self.query():
            raise RuntimeError("an event of the CPU stub that is not complete cannot go to another process")
        return _IPC_HANDLE

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> StubEvent:
        if handle != _IPC_HANDLE:
            raise ValueError(f"not an event handle of the CPU stub: {handle[:32]!r}")
        return cls(interprocess=True)


def _wait(reached: threading.Event, timeout: float) -> None:
    if not reached.wait(timeout):
        raise TimeoutError(f"event of the CPU stub: not complete after {timeout:g} s")


class StubStream:
    """A stream that never holds work. Answers as a torch stream and as an external one (``ptr``)."""

    cuda_stream: int = 0
    ptr: int = 0

    def __init__(self, device: Any = "cpu", priority: int = 0, **_: Any) -> None:
        self.device = device
        self.priority = priority

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None:
        """Block the host until ``event`` is complete: there is no queue to put the wait into."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Block the host until what is on ``stream`` now is done."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = StubEvent() if event is None else event
        event.record(self)
        return event

    def launch_host_func(self, callback: Callable[[Any], Any], arg: Any = None) -> None:
        """Call ``callback(arg)`` at once: all earlier work is done."""
        callback(arg)


class StubCPUDevice:
    """Surface of ``torch.cuda`` and its like, on a host that has none of them."""

    Event = StubEvent
    Stream = StubStream

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._stream = StubStream(device)

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def init(self) -> None:
        return None

    def set_device(self, device: Any) -> None:
        return None

    def synchronize(self, device: Any = None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def set_stream(self, stream: Any) -> None:
        return None

    def current_stream(self, device: Any = None) -> StubStream:
        return self._stream

    def default_stream(self, device: Any = None) -> StubStream:
        return self._stream

    def get_device_properties(self, device: Any = None) -> StubDeviceProperties:
        return StubDeviceProperties()

    def __repr__(self) -> str:
        return f"StubCPUDevice({self._device!r})"


#: The instance the whole process shares.
STUB_CPU_DEVICE = StubCPUDevice()
