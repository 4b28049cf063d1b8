"""Ways of sharing a device's memory. Each is a struct of what travels, with how to make it and how to open it.

``export(tensor, ordinal)`` gives the struct and the byte of the allocation at which the tensor's storage begins, or
raises RuntimeError. ``open(ordinal, start, nbytes)`` gives the storage as a tensor of bytes.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache.v1.platform.base.ipc_wire import MAX_PLANES, Count, TensorMeta
from lmcache_cuda import fd_socket, runtime, settings
from lmcache_cuda.mappings import Mapping, Mappings

__all__ = [
    "MAPPED",
    "OFFERS",
    "WAYS",
    "Plane",
    "RawHandle",
    "TorchHandle",
    "VmmHandle",
    "Wire",
    "check_extent",
]

logger = init_logger(__name__)

MAPPED = Mappings()

_Blob: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4096)]
_Fixed = {"frozen": True, "forbid_unknown_fields": True}


_SHARE_BYTES, _ALLOCATION = 66, b"c"
"""torch's handle of an allocation: a version, the kind, and the driver's 64 bytes. Its other kind names descriptors of
a process, which torch would take out of it whoever that is: not taken here, vmm serves such memory."""
_COUNTER = re.compile(rb"/torch_([1-9][0-9]{0,9})_[0-9]+_[0-9]+\Z")
_COUNTERS = 10_000
"""Reference counters in one file of torch's. It counts at the place that it is told, without looking whether that is
in the file."""


class TorchHandle(msgspec.Struct, tag="torch", **_Fixed):
    """What torch's own multiprocessing sends. It counts references in /dev/shm, so it is opened once per export."""

    share: Annotated[bytes, msgspec.Meta(min_length=_SHARE_BYTES, max_length=_SHARE_BYTES)]
    counter: _Blob
    counter_offset: Annotated[int, msgspec.Meta(ge=0, lt=_COUNTERS)]
    event: _Blob
    wait: bool

    def __post_init__(self) -> None:
        if self.share[1:2] != _ALLOCATION:
            raise ValueError(f"torch's handle is of kind {self.share[1:2]!r}: expected that of an allocation")
        if not _COUNTER.match(self.counter):
            raise ValueError(f"torch's counter {self.counter[:40]!r}: expected /torch_PID_NUMBER_NUMBER")

    @property
    def exporter(self) -> int:
        """The process whose counter it is."""
        found = _COUNTER.match(self.counter)
        return int(found[1]) if found else 0

    @classmethod
    def export(cls, tensor: Any, ordinal: int) -> tuple[TorchHandle, int]:
        share, _, start, counter, counter_offset, event, wait = runtime.storage_to_torch(tensor)
        blobs = [bytes(blob) for blob in (share, counter, event)]
        try:
            made = cls(blobs[0], blobs[1], int(counter_offset), blobs[2], bool(wait))
            if len(made.share) != _SHARE_BYTES or not 0 <= made.counter_offset < _COUNTERS:
                raise ValueError(f"torch's handle has {len(made.share)} bytes: expected {_SHARE_BYTES}")
        except ValueError as exc:
            raise DeviceError(str(exc)) from exc
        return made, int(start)

    def open(self, ordinal: int, start: int, nbytes: int) -> Any:
        try:
            storage = runtime.storage_from_torch(
                ordinal, (self.share, nbytes, start, self.counter, self.counter_offset, self.event, self.wait)
            )
        except RuntimeError as exc:
            text = " ".join(str(exc).split())
            raise DeviceError(
                f"memory of another process cannot be opened by torch: {text}; if the processes are in containers of "
                "their own, set LMCACHE_CUDA_ISOLATED_IPC=1 in both"
            ) from exc
        check_extent(storage.data_ptr(), nbytes, ordinal)
        return storage

    def withdraw(self) -> None:
        """torch gives the memory back when both sides have let go of it."""


class RawHandle(msgspec.Struct, tag="raw", **_Fixed):
    """The driver's handle of an allocation. It needs nothing but the GPU between the processes, and does not tell
    whose the allocation is: the driver alone can read it."""

    exporter: ClassVar[int] = 0

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    allocation: Count
    """Bytes of it."""

    @classmethod
    def export(cls, tensor: Any, ordinal: int) -> tuple[RawHandle, int]:
        handle, start, size = runtime.native().ipc_export(tensor.untyped_storage().data_ptr(), ordinal)
        return cls(handle, size), start

    def open(self, ordinal: int, start: int, nbytes: int) -> Any:
        native = runtime.native()

        def map_it() -> Mapping:
            base = native.ipc_open(ordinal, self.handle)
            mapping = Mapping(base, self.allocation, partial(native.ipc_close, ordinal))
            check_extent(base, self.allocation, ordinal)
            return mapping

        return _view(MAPPED.open(("raw", ordinal, self.handle), map_it), ordinal, start, nbytes)

    def withdraw(self) -> None:
        """Nothing to end: the handle is good for as long as the allocation lives."""


class _Offers:
    """Allocations that this process shares by descriptor: one token each, however many tensors lie in it.

    A wrapper holds its tensors as long as its share, so an allocation that is offered here is not freed and another
    put in its place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[tuple[int, int, int], bytes] = {}
        self._shares: dict[bytes, int] = {}
        self._ended: deque[bytes] = deque()

    def add(self, allocation: tuple[int, int, int], fd: int) -> tuple[str, bytes]:
        """Socket and token for an allocation; ``fd`` is taken over."""
        server = fd_socket.server()
        with self._lock:
            self._settle()
            token = self._tokens.get(allocation)
            if token is None:
                token = self._tokens[allocation] = server.offer(fd)
            else:
                os.close(fd)
            self._shares[token] = self._shares.get(token, 0) + 1
        return server.path, token

    def remove(self, token: bytes) -> None:
        """End one share; the offer ends with the last. May be called by the garbage collector, anywhere."""
        self._ended.append(token)
        while self._ended and self._lock.acquire(
            blocking=False
        ):  # whoever has the lock settles it with the next
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._ended:
            token = self._ended.popleft()
            left = self._shares.pop(token, 1) - 1
            if left:
                self._shares[token] = left
                continue
            for allocation in [key for key, mine in self._tokens.items() if mine == token]:
                del self._tokens[allocation]
            fd_socket.withdraw(token)

    def __len__(self) -> int:
        return len(self._tokens)


OFFERS = _Offers()


class VmmHandle(msgspec.Struct, tag="vmm", **_Fixed):
    """A file descriptor of an allocation, to be fetched over a Unix socket."""

    socket: Annotated[
        str, msgspec.Meta(min_length=2, max_length=fd_socket.MAX_PATH, pattern=r"^/[^\x00-\x1f]*\Z")
    ]
    token: Annotated[bytes, msgspec.Meta(min_length=fd_socket.TOKEN_BYTES, max_length=fd_socket.TOKEN_BYTES)]
    allocation: Count
    """Bytes of it."""
    exporter: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """The process at the socket; 0 with the isolated policy, where its number means nothing to others."""

    @classmethod
    def export(cls, tensor: Any, ordinal: int) -> tuple[VmmHandle, int]:
        ptr = tensor.untyped_storage().data_ptr()
        fd, size, start = runtime.native().vmm_export_fd(ptr, ordinal)
        path, token = OFFERS.add((ordinal, ptr - start, size), fd)
        return cls(path, token, size, 0 if settings.isolated() else os.getpid()), start

    def open(self, ordinal: int, start: int, nbytes: int) -> Any:
        native = runtime.native()

        def map_it() -> Mapping:
            pid = 0 if settings.isolated() else self.exporter
            fd, connection = fd_socket.fetch(self.socket, self.token, pid)
            connection.close()
            try:
                ptr = native.vmm_import_fd(ordinal, fd, self.allocation)
            finally:
                os.close(fd)
            return Mapping(ptr, self.allocation, partial(native.vmm_free, ordinal))

        return _view(MAPPED.open(("vmm", ordinal, self.socket, self.token), map_it), ordinal, start, nbytes)

    def withdraw(self) -> None:
        """The allocation stays with whoever has opened it; nobody else can."""
        OFFERS.remove(self.token)


def check_extent(ptr: int, nbytes: int, ordinal: int) -> None:
    """Refuse memory of another process that is shorter than its descriptor says.

    Raises:
        DeviceError: It is.
    """
    try:
        base, size = runtime.native().address_range(ptr, ordinal)
    except RuntimeError as exc:  # a driver that does not tell of what was mapped: as told, then
        logger.debug("the extent of memory at %#x is not known: %s", ptr, exc)
        return
    if ptr + nbytes > base + size:
        raise DeviceError(
            f"{nbytes} bytes of another process: the driver knows {base + size - ptr}: the descriptor does not fit "
            "the memory that it names"
        )


def _view(mapping: Mapping, ordinal: int, start: int, nbytes: int) -> Any:
    if start + nbytes > mapping.nbytes:
        raise DeviceError(
            f"a storage of {nbytes} bytes at byte {start} of an allocation of {mapping.nbytes} bytes: the "
            "descriptor does not fit the memory that it names"
        )
    return runtime.bytes_at(mapping.ptr + start, nbytes, ordinal, mapping)


WAYS: dict[str, Any] = {"torch": TorchHandle, "raw": RawHandle, "vmm": VmmHandle}


class Plane(msgspec.Struct, **_Fixed):
    """One tensor, and how its storage is opened."""

    tensor: TensorMeta
    handle: TorchHandle | RawHandle | VmmHandle
    start: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Byte of the allocation at which the storage begins."""

    def __post_init__(self) -> None:
        allocation = getattr(self.handle, "allocation", None)
        if allocation is not None and self.start + self.tensor.nbytes > allocation:
            raise ValueError(
                f"a storage of {self.tensor.nbytes} bytes at byte {self.start} of an allocation of {allocation}"
            )
        if not isinstance(self.tensor.device, str):
            raise ValueError(f"device {self.tensor.device!r}: expected a UUID")


class Wire(msgspec.Struct, **_Fixed):
    """What travels for one layer."""

    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    single: bool
    """One tensor, not a sequence of one."""
