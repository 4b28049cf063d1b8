"""Payload in frames of the protocol itself: pieces, a few under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from lmcache.v1.multiprocess.peer.link import Line
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.protocol.channel import Future
from lmcache.v1.storage.l2.adapter import Call

_UNDER_WAY = 4
_BYTES_PER_SECOND = 100e6
"""Slowest acceptable rate: who is slower counts as dead, which shows by nothing else."""


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(object, offset, bytes) of every piece."""
    for index, size in enumerate(sizes):
        for offset in range(0, size, m.PIECE_BYTES):
            yield index, offset, min(m.PIECE_BYTES, size - offset)


def _seconds(line: Line, call: Call) -> float:
    """For the answer to a piece, of which those under way may be before it."""
    return min(call.remaining, line.seconds + _UNDER_WAY * m.PIECE_BYTES / _BYTES_PER_SECOND)


def write(line: Line, lease: int, payloads: Sequence[memoryview], call: Call) -> int:
    """Send payloads to the objects of a push, in order; how many were sent whole before the call was over.

    Raises:
        AdapterError: if the peer refused or did not answer.
    """
    under_way: deque[tuple[int, Future]] = deque()
    whole = 0

    def settle() -> int:
        last, future = under_way.popleft()
        line.finish(m.Ok, future)
        return last

    for index, offset, length in _pieces([len(data) for data in payloads]):
        if call.over:
            break
        if len(under_way) == _UNDER_WAY:
            whole = max(whole, settle())
        message = p.PushWrite(session=line.session, lease=lease, index=index, offset=offset)
        piece = payloads[index][offset : offset + length]
        done = index + (offset + length == len(payloads[index]))
        under_way.append((done, line.submit(message, _seconds(line, call), [piece])))
    while under_way:
        whole = max(whole, settle())
    return whole


def read(line: Line, lease: int, index: int, payload: memoryview, call: Call) -> bool:
    """Read an object of a pull; whether that was done before the call was over.

    Raises:
        AdapterError: if the peer refused or did not answer.
    """
    under_way: deque[tuple[int, int, Future]] = deque()

    def settle() -> bool:
        offset, length, future = under_way.popleft()
        _, frames = line.finish(m.Ok, future)
        if len(frames) != 1 or len(frames[0]) != length:
            return False
        payload[offset : offset + length] = frames[0]
        return True

    for _, offset, length in _pieces([len(payload)]):
        if call.over or (len(under_way) == _UNDER_WAY and not settle()):
            return False
        message = p.PullRead(session=line.session, lease=lease, index=index, offset=offset, length=length)
        under_way.append((offset, length, line.submit(message, _seconds(line, call))))
    while under_way:
        if not settle():
            return False
    return True
