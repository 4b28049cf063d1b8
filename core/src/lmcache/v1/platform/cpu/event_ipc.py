"""Events that order CPU work between processes, on counters in shared memory.

On a stream without ``launch_host_func`` (None, or torch's CPU streams) work is done when a call returns: a
record completes at once and a wait blocks the host. On a stream that has it, both happen when the stream gets
there. As with CUDA, an event that was never recorded is complete, a wait is for the last record at the time of
the call, and only the process that created an event records it.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from functools import partial
from typing import Any

import msgspec

from lmcache.errors import DeviceError
from lmcache.v1.platform.cpu import event_slots as slots
from lmcache.v1.platform.cpu import futex
from lmcache.v1.platform.cpu.shared_file import FileId, SharedFile, is_running, open_file
from lmcache.v1.platform.cpu.stub_cpu_device import enqueue

__all__ = ["CPU_EVENTS", "CpuEvent", "CpuEventIPCBackend"]

_TAG, _VERSION = b"LMCe", 1
# Tag, version; pid, fd, start time, pid namespace, device, inode, bytes of the page; slot, generation.
_HANDLE = struct.Struct(">4sB7QIQ")
_DEADLINE = 30.0
_SLICE = 0.05
"""Seconds between looks at whether the recorder lives."""
_PAGES_KEPT = 64
"""Pages of other processes that stay mapped, so that another event of one costs no system call."""


class CpuEvent:
    """A position in the work of the process that created it. Made by :class:`CpuEventIPCBackend`."""

    def __init__(
        self, file: SharedFile, index: int, generation: int, owner: FileId, pool: Any = None, slot: Any = None
    ) -> None:
        self._file, self._index, self._generation, self._owner = file, index, generation, owner
        self._words = memoryview(file).cast("Q")
        self._pool, self._slot = pool, slot

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self._pool.give_back(self._slot)

    def handle(self) -> bytes:
        """Bytes from which another process makes this event."""
        return _HANDLE.pack(
            _TAG, _VERSION, *msgspec.structs.astuple(self._owner), self._index, self._generation
        )

    def record(self, stream: Any = None) -> None:
        """Mark the present end of ``stream``.

        Raises:
            ValueError: Another process created the event.
        """
        if self._slot is None or self._owner.pid != os.getpid():
            raise ValueError(
                f"an imported event cannot be recorded: process {self._owner.pid} created it; make one of your own"
            )
        completion = self._slot.record()
        try:
            enqueue(stream, completion)
        except BaseException:
            completion.fail()
            raise

    def wait(self, stream: Any = None, timeout: float = _DEADLINE) -> None:
        """Let later work on ``stream`` wait for the last record; see :meth:`synchronize` for the errors.

        On an asynchronous stream an error is the stream's, and the seconds count from when it gets there.
        """
        target = self._target()
        if not self._reached(target):
            enqueue(stream, partial(self._await, target, timeout))

    def query(self) -> bool:
        """Whether the last record is complete; does not block.

        Raises:
            RuntimeError: It never will be: its stream failed or its process has ended.
        """
        target = self._target()
        if self._reached(target):
            return True
        self._check_recorder(target)
        return self._reached(target)

    def synchronize(self, timeout: float = _DEADLINE) -> None:
        """Block the host until the last record is complete.

        Raises:
            TimeoutError: It is not after ``timeout`` seconds.
            RuntimeError: It never will be.
        """
        self._await(self._target(), timeout)

    def _target(self) -> int:
        """The number of the last record; 0 if there is nothing to wait for."""
        recorded = self._read(slots.RECORDED)
        if self._read(slots.GENERATION) != self._generation:
            return 0  # the slot serves another event now, whose records are not ours
        return recorded

    def _reached(self, target: int) -> bool:
        # True also once the slot has been given on: that happens only when all is complete and nothing failed.
        done = target == 0 or self._read(slots.COMPLETED) >= target
        if done and 0 < self._read(slots.FAILED) <= target:
            raise RuntimeError(f"{self}: the work before it failed or was dropped by its stream")
        return done

    def _await(self, target: int, timeout: float, _: object = None) -> None:
        end = time.monotonic() + timeout
        address = slots.futex_address(self._file, self._index)
        while True:
            seen = self._read(slots.COMPLETED) & 0xFFFFFFFF
            if self._reached(target):
                return
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self}: not complete after {timeout:g} s")
            futex.wait(address, seen, min(left, _SLICE))
            self._check_recorder(target)

    def _check_recorder(self, target: int) -> None:
        # What it completed before it died is complete: look at the counters last.
        if not is_running(self._owner.pid, self._owner.start_time) and not self._reached(target):
            raise RuntimeError(f"{self}: the recorder died before completing it")

    def _read(self, which: int) -> int:
        return int(self._words[slots.word(self._index, which)])

    def __str__(self) -> str:
        return f"CPU event {self._index}.{self._generation} of process {self._owner.pid}"


class CpuEventIPCBackend:
    """``EventIPCBackend`` of host memory.

    Args:
        wait_seconds: Deadline of a wait, also of one that is queued on a stream.

    Raises:
        ValueError: ``wait_seconds`` is not positive.
    """

    device_type = "cpu"

    def __init__(self, wait_seconds: float = _DEADLINE) -> None:
        if not wait_seconds > 0:
            raise ValueError(f"wait_seconds={wait_seconds!r}: expected a positive number of seconds")
        self.wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._pid = 0
        self._pool = slots.SlotPool()
        self._owners: dict[int, FileId] = {}
        self._mapped: dict[FileId, SharedFile] = {}

    def check_event_support(self, device: Any) -> None:
        """Make, record, export, import and wait for an event; RuntimeError if that does not work here."""
        asked = "" if device is None or isinstance(device, int) else str(getattr(device, "type", device))
        if asked.partition(":")[0] not in ("", self.device_type):
            raise RuntimeError(f"event IPC of 'cpu' does not serve device {device!s}")
        try:
            event = self.create_event(device)
            self.record_event(event, None)
            twin = self.import_event(self.export_event(event, device), device)
            self.wait_event(twin, None)
            complete = self.query_event(twin)
        except Exception as exc:
            raise RuntimeError(f"event IPC is not supported on 'cpu' here: {exc}") from exc
        if not complete:
            raise RuntimeError("event IPC is not supported on 'cpu' here: a recorded event does not complete")

    def create_event(self, device: Any = None) -> CpuEvent:
        """A new event. Its slot serves another one when it is gone and its records are complete."""
        with self._lock:
            if self._pid != os.getpid():  # after a fork the pages are the parent's
                self._pid, self._pool, self._owners = os.getpid(), slots.SlotPool(), {}
            pool = self._pool
            slot = pool.take()
            owner = self._owners.get(slot.file.address)
            if owner is None:
                owner = self._owners[slot.file.address] = slot.file.identity()
        return CpuEvent(slot.file, slot.index, slot[slots.GENERATION], owner, pool, slot)

    def export_event(self, event: CpuEvent, device: Any = None) -> bytes:
        """Bytes by which another process can import ``event``, which need not be kept for it."""
        if event._slot is None:
            raise ValueError(
                f"{event}: an imported event is not exported again; pass on the bytes it came as"
            )
        return event.handle()

    def import_event(self, handle: bytes, device: Any = None) -> CpuEvent:
        """The event that another process exported as ``handle``.

        Raises:
            ValueError: Not such bytes.
            DeviceError: (a RuntimeError) The exporter has ended (unless events of the same page came before:
                then a wait tells), or its memory is not what was described.
        """
        tag = bytes(handle[:5])
        if len(handle) != _HANDLE.size or tag != _TAG + bytes([_VERSION]):
            raise ValueError(
                f"not an event handle of the CPU backend: expected {_HANDLE.size} bytes of version {_VERSION}, "
                f"got {len(handle)} bytes that begin with {tag!r}"
            )
        _, _, *found, index, generation = _HANDLE.unpack(handle)
        try:
            owner = msgspec.convert(dict(zip(FileId.__struct_fields__, found, strict=True)), FileId)
        except msgspec.ValidationError as exc:
            raise ValueError(f"not an event handle of the CPU backend: {exc}") from None
        if owner.nbytes % 8 or not 0 < index < owner.nbytes // (8 * slots.word(1, 0)):
            raise ValueError(f"event handle: slot {index} is not in a page of {owner.nbytes} bytes")
        return CpuEvent(self._page(owner), index, generation, owner)

    def _page(self, owner: FileId) -> SharedFile:
        with self._lock:
            file = self._mapped.get(owner)
            if file is None:
                file = open_file(owner)
                if memoryview(file).cast("Q")[0] != slots.MAGIC:
                    raise DeviceError(
                        f"event handle of process {owner.pid}: the memory it names holds no events"
                    )
                for gone in [o for o in self._mapped if not is_running(o.pid, o.start_time)]:
                    del self._mapped[gone]
                self._mapped[owner] = file
                if len(self._mapped) > _PAGES_KEPT:
                    del self._mapped[next(iter(self._mapped))]
            return file

    def record_event(self, event: CpuEvent, stream: Any) -> None:
        """Mark the present end of ``stream``."""
        event.record(stream)

    def wait_event(self, event: CpuEvent, stream: Any) -> None:
        """Let later work on ``stream`` wait for ``event``, for at most ``wait_seconds``."""
        event.wait(stream, self.wait_seconds)

    def query_event(self, event: CpuEvent) -> bool:
        """Whether the work before ``event`` is done; RuntimeError if it never will be."""
        return event.query()

    def synchronize_event(self, event: CpuEvent, device: Any = None) -> None:
        """Block the host until the work before ``event`` is done, for at most ``wait_seconds``."""
        event.synchronize(self.wait_seconds)


#: The instance the whole process shares.
CPU_EVENTS = CpuEventIPCBackend()
