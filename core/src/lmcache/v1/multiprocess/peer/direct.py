"""A pusher's side of NIXL: its own memory registered, writes with a deadline, and those that outlive it.

A write that is not over at its deadline is kept, with the lease it writes under, until it is: only then does the
peer get its memory back. If that takes too long, the connection to the peer is cut.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.peer.link import Opened
from lmcache.v1.multiprocess.peer.nixl import Agent, NixlError, Transfer
from lmcache.v1.storage.l2.adapter import Call

logger = init_logger(__name__)

_KEEP_BYTES = 16 << 20
"""Of a buffer that is registered once and for all; smaller ones are for the time of a write."""
_KEPT = 16
_OVERDUE_SECONDS = 30.0


@dataclass
class _Late:
    """A write that outlived its call."""

    transfer: Transfer
    buffers: list[tuple[Any, Any]]
    peer: str
    since: float
    give_back: Callable[[bool], None]


class Writer:
    """Writes to the regions of one peer.

    Raises:
        NixlError: if NIXL is not there.
    """

    def __init__(self) -> None:
        self._agent = Agent()
        self._guard = threading.Lock()
        self._kept: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._met: tuple[str, str] = ("", "")
        """Session and name of the agent that was loaded last."""
        self._late: list[_Late] = []

    def write(
        self, opened: Opened, offsets: Sequence[int], payloads: Sequence[memoryview], call: Call,
        give_back: Callable[[bool], None],
    ) -> bool:  # fmt: skip
        """Write each payload to its offset of the peer's region; whether that is done.

        If not, ``give_back`` is called once it is over, from :meth:`tend`, with whether that is certain.

        Raises:
            NixlError: if it failed; ``give_back`` was called.
        """
        assert opened.region is not None  # noqa: S101 -- the adapter's branch for it
        buffers: list[tuple[Any, Any]] = []
        started = False
        try:
            peer = self._meet(opened)
            local = [(self._address(data, buffers), len(data)) for data in payloads]
            remote = [
                (opened.region.base + at, len(data)) for at, data in zip(offsets, payloads, strict=True)
            ]
            started = True
            transfer = self._agent.start(peer, local, remote)
            if not transfer.wait(lambda: call.over):
                self._late.append(_Late(transfer, buffers, peer, time.monotonic(), give_back))
                return False
            transfer.end()
        except NixlError:
            self._forget(buffers)
            give_back(not started)
            raise
        self._forget(buffers)
        return True

    def tend(self) -> None:
        """See to writes that outlived their calls."""
        for late in list(self._late):
            certain = True
            try:
                over = late.transfer.wait(lambda: True)
            except NixlError:
                over, certain = True, False
            if not over and time.monotonic() - late.since > _OVERDUE_SECONDS:
                logger.warning("NIXL write not over after %g s: the connection is cut", _OVERDUE_SECONDS)
                over, certain = True, False
                self._part(late.peer)
            if over:
                self._late.remove(late)
                late.transfer.end()
                self._forget(late.buffers)
                late.give_back(certain)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._late

    def close(self) -> None:
        """Let go of all memory; of none, if a write is on its way from it."""
        if self._late:
            return
        for registered, _ in self._kept.values():
            self._agent.forget(registered)
        self._kept.clear()
        self._agent.close()

    def _meet(self, opened: Opened) -> str:
        with self._guard:
            session, name = self._met
            if session != opened.session:
                assert opened.region is not None  # noqa: S101 -- see write
                if name:
                    self._part(name)
                name = self._agent.meet(opened.region.agent)
                self._met = (opened.session, name)
            return name

    def _part(self, name: str) -> None:
        if self._met[1] == name:
            self._met = ("", "")
        try:
            self._agent.part(name)
        except NixlError as exc:
            logger.debug("%s", exc)

    def _address(self, data: memoryview, buffers: list[tuple[Any, Any]]) -> int:
        """Address of registered memory that holds ``data``: itself, or a copy where it cannot be written to.

        What was registered for this write only is added to ``buffers``.
        """
        if data.readonly:
            data = memoryview(bytearray(data))
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        whole = _whole(data)
        base = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        with self._guard:
            if (base, len(whole)) in self._kept:
                return address
            if len(whole) >= _KEEP_BYTES and len(self._kept) < _KEPT:
                self._kept[base, len(whole)] = (self._agent.register(base, len(whole)), whole)
                return address
        buffers.append((self._agent.register(address, len(data)), data))
        return address

    def _forget(self, buffers: list[tuple[Any, Any]]) -> None:
        for registered, _ in buffers:
            try:
                self._agent.forget(registered)
            except NixlError as exc:
                logger.debug("%s", exc)
        buffers.clear()


def _whole(data: memoryview) -> memoryview:
    """The buffer that ``data`` is a part of, such as a pool, if it can be had as bytes; else ``data``."""
    try:
        whole = memoryview(data.obj).cast("B")
        return data if whole.readonly else whole
    except (TypeError, ValueError):
        return data
