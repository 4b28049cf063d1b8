"""Host tensors that a device still reads or writes, kept until it is done.

torch gives page-locked memory to the next who asks once nobody holds the tensor; it knows of torch's copies only.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from lmcache_cuda import runtime

__all__ = ["until_done"]

_LOCK = threading.Lock()
_kept: deque[tuple[int, int, Any]] = deque()
_spare: dict[int, list[int]] = {}
_MOST_SPARE = 64


def until_done(ordinal: int, things: list[Any]) -> None:
    """Keep ``things`` until what is queued on the device's current stream now is done."""
    native = runtime.native()
    with _LOCK:
        _release(native)
        if not things:
            return
        spare = _spare.setdefault(ordinal, [])
        stream = runtime.current_stream(ordinal)[1]
        try:
            event = spare[-1] if spare else native.event_create(ordinal)
            if not spare:
                spare.append(event)
            native.event_record(event, stream, ordinal)
        except RuntimeError:  # what is queued cannot be marked: it is waited for instead
            native.stream_synchronize(stream, ordinal)
            return
        spare.pop()
        _kept.append((ordinal, event, things))


def _release(native: Any) -> None:
    """Let go of what is done. Streams pass each other; one that is late keeps the rest a little longer."""
    while _kept and native.event_query(_kept[0][1], _kept[0][0]):
        ordinal, event, _ = _kept.popleft()
        spare = _spare[ordinal]
        if len(spare) < _MOST_SPARE:
            spare.append(event)
        else:
            native.event_destroy(event, ordinal)
