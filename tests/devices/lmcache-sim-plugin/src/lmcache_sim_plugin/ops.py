"""The device's operations: those of the native module, and torch's for the rest."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, ClassVar

import torch

from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["SimDeviceOps"]

_MAX_EVENTS = 1 << 16


class SimDeviceOps(DeviceOps):
    """See :class:`DeviceOps`."""

    device_type: ClassVar[str] = "sim"

    def __init__(self) -> None:
        self._events: deque[Any] = deque(maxlen=_MAX_EVENTS)

    def ensure_native(self) -> None:
        from lmcache_sim_plugin import native

        self.bind_native(native)

    def record_event_on_stream(
        self, stream_ptr: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]
    ) -> None:
        if not (isinstance(type, str) and isinstance(session, str)):
            raise TypeError(f"record_event_on_stream: {type!r}, {session!r}: expected two strings")
        noted = (type, session, dict(texts), dict(numbers))
        torch.sim.Stream.from_handle(stream_ptr).launch_host_func(lambda: self._note(*noted))

    def _note(self, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]) -> None:
        self._events.append((type, session, time.time(), texts, numbers))

    def drain_recorded_events(self) -> list[Any]:
        drained = []
        while self._events:
            drained.append(self._events.popleft())
        return drained
