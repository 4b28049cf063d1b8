"""A connection of redis-py, spoken to directly while one call uses it.

redis-py finds the server, opens the socket, and does TLS and AUTH. Its own reader copies a value three times, its
writer wants header and payload in one piece, and its timeout holds per packet, so that a server that trickles is
waited for without end. Here values go from and to the caller's memory, and the call's deadline holds for all of it.
"""

from __future__ import annotations

import ssl
from typing import Any

from lmcache.v1.storage.l2.adapter import Call

__all__ = ["Cancelled", "Refused", "Wire", "packed"]

_LOOK_SECONDS = 0.2
"""How often a wait looks whether the call was cancelled."""
_BUFFER = 1 << 16
_SEND = 1 << 20


class Cancelled(Exception):
    """Nobody waits for the call any more."""


class Refused:
    """The server's error reply to one command, such as ``OOM command not allowed …``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = text.partition(" ")[0]


def packed(*words: bytes | int, last: int | None = None) -> bytes:
    """A command as it is sent. ``last``: bytes of one more argument that the caller sends, and a line end after it."""
    parts = [b"*%d\r\n" % (len(words) + (last is not None))]
    for word in words:
        data = b"%d" % word if isinstance(word, int) else word
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    if last is not None:
        parts.append(b"$%d\r\n" % last)
    return b"".join(parts)


class Wire:
    """``connection`` during ``call``. ``clean`` tells whether the connection may be used again.

    What waits raises ``TimeoutError`` once the call is too late, :class:`Cancelled` once it is cancelled, and
    ``ConnectionError`` or another ``OSError`` if the connection breaks.
    """

    def __init__(self, connection: Any, call: Call) -> None:
        self._sock = connection._sock
        self._timeout = connection.socket_timeout
        self._call = call
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._owed = 0

    @property
    def clean(self) -> bool:
        """Whether every reply was read to its end."""
        return self._owed == 0 and self._start == self._end

    def let_go(self) -> None:
        """Give the socket back as redis-py had it."""
        self._sock.settimeout(self._timeout)

    # ---- sending

    def command(self, *words: bytes | int) -> None:
        """Send a command; its reply is owed."""
        self.value((packed(*words),))

    def value(self, parts: tuple[bytes | memoryview, ...]) -> None:
        """Send the parts of one command, in order; its reply is owed."""
        self._owed += 1
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                view = view[self._sent(view[:_SEND]) :]

    def _sent(self, view: memoryview) -> int:
        while True:
            self._arm()
            try:
                return int(self._sock.send(view))
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError as exc:
                raise ConnectionError(self._last_words() or f"connection lost while sending: {exc}") from None

    def _last_words(self) -> str:
        """What a server said before it hung up on what we were sending."""
        try:
            self._sock.settimeout(_LOOK_SECONDS)
            said = bytes(self._sock.recv(_BUFFER))
        except OSError:
            return ""
        at = said.find(b"-")
        return said[at + 1 :].partition(b"\r\n")[0].decode(errors="replace") if at >= 0 else ""

    def _arm(self) -> None:
        """Bound the next wait."""
        remaining = self._call.remaining
        if remaining <= 0:
            raise TimeoutError("no answer in time")
        if self._call.over:
            raise Cancelled
        self._sock.settimeout(min(remaining, _LOOK_SECONDS))

    # ---- receiving

    def _receive(self, view: memoryview) -> int:
        while True:
            self._arm()
            try:
                count = int(self._sock.recv_into(view))
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            if not count:
                raise ConnectionError("the server closed the connection")
            return count

    def _line(self) -> bytes:
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._start:
                rest = bytes(self._view[self._start : self._end])
                self._view[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == _BUFFER:
                raise ConnectionError("the server sent a line without end")
            self._end += self._receive(self._view[self._end :])

    def bulk(self) -> int | Refused | None:
        """The size of a value, to be taken or skipped in full and then ended; None: there is none."""
        found = self._head()
        if isinstance(found, _Size) and found >= 0:
            return int(found)
        self._owed -= 1
        if isinstance(found, _Size):
            return None
        if isinstance(found, Refused):
            return found
        raise ConnectionError(f"the server answered {found!r}: expected a value")

    def take(self, into: bytearray | memoryview) -> None:
        """The next ``len(into)`` bytes of a value."""
        view = memoryview(into)
        held = min(len(view), self._end - self._start)
        view[:held] = self._view[self._start : self._start + held]
        self._start += held
        while held < len(view):
            held += self._receive(view[held:])

    def skip(self, count: int) -> None:
        """Throw the next ``count`` bytes of a value away."""
        held = min(count, self._end - self._start)
        self._start += held
        while held < count:
            held += self._receive(self._view[: min(count - held, _BUFFER)])

    def end(self) -> None:
        """The end of a value whose bytes were all taken or skipped."""
        rest = bytearray(2)
        self.take(rest)
        if rest != b"\r\n":
            raise ConnectionError(f"the server ended a value by {bytes(rest)!r}")
        self._owed -= 1

    def reply(self) -> int | bytes | Refused | None:
        """A short reply: a number, a word or a value of at most 64 KiB."""
        found = self._head()
        if not isinstance(found, _Size) or found < 0:
            self._owed -= 1
            return None if isinstance(found, _Size) else found
        if found > _BUFFER:
            raise ConnectionError(f"the server answered {found} bytes: expected a short reply")
        value = bytearray(found)
        self.take(value)
        self.end()
        return bytes(value)

    def _head(self) -> _Size | int | bytes | Refused:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind in (b"$", b":"):
            try:
                return _Size(rest) if kind == b"$" else int(rest)
            except ValueError:
                raise ConnectionError(f"the server answered {line[:40]!r}: expected a number") from None
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        raise ConnectionError(f"the server answered {line[:40]!r}: expected a reply of RESP 2")


class _Size(int):
    """The size of a value that follows."""
