"""Host tensors that queued work still reads or writes: kept until the queue is past it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lmcache_xpu import native, runtime

__all__ = ["count", "keep"]

_lock = threading.Lock()
_held: dict[int, Any] = {}


def keep(queue: int, tensors: Sequence[Any]) -> None:
    """Hold those of ``tensors`` that are the host's until all that is on the queue now is done.

    A later call lets them go: no thread waits for that, and nothing on the queue does.
    """
    on_host = [tensor for tensor in tensors if not runtime.is_on_device(tensor)]
    if on_host:
        with _lock:
            _held[native.load().mark(queue)] = on_host
    count()


def count() -> int:
    """Let go what is needed no more; how many calls still have tensors here."""
    with _lock:
        for number in native.load().passed():
            _held.pop(number, None)
        return len(_held)
