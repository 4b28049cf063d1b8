"""Events across processes. The device's are like CUDA's, so what serves those serves these."""

from __future__ import annotations

from typing import Any

from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend

__all__ = ["SimEventBackend"]


class SimEventBackend(DefaultEventIPCBackend):
    """A wait or a query for an event whose process has died raises RuntimeError."""

    def __init__(self) -> None:
        super().__init__(device_type="sim")

    def check_event_support(self, device: Any) -> None:
        """Raise RuntimeError unless an event of ``device`` survives the way out and in."""
        super().check_event_support(device)
        event = self.create_event(device)
        self.import_event(bytes(event.ipc_handle()), device)
