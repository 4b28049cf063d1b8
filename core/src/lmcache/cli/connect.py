"""A short session with a running server, for verbs that ask it something."""

from __future__ import annotations

import argparse
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

import lmcache
from lmcache.errors import ConfigError, LMCacheError
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, RequestFailed, Unavailable
from lmcache.v1.protocol.endpoint import endpoint

R = TypeVar("R", bound=m.Message)
_ADDRESS = re.compile(r"tcp://(\[[\w.:%-]+\]|\w[\w.-]*):\d+", re.ASCII)


class ToolSession(msgspec.Struct):
    """An open session. ``client`` is the name under which the server lists it."""

    address: str
    client: str
    welcome: m.Welcome
    channel: Channel
    timeout: float

    def ask(self, request: m.Request, expect: type[R], more: float = 0.0) -> R:
        """One round trip; the answer may take ``more`` seconds longer than any.

        Raises:
            LMCacheError: one line, if the server refused, did not answer in time, or answered something else.
        """
        return _ask(self.channel, request, expect, self.timeout + more, known=True)

    def timed(self, request: m.Request, expect: type[R]) -> tuple[R, float]:
        """``ask``, and the seconds that it took."""
        began = time.perf_counter()
        reply = self.ask(request, expect)
        return reply, time.perf_counter() - began


@contextmanager
def tool_session(args: argparse.Namespace) -> Iterator[ToolSession]:
    """A session with the server that ``--host``, ``--port`` and ``--timeout`` name; closed at the end.

    Raises:
        ConfigError: for an address that is none. LMCacheError: if no server of this protocol answers there.
    """
    address = endpoint(args.host, args.port)
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"server address {address!r}: expected tcp://HOST:PORT, HOST a name or a number")
    client = f"{socket.gethostname()}:{os.getpid()} lmcache {lmcache.__version__}"
    hello = m.Hello(protocol_min=m.PROTOCOL_MIN, protocol_max=m.PROTOCOL, role="tool", client=client)
    channel = Channel(address)
    try:
        welcome = _ask(channel, hello, m.Welcome, args.timeout)
        yield ToolSession(address, client, welcome, channel, args.timeout)
        with suppress(LMCacheError):  # not told, the server forgets the session by itself
            _ask(channel, m.Bye(session=welcome.session), m.Ok, args.timeout)
    finally:
        channel.close()


def _ask(channel: Channel, request: m.Request, expect: type[R], timeout: float, known: bool = False) -> R:
    """``known``: it has answered before, so that its silence is that of a server at work, or of one that ended."""
    try:
        reply, _ = channel.call(request, timeout)
    except Unavailable as exc:
        if known:
            raise LMCacheError(
                f"the server at {channel.address} has not answered within {timeout:g} s ({exc}); what was asked for"
                " may go on there, e.g. in a tier that hangs: see `lmcache describe kvcache`"
            ) from None
        raise LMCacheError(
            f"no cache server answers at {channel.address} within {timeout:g} s ({exc});"
            " is `lmcache server` running there?"
        ) from None
    except RequestFailed as exc:
        raise LMCacheError(f"the server at {channel.address} refuses: {exc} ({exc.code})") from None
    if not isinstance(reply, expect):
        raise LMCacheError(
            f"{channel.address} answers {type(request).__name__} with {type(reply).__name__}:"
            f" expected {expect.__name__}; is it another version?"
        )
    return reply
