"""Events between processes: the driver's own, or counters where processes share nothing but the GPU."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache_cuda import runtime, settings
from lmcache_cuda.timeline import PAGES, TimelineEventBackend

__all__ = ["DriverEvent", "DriverEventBackend", "make_event_backend"]

logger = init_logger(__name__)

_TAG = b"LMCe\x01"
_HANDLE_BYTES = len(_TAG) + 64
#: An exported event must outlive the importer's wait, and nobody tells us when that is over.
_KEPT_EXPORTS = 2048


class DriverEvent:
    """An event of the driver, destroyed with this object."""

    __slots__ = ("__weakref__", "handle", "ordinal")

    def __init__(self, handle: int, ordinal: int) -> None:
        self.handle, self.ordinal = handle, ordinal
        weakref.finalize(self, _destroy, runtime.native(), handle, ordinal).atexit = False


def _destroy(native: Any, handle: int, ordinal: int) -> None:
    try:
        native.event_destroy(handle, ordinal)
    except RuntimeError as exc:  # nobody waits for the answer
        logger.debug("event not destroyed: %s", exc)


class DriverEventBackend:
    """``EventIPCBackend`` on the driver's interprocess events. The processes must share /dev/shm."""

    def __init__(self) -> None:
        self.device_type = runtime.DEVICE_TYPE
        self._exported: deque[Any] = deque(maxlen=_KEPT_EXPORTS)

    def check_event_support(self, device: Any) -> None:
        """Make, record and export an event; RuntimeError if that does not work here."""
        asked = "" if device is None or isinstance(device, int) else str(getattr(device, "type", device))
        if asked.partition(":")[0] not in ("", self.device_type):
            raise RuntimeError(f"event IPC of {self.device_type!r} does not serve device {device!s}")
        try:
            native = runtime.native()
            event = self.create_event(device)
            stream = native.stream_create(event.ordinal, 0)
            try:
                self.record_event(event, stream)
                native.stream_synchronize(stream, event.ordinal)
            finally:
                native.stream_destroy(stream, event.ordinal)
            native.event_export(event.handle, event.ordinal)
            complete = self.query_event(event)
        except Exception as exc:
            raise RuntimeError(
                f"event IPC is not supported on {device}: {exc}; LMCACHE_CUDA_EVENTS=host or device orders work by "
                "counters instead"
            ) from exc
        if not complete:
            raise RuntimeError(f"event IPC is not supported on {device}: a recorded event does not complete")

    def create_event(self, device: Any) -> DriverEvent:
        """A new event that can be exported."""
        ordinal = runtime.ordinal_of(device)
        return DriverEvent(runtime.native().event_create(ordinal, True), ordinal)

    def export_event(self, event: DriverEvent, device: Any) -> bytes:
        """Bytes by which another process can import ``event``, which is kept alive for it."""
        handle = _TAG + bytes(runtime.native().event_export(event.handle, event.ordinal))
        self._exported.append(event)
        return handle

    def import_event(self, handle: bytes, device: Any) -> DriverEvent:
        """The event that another process exported as ``handle``.

        Raises:
            ValueError: Not such bytes.
            DeviceError: The driver refuses it.
        """
        if len(handle) != _HANDLE_BYTES or bytes(handle[: len(_TAG)]) != _TAG:
            raise ValueError(
                f"not an event handle of the driver: {len(handle)} bytes that begin {bytes(handle[:5])!r}: both "
                "processes must have the same LMCACHE_CUDA_EVENTS and LMCACHE_CUDA_ISOLATED_IPC"
            )
        ordinal = runtime.ordinal_of(device)
        return DriverEvent(runtime.native().event_open(ordinal, bytes(handle[len(_TAG) :])), ordinal)

    def record_event(self, event: DriverEvent, stream: Any) -> None:
        """Mark the present end of ``stream``."""
        runtime.native().event_record(event.handle, runtime.stream_handle(stream), event.ordinal)

    def wait_event(self, event: DriverEvent, stream: Any) -> None:
        """Let later work on ``stream`` wait for ``event``. Does not block the host."""
        runtime.native().stream_wait_event(runtime.stream_handle(stream), event.handle, event.ordinal)

    def query_event(self, event: DriverEvent) -> bool:
        """Whether the work before ``event`` is done."""
        return bool(runtime.native().event_query(event.handle, event.ordinal))

    def synchronize_event(self, event: DriverEvent, device: Any) -> None:
        """Block the host until the work before ``event`` is done."""
        runtime.native().event_synchronize(event.handle, event.ordinal)


def make_event_backend() -> Any:
    """The backend that LMCACHE_CUDA_EVENTS names.

    ``auto`` is the driver's events; with the isolated policy, which they do not survive, counters in device memory.
    """
    wanted = settings.choice("LMCACHE_CUDA_EVENTS")
    if wanted == "auto":
        wanted = "device" if settings.isolated() else "driver"
    if wanted == "driver":
        if settings.isolated():
            raise DeviceError(
                "LMCACHE_CUDA_EVENTS=driver contradicts LMCACHE_CUDA_ISOLATED_IPC=1: the driver's events need a shared "
                "/dev/shm; use host or device"
            )
        return DriverEventBackend()
    return TimelineEventBackend(PAGES[wanted])
