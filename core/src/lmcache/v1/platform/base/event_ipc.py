"""Events that order work between processes: one records, the other's stream waits.

lmcache-driven mode needs them: the engine's worker exports an event that says when its pages are written, the
server's stream waits for it, and the other way round. Nothing here waits for a whole device.
"""

from __future__ import annotations

import importlib
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

__all__ = ["DefaultEventIPCBackend", "EventIPCBackend"]

#: An exported event must outlive the importer's wait, and nobody tells us when that is over.
_KEPT_EXPORTS = 2048


@runtime_checkable
class EventIPCBackend(Protocol):
    """Events of one device type across processes. Event objects are opaque to the caller."""

    device_type: str

    def check_event_support(self, device: Any) -> None:
        """Raise RuntimeError unless every operation below works on ``device``. Asked before any of them."""

    def create_event(self, device: Any) -> Any:
        """A new event that can be exported."""

    def export_event(self, event: Any, device: Any) -> bytes:
        """Bytes by which another process can import ``event``."""

    def import_event(self, handle: bytes, device: Any) -> Any:
        """The event that another process exported as ``handle``."""

    def record_event(self, event: Any, stream: Any) -> None:
        """Mark the present end of ``stream``."""

    def wait_event(self, event: Any, stream: Any) -> None:
        """Let later work on ``stream`` wait for ``event``. Does not block the host."""

    def query_event(self, event: Any) -> bool:
        """Whether the work before ``event`` is done. Does not block."""

    def synchronize_event(self, event: Any, device: Any) -> None:
        """Block the host until the work before ``event`` is done."""


class DefaultEventIPCBackend:
    """For torch device modules whose events are like CUDA's.

    Such an ``Event`` takes ``interprocess=True`` and has ``ipc_handle()`` and
    ``from_ipc_handle(device, handle)``.
    """

    def __init__(self, event_module: Any = None, device_type: str | None = None) -> None:
        """Serve the events of a torch device module.

        Args:
            event_module: The module that has ``Event``; None is ``torch.<device_type>``.
            device_type: ``torch.device.type``; None is the last part of the module's name.

        Raises:
            ValueError: Neither says which device is meant.
        """
        if event_module is None and not device_type:
            raise ValueError(
                "DefaultEventIPCBackend(): expected event_module, device_type or both; got neither"
            )
        self._module = event_module
        self.device_type = device_type or str(getattr(event_module, "__name__", "")).rpartition(".")[2]
        self._exported: deque[Any] = deque(maxlen=_KEPT_EXPORTS)

    def check_event_support(self, device: Any) -> None:
        """Raise RuntimeError unless such events can be made, exported and imported on ``device``."""
        asked = _type_of(device)
        if asked and asked != self.device_type:
            raise RuntimeError(f"event IPC of {self.device_type!r} does not serve device {device!s}")
        event_cls = getattr(self._events(), "Event", None)
        missing = [n for n in ("from_ipc_handle", "ipc_handle") if not callable(getattr(event_cls, n, None))]
        if event_cls is None or missing:
            what = "Event" if event_cls is None else f"Event.{missing[0]}"
            raise RuntimeError(
                f"event IPC is not supported on {self.device_type!r}: its torch module has no {what}"
            )
        try:
            self.create_event(device)
        except Exception as exc:
            raise RuntimeError(
                f"event IPC is not supported on {self.device_type!r}: Event(interprocess=True) fails: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    def create_event(self, device: Any) -> Any:
        """A new event that can be exported."""
        with self._on(device):
            return self._events().Event(interprocess=True)

    def export_event(self, event: Any, device: Any) -> bytes:
        """Bytes by which another process can import ``event``; the event is kept alive for it."""
        with self._on(device):  # an event that was never recorded comes into being here
            handle = bytes(event.ipc_handle())
        self._exported.append(event)
        return handle

    def import_event(self, handle: bytes, device: Any) -> Any:
        """The event that another process exported as ``handle``."""
        target = f"{self.device_type}:{device}" if isinstance(device, int) else device
        return self._events().Event.from_ipc_handle(target, handle)

    def record_event(self, event: Any, stream: Any) -> None:
        """Mark the present end of ``stream``."""
        event.record(stream)

    def wait_event(self, event: Any, stream: Any) -> None:
        """Let later work on ``stream`` wait for ``event``."""
        stream.wait_event(event)

    def query_event(self, event: Any) -> bool:
        """Whether the work before ``event`` is done."""
        return bool(event.query())

    def synchronize_event(self, event: Any, device: Any) -> None:
        """Block the host until the work before ``event`` is done."""
        event.synchronize()

    def _events(self) -> Any:
        if self._module is None:
            module = getattr(importlib.import_module("torch"), self.device_type, None)
            if module is None:
                raise RuntimeError(
                    f"event IPC is not supported here: torch has no module {self.device_type!r}"
                )
            self._module = module
        return self._module

    def _on(self, device: Any) -> AbstractContextManager[Any]:
        enter = getattr(self._events(), "device", None)
        if device is None or not callable(enter):
            return nullcontext()
        context: AbstractContextManager[Any] = enter(device)
        return context


def _type_of(device: Any) -> str:
    if device is None or isinstance(device, int):
        return ""
    return str(getattr(device, "type", None) or str(device).partition(":")[0])
