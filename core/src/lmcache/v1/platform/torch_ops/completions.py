"""Records of what is done, for devices that have done all when a call returns. ``DeviceOps`` has the contract.

None of the recorders is marked as stream-ordered, so no asynchronous device gets them. Needs no torch.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections import deque
from typing import Any, Generic, TypeVar

from lmcache.logging import init_logger, warn_once
from lmcache.v1.platform.base.op_contract import takes

__all__ = [
    "drain_recorded_completions",
    "drain_recorded_events",
    "record_completion_on_stream",
    "record_event_on_stream",
]

logger = init_logger(__name__)

#: Observers that do not drain cost this much and no more.
_MAX_EVENTS = 1 << 16

T = TypeVar("T")
Completion = tuple[str, bytes]
Event = tuple[str, str, float, dict[str, str], dict[str, int]]


class _Queue(Generic[T]):
    """What is recorded and not yet drained, oldest first; of one process."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name, self._limit = name, limit
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # what the parent recorded is the parent's to drain

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[T] = deque(maxlen=self._limit)

    def put(self, item: T) -> None:
        with self._lock:
            full = len(self._items) == self._limit
            self._items.append(item)
        if full:
            warn_once(logger, self._name, "%s: nobody drains them; the oldest are dropped", self._name)

    def drain(self) -> list[T]:
        with self._lock:
            items, self._items = self._items, deque(maxlen=self._limit)
        return list(items)


_completions: _Queue[Completion] = _Queue("recorded completions")
_events: _Queue[Event] = _Queue("recorded events", _MAX_EVENTS)


@takes()
def record_completion_on_stream(stream_ptr: int, kind: str, payload: bytes) -> None:
    operator.index(stream_ptr)
    _completions.put(
        (
            _typed("record_completion_on_stream", "kind", kind, str),
            _typed("record_completion_on_stream", "payload", payload, bytes),
        )
    )


@takes()
def drain_recorded_completions() -> list[Completion]:
    return _completions.drain()


@takes()
def record_event_on_stream(
    stream_ptr: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]
) -> None:
    op = "record_event_on_stream"
    operator.index(stream_ptr)
    event = (
        _typed(op, "type", type, str),
        _typed(op, "session", session, str),
        time.time(),
        {_typed(op, "texts", k, str): _typed(op, "texts", v, str) for k, v in texts.items()},
        {_typed(op, "numbers", k, str): _typed(op, "numbers", v, int) for k, v in numbers.items()},
    )
    _events.put(event)


@takes()
def drain_recorded_events() -> list[Event]:
    return _events.drain()


def _typed(op: str, name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{op}: {name}: {value!r}: expected {kind.__name__}")
    return value
