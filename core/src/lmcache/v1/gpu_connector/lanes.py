"""A stream of the connector's own beside the engine's, and what keeps memory until work on it is done.

Nothing here waits for a whole device: the host waits for events, the engine's stream waits for streams. A device
whose torch module has no streams works on its one queue; on the host all is done when a call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

from lmcache.errors import DeviceError, LayoutError
from lmcache.v1.platform import get_device_spec
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["InFlight", "Lane", "spec_of"]


def spec_of(device: Any) -> DeviceSpec:
    """The backend that serves a torch device.

    Raises:
        DeviceError: None does, or no single one.
    """
    spec = get_device_spec(device.type)
    if spec is None:
        raise DeviceError(
            f"KV caches on {device}: no single device backend serves them; see lmcache device list"
        )
    return spec


class Lane:
    """One direction of one connector on one device. Threads take turns."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._spec = spec_of(device)
        self.is_synchronous = bool(self._spec.get_ops().is_synchronous)
        self._module = None if self.is_synchronous else self._spec._get_torch_module()
        self._turn = RLock()
        make = getattr(self._module, "Stream", None)
        self.stream: Any = make(device=device) if make and hasattr(self._module, "stream") else None

    @contextmanager
    def queued(self) -> Iterator[None]:
        """What the body does is queued on this lane."""
        with self._turn:
            if self.stream is None or self._module is None:
                yield
            else:
                with self._module.stream(self.stream):
                    yield

    def follow(self) -> None:
        """What comes now on the lane begins after what the engine's current stream has by now."""
        if self.stream is not None:
            self.stream.wait_stream(self._engine())

    def lead(self) -> None:
        """What comes now on the engine's current stream begins after what the lane has by now."""
        if self.stream is not None:
            self._engine().wait_stream(self.stream)

    def mark(self, engine: bool = False) -> Any:
        """An event at the lane's present end, or at that of the engine's current stream; None if all is done."""
        if self.is_synchronous:
            return None
        event = self._spec.create_stream_event(self._device)
        stream = self.stream if self.stream is not None and not engine else self._engine()
        self._spec.record_stream_event(event, stream)
        return event

    def after(self, event: Any, engine: bool = False) -> None:
        """What comes now on the lane, or on the engine's current stream, begins after ``event``."""
        if event is not None and self.stream is not None:
            (self._engine() if engine else self.stream).wait_event(event)

    def wait(self) -> None:
        """Block the host until the lane is done."""
        if self.is_synchronous:
            return
        if self.stream is None:
            self._spec.synchronize_current_stream(self._device)
        else:
            self._spec.synchronize_stream(self.stream)

    def is_done(self, event: Any) -> bool:
        return event is None or self._spec.is_stream_event_complete(event)

    def _engine(self) -> Any:
        return self._spec.current_stream(self._device)


class InFlight:
    """Objects that queued copies read or write, each with a reference until its copies are done."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._held: deque[tuple[Any, list[Any]]] = deque()

    @contextmanager
    def use(self, objects: Sequence[Any]) -> Iterator[None]:
        """Hold ``objects`` while the body queues copies and until these are done, whatever the body raises."""
        held: list[Any] = []
        try:
            for one in objects:
                if one is None:
                    raise LayoutError(
                        "no memory object for a chunk: expected one, or None instead of the layer's list"
                    )
                one.ref_count_up()
                held.append(one)
            yield
        finally:
            self._hold(held)

    def _hold(self, held: list[Any]) -> None:
        event = None
        try:
            event = self._lane.mark() if held else None
        finally:  # a device that can mark nothing any more must not keep them
            self._held.append((event, held))

    def wait_until(self, count: int) -> None:
        """Block the host until at most ``count`` of the last uses are not known to be done."""
        while len(self._held) > count:
            event, held = self._held[0]
            if event is not None:
                event.synchronize()
            self._held.popleft()
            _give_back(held)

    def reap(self) -> None:
        """Give back what is done, without waiting."""
        while self._held and self._lane.is_done(self._held[0][0]):
            _give_back(self._held.popleft()[1])

    def close(self) -> None:
        """Wait for all, and let the engine's stream see it. If the device fails, nothing stays held either."""
        try:
            if self._held:
                self._lane.lead()
            self.wait_until(0)
        finally:
            while self._held:
                _give_back(self._held.popleft()[1])


def _give_back(objects: Sequence[Any]) -> None:
    for one in objects:
        one.ref_count_down()
