"""Pages of counters that streams write and wait for, in memory that two processes see.

A slot is a 64-bit counter that one stream moves on. A page lies in host memory that both sides register with the
driver, or in device memory that is exported: the first can be read at no cost and tells when its owner has died, the
second needs nothing but the GPU between the processes. Slot 0 is for the probe.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import threading
import weakref
from functools import partial
from typing import Annotated, Any

import msgspec

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache.v1.platform.base.ipc_wire import Count
from lmcache_cuda import fd_socket, runtime
from lmcache_cuda.ipc_ways import check_extent
from lmcache_cuda.mappings import Mapping

__all__ = ["PAGE_BYTES", "SLOTS", "DevicePage", "DevicePlace", "HostPage", "HostPlace", "Place", "Word"]

logger = init_logger(__name__)

SLOTS = 4096
PAGE_BYTES = SLOTS * 8
_MAPPED = 1 | 2
"""Of every context, and at an address that devices can use."""


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Whoever reads a page must not be killed because its owner made it shorter."""

_OWN: list[Any] = []
"""Pages of this process. Streams may write to them at any time, so none is ever given back."""


class HostPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="host", array_like=True):
    """Where another process finds a page in host memory."""

    socket: Annotated[
        str, msgspec.Meta(min_length=2, max_length=fd_socket.MAX_PATH, pattern=r"^/[^\x00-\x1f]*\Z")
    ]
    token: Annotated[bytes, msgspec.Meta(min_length=fd_socket.TOKEN_BYTES, max_length=fd_socket.TOKEN_BYTES)]

    def open(self, ordinal: int) -> HostPage:
        fd, connection = fd_socket.fetch(self.socket, self.token)
        try:
            _check_page(fd, self.socket)
            return HostPage(fd, ordinal, connection)
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(fd)


def _check_page(fd: int, path: str) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # no memory of memfd_create
    size = os.fstat(fd).st_size
    if size != PAGE_BYTES or seals & _SEALS != _SEALS:
        raise DeviceError(
            f"socket {path}: {size} bytes, seals {seals}: expected {PAGE_BYTES} of a sealed memfd"
        )


class DevicePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="device", array_like=True):
    """Where another process finds a page in device memory."""

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    start: Count
    allocation: Count

    def open(self, ordinal: int) -> DevicePage:
        native = runtime.native()
        if self.start + PAGE_BYTES > self.allocation or self.start % 8:
            raise DeviceError(f"event page at byte {self.start} of {self.allocation}: expected it inside")
        base = native.ipc_open(ordinal, self.handle)
        mapping = Mapping(base, self.allocation, partial(native.ipc_close, ordinal))
        check_extent(base, self.allocation, ordinal)
        return DevicePage(base + self.start, ordinal, mapping)


Place = HostPlace | DevicePlace


class HostPage:
    """A page in host memory; ``connection`` is to its owner, if that is another process."""

    def __init__(self, fd: int, ordinal: int, connection: socket.socket | None = None) -> None:
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._base = ctypes.addressof(anchor)
        self._connection = connection
        native = runtime.native()
        native.host_register(self._base, PAGE_BYTES, _MAPPED, ordinal)
        kept = (anchor, self._words, connection)
        weakref.finalize(self, _unregister, native, self._base, ordinal, *kept).atexit = False

    @classmethod
    def create(cls, ordinal: int) -> tuple[HostPage, HostPlace]:
        """A page of this process, and where others find it."""
        server = fd_socket.server()  # first: it may refuse
        fd = os.memfd_create("lmcache-cuda-events", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            page = cls(fd, ordinal)
        except BaseException:
            os.close(fd)
            raise
        _OWN.append(page)
        return page, HostPlace(server.path, server.offer(fd))

    @property
    def is_foreign(self) -> bool:
        return self._connection is not None

    def address(self, slot: int) -> int:
        """Where streams write and wait."""
        return self._base + slot * 8

    def read(self, slot: int) -> int:
        """How far the slot's stream has come."""
        return int(self._words[slot])

    def force(self, slot: int, value: int) -> None:
        """Let everybody who waits for ``value`` go on, whoever should have written it."""
        if self._words[slot] < value:
            self._words[slot] = value

    def owner_is_gone(self) -> bool:
        """Whether the process that writes the slots has ended."""
        if self._connection is None:
            return False
        try:
            # It has nothing more to say: what is there to read is its end, or a lie that would hide that.
            self._connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    tells_of_death = True


def _unregister(native: Any, base: int, ordinal: int, *kept: Any) -> None:
    try:
        native.host_unregister(base, ordinal)
    except RuntimeError as exc:
        logger.warning("an event page stays registered: %s", exc)
    for thing in kept:
        if isinstance(thing, socket.socket):
            thing.close()


class Word:
    """A word of page-locked memory and a stream, to look into a device's memory without waiting for its work."""

    def __init__(self, ordinal: int) -> None:
        native = runtime.native()
        self._lock = threading.Lock()
        self._ordinal = ordinal
        self._ptr = native.host_alloc(8, 1, ordinal)
        self.stream = native.stream_create(ordinal, 0)
        self._value = ctypes.c_uint64.from_address(self._ptr)

    def read(self, address: int) -> int:
        native = runtime.native()
        with self._lock:
            native.memcpy_async(self._ptr, address, 8, self.stream, self._ordinal)
            native.stream_synchronize(self.stream, self._ordinal)
            return int(self._value.value)

    def write(self, address: int, value: int) -> None:
        native = runtime.native()
        with self._lock:
            native.stream_write_u64(self.stream, address, value, self._ordinal)
            native.stream_synchronize(self.stream, self._ordinal)


_WORDS: dict[int, Word] = {}
_WORDS_LOCK = threading.Lock()


def _word(ordinal: int) -> Word:
    with _WORDS_LOCK:
        if ordinal not in _WORDS:
            _WORDS[ordinal] = Word(ordinal)
        return _WORDS[ordinal]


class DevicePage:
    """A page in device memory; ``owner`` keeps it mapped. None, and it is this process's own, for good."""

    tells_of_death = False

    def __init__(self, base: int, ordinal: int, owner: Mapping | None = None) -> None:
        self._base, self._ordinal, self._owner = base, ordinal, owner

    @classmethod
    def create(cls, ordinal: int) -> tuple[DevicePage, DevicePlace]:
        """A page of this process, and where others find it."""
        native = runtime.native()
        base = native.mem_alloc(ordinal, PAGE_BYTES)
        word = _word(ordinal)
        try:
            native.memset_async(base, 0, PAGE_BYTES, word.stream, ordinal)
            native.stream_synchronize(word.stream, ordinal)
            place = DevicePlace(*native.ipc_export(base, ordinal))
        except BaseException:
            native.mem_free(ordinal, base)
            raise
        return cls(base, ordinal), place

    @property
    def is_foreign(self) -> bool:
        return self._owner is not None

    def address(self, slot: int) -> int:
        """Where streams write and wait."""
        return self._base + slot * 8

    def read(self, slot: int) -> int:
        """How far the slot's stream has come: a copy of eight bytes on a stream of its own."""
        return _word(self._ordinal).read(self.address(slot))

    def force(self, slot: int, value: int) -> None:
        """Let everybody who waits for ``value`` go on, whoever should have written it."""
        if self.read(slot) < value:
            _word(self._ordinal).write(self.address(slot), value)

    def owner_is_gone(self) -> bool:
        """Not known: nothing but the GPU connects the processes."""
        return False
