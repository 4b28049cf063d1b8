"""Copies in a thread beside the engine's, on a device that orders work by streams.

Which device and which stream are current is each thread's own affair. So a thread beside the engine's would neither
copy after what the engine has queued nor wait for the device that the pages are on, unless it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.platform import get_device_spec

__all__ = ["Beside"]


class Beside:
    """A stream of its own on the device of a group's pages; nothing in host memory, or where a device has no streams.

    Args:
        group: Whose pages are copied.
    """

    def __init__(self, group: KVGroupPages) -> None:
        spec = get_device_spec(group.device.partition(":")[0]) if group.device != "cpu" else None
        self._spec, self._module, self._stream = spec, None, None
        if spec is not None:
            self._device = group.tensors[0].device
            self._module = spec._get_torch_module()
            make = getattr(self._module, "Stream", None)
            if make is not None and hasattr(self._module, "stream"):
                self._stream = make(device=self._device)

    def mark(self) -> Any:
        """What the engine has queued by now. To be called in its thread."""
        if self._spec is None or self._stream is None:
            return None
        event = self._spec.create_stream_event(self._device)
        self._spec.record_stream_event(event, self._spec.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """What the body queues comes after what was marked, and what it waits for is that."""
        with ExitStack() as current:
            if self._module is not None and hasattr(self._module, "device"):
                current.enter_context(self._module.device(self._device))
            if self._module is not None and self._stream is not None:
                current.enter_context(self._module.stream(self._stream))
                self._stream.wait_event(mark)
            yield
