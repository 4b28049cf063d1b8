"""Copies, and what says that a queue has reached a point: ops of the contract on the native module."""

from __future__ import annotations

import itertools
import operator
import threading
from typing import Any

from lmcache.logging import init_logger, warn_once
from lmcache_xpu import keeping, native, runtime
from lmcache_xpu.operands import is_tensor

__all__ = [
    "drain_recorded_completions",
    "drain_recorded_events",
    "lmcache_memcpy_async",
    "record_completion_on_stream",
    "record_event_on_stream",
]

logger = init_logger(__name__)

_COPY = "lmcache_memcpy_async"
_MOST_EVENTS = 1 << 16
_COMPLETIONS, _EVENTS = 0, 1
"""Channels of the native module's records."""
_numbers = itertools.count()
_lock = threading.Lock()
_noted: dict[int, tuple[str, str, dict[str, str], dict[str, int]]] = {}


def lmcache_memcpy_async(
    dest: Any, src: Any, nbytes: int, direction: int, host_buffer_offset: int, host_buffer_alignments: int
) -> None:
    way, nbytes = int(direction), operator.index(nbytes)
    if way not in (0, 1):
        raise ValueError(f"{_COPY}: direction={direction!r}: expected 0 (H2D) or 1 (D2H)")
    if nbytes < 0 or host_buffer_offset < 0:
        raise ValueError(
            f"{_COPY}: nbytes={nbytes}, host_buffer_offset={host_buffer_offset}: expected 0 or more"
        )
    if host_buffer_alignments < 1 or host_buffer_alignments & (host_buffer_alignments - 1):
        raise ValueError(f"{_COPY}: host_buffer_alignments={host_buffer_alignments}: expected a power of two")
    host, there = (src, dest) if way == 0 else (dest, src)
    device = _device_of(host, there, nbytes)
    if not nbytes:
        return
    queue = runtime.current_queue(device)
    native.load().copy_async(queue, _address(dest), _address(src), nbytes)
    if is_tensor(host):
        keeping.keep(queue, [host])


def _device_of(host: Any, there: Any, nbytes: int) -> Any:
    """The device of the copy; None, which is the current one, where addresses are given."""
    tensors = [is_tensor(operand) for operand in (host, there)]
    if not any(tensors):
        return None
    if not all(tensors):
        raise TypeError(f"{_COPY}: dest and src: expected two tensors or two addresses, got one of each")
    for name, tensor, fits in (
        ("host", host, host.device.type == "cpu"),
        ("device", there, runtime.is_on_device(there)),
    ):
        size = tensor.numel() * tensor.element_size()
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{_COPY}: the {name} side is on {tensor.device}: expected it there, and contiguous"
            )
        if nbytes > size:
            raise ValueError(f"{_COPY}: nbytes={nbytes}: the {name} side has {size}")
    return there.device


def _address(operand: Any) -> int:
    return int(operand.data_ptr()) if is_tensor(operand) else operator.index(operand)


def record_completion_on_stream(stream_ptr: int, kind: str, payload: bytes) -> None:
    if not isinstance(kind, str) or not isinstance(payload, bytes):
        raise TypeError(f"record_completion_on_stream: {kind!r}, {payload!r}: expected str and bytes")
    native.load().record(operator.index(stream_ptr), _COMPLETIONS, kind, payload)


def drain_recorded_completions() -> list[tuple[str, bytes]]:
    return [(kind, payload) for kind, payload, _ in native.load().drain(_COMPLETIONS)]


def record_event_on_stream(
    stream_ptr: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]
) -> None:
    texts, numbers = dict(texts), dict(numbers)
    words = (type, session, *texts, *texts.values(), *numbers)
    if not all(isinstance(word, str) for word in words) or not all(
        isinstance(number, int) for number in numbers.values()
    ):
        raise TypeError(
            f"record_event_on_stream: {type!r}, {session!r}, {texts!r}, {numbers!r}: expected strings, and integers "
            "by name"
        )
    stream, number = operator.index(stream_ptr), next(_numbers)
    with _lock:
        _noted[number] = (type, session, texts, numbers)
        if len(_noted) > _MOST_EVENTS:
            del _noted[next(iter(_noted))]
            warn_once(logger, "events", "events of streams are lost: %d wait to be drained", _MOST_EVENTS)
    try:
        native.load().record(stream, _EVENTS, str(number), b"")
    except BaseException:
        with _lock:
            _noted.pop(number, None)
        raise


def drain_recorded_events() -> list[tuple[str, str, float, dict[str, str], dict[str, int]]]:
    drained = []
    for number, _, seconds in native.load().drain(_EVENTS):
        with _lock:
            found = _noted.pop(int(number), None)
        if found is not None:  # else it was dropped, as its maker was warned
            type, session, texts, numbers = found
            drained.append((type, session, seconds, texts, numbers))
    return drained
