"""Bytes between memory and the file of one object, without a copy of the payload.

The file: the header (:mod:`lmcache.v1.storage.l2.envelope`), zeros up to a multiple of :data:`PAGE`, the payload, the
end. So the payload is aligned in the file, and where it is aligned in memory, too (L1's pool is), both can go past
the page cache. One system call moves an object; it releases the GIL.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence

from lmcache.v1.storage.l2 import envelope

__all__ = ["PAGE", "file_bytes", "padded", "read_header", "read_object", "through_cache", "write_object"]

PAGE = 4096
"""What O_DIRECT is content with on every file system that has it."""


def padded(size: int) -> int:
    """``size``, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def file_bytes(header: int, payload: int) -> int:
    """Length of the file of an object with a header and a payload of these lengths."""
    return padded(header) + payload


class _Scratch(threading.local):
    """Page-aligned memory of one thread, for headers and for what is left of a payload after its last page."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, 2 * PAGE))

    def get(self, size: int) -> memoryview:
        if size > len(self.memory):
            self.memory = memoryview(mmap.mmap(-1, size))
        return self.memory[:size]


_scratch = _Scratch()


def write_object(fd: int, header: bytes, payload: memoryview, direct: bool) -> None:
    """Write an object to a new file. ``direct``: ``fd`` was opened with O_DIRECT; payloads that turn out not to be
    aligned go through the page cache.

    Raises:
        OSError: as the system says.
    """
    head = padded(len(header))
    whole = len(payload) // PAGE * PAGE if direct else len(payload)
    tail = payload[whole:]
    room = _scratch.get(head + PAGE)
    room[: len(header)] = header
    room[len(header) : head] = bytes(head - len(header))
    room[head : head + len(tail)] = tail
    parts = [room[:head], payload[:whole], *([room[head:]] if len(tail) else [])]
    total = sum(map(len, parts))
    if _move(os.pwritev, fd, parts, total, direct) < total:
        raise OSError(errno.EIO, "a write moved nothing")
    if total > head + len(payload):  # the last page was written in full
        os.ftruncate(fd, head + len(payload))


def read_object(fd: int, size: int, payload: memoryview, direct: bool) -> bytes | None:
    """Fill ``payload`` from a file of ``size`` bytes; its header. None: it is no object with such a payload.

    Raises:
        OSError: as the system says.
    """
    head = size - len(payload)
    if head <= 0 or head % PAGE or head > padded(envelope.MAX_HEADER):
        return None
    whole = len(payload) // PAGE * PAGE if direct else len(payload)
    tail = payload[whole:]
    room = _scratch.get(head + PAGE)
    parts = [room[:head], payload[:whole], *([room[head:]] if len(tail) else [])]
    if _move(os.preadv, fd, parts, size, direct) < size:
        return None
    tail[:] = room[head : head + len(tail)]
    return _header(room[:head])


def read_header(fd: int) -> bytes | None:
    """The header of an open file, and little more of it. None: it does not begin with one.

    Raises:
        OSError: as the system says.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: headers only
    begin = os.pread(fd, PAGE, 0)
    try:
        length = envelope.header_length(begin)
    except envelope.EnvelopeError:
        return None
    if length > len(begin):
        begin += os.pread(fd, length - len(begin), len(begin))
    return begin[:length] if len(begin) >= length else None


def _header(room: memoryview) -> bytes | None:
    """The header at the start of ``room``, which it must fill but for less than a page."""
    try:
        length = envelope.header_length(room)
    except envelope.EnvelopeError:
        return None
    return bytes(room[:length]) if padded(length) == len(room) else None


def _move(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    parts: list[memoryview],
    until: int,
    direct: bool,
) -> int:
    """Read or write ``parts`` from the file's start until ``until`` bytes went or no more do; how many."""
    at = 0
    while at < until:
        try:
            moved = call(fd, parts, at)
        except OSError as exc:
            if not direct or exc.errno != errno.EINVAL:
                raise
            direct = through_cache(fd)  # not aligned: the memory, or what a call that was cut short left
            continue
        if not moved:
            break
        at += moved
        if at < until:
            parts = _rest(parts, moved)
    return at


def _rest(parts: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``parts`` when ``moved`` bytes of them are done."""
    left = []
    for part in parts:
        left.append(part[moved:])
        moved = max(0, moved - len(part))
    return left


def through_cache(fd: int) -> bool:
    """Take O_DIRECT off; False, that it is off."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
