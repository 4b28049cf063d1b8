"""Events between processes that share no driver events: counters that streams move on and wait for.

A record writes the next number into the slot of its stream, a wait holds a stream until the slot is that far. What
travels is the page, the slot and the number, as they are when the event is exported: an event that is recorded again
is exported again.

The driver cannot give up a stream's wait. So every wait is watched: where its owner has died, or does not answer for
a minute where death cannot be seen, the slot is moved on by force, so that the device does not hang, and everything
recorded behind that wait says that it has failed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache.v1.platform.base.ipc_wire import Name
from lmcache_cuda import runtime
from lmcache_cuda.timeline_pages import SLOTS, DevicePage, DevicePlace, HostPage, HostPlace

__all__ = ["TimelineEvent", "TimelineEventBackend"]

logger = init_logger(__name__)

_TAG = b"LMCt\x01"
_DEADLINE = 30.0
_UNSEEN_DEADLINE = 60.0
_LOOK_SECONDS = 0.02
_NAPS = (5e-5, 1e-3)
"""Shortest and longest pause of a host that waits for another process."""
_PAGES_KEPT = 64
_PROBE = 0


class _Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    place: HostPlace | DevicePlace
    device: Name
    slot: Annotated[int, msgspec.Meta(gt=_PROBE, lt=SLOTS)]
    value: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(eq=False)
class _Wait:
    """One stream's wait for another process. It holds the page until the stream has passed it."""

    page: Any
    slot: int
    value: int
    deadline: float
    ordinal: int
    mark: int
    """The driver's event behind the wait."""
    fault: str = ""
    """Why it was ended by force."""


@dataclass(eq=False)
class TimelineEvent:
    """A number on a slot. 0: never recorded, hence complete."""

    ordinal: int
    page: Any = None
    slot: int = 0
    value: int = 0
    mark: int = 0
    """The driver's event beside it, by which this process asks and waits."""
    behind: tuple[_Wait, ...] = ()
    """Waits of its stream that were open when it was recorded."""


@dataclass
class _Stream:
    slot: int
    value: int = 0
    waits: list[_Wait] = field(default_factory=list)


@dataclass
class _Book:
    """The page of one device, and which stream has which slot."""

    page: Any
    place: Any
    streams: dict[int, _Stream] = field(default_factory=dict)
    next_slot: int = _PROBE + 1


class TimelineEventBackend:
    """``EventIPCBackend`` on counters.

    Args:
        pages: How pages are made: ``HostPage.create`` or ``DevicePage.create``.
        wait_seconds: How long a host waits.
        unseen_seconds: How long a stream waits for an owner whose death could not be seen.
    """

    device_type = "cuda"

    def __init__(
        self,
        pages: Callable[[int], tuple[Any, Any]] = HostPage.create,
        wait_seconds: float = _DEADLINE,
        unseen_seconds: float = _UNSEEN_DEADLINE,
    ) -> None:
        self.device_type = runtime.DEVICE_TYPE
        self._make_page = pages
        self._wait_seconds, self._unseen_seconds = wait_seconds, unseen_seconds
        self._lock = threading.RLock()
        self._books: dict[int, _Book] = {}
        self._opened: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._recent: deque[Any] = deque(maxlen=_PAGES_KEPT)
        self._watched: list[_Wait] = []
        self._watcher: threading.Thread | None = None

    # --- contract ------------------------------------------------------------------------------------------

    def check_event_support(self, device: Any) -> None:
        """Write and wait on a stream of its own; RuntimeError if that does not work here."""
        _check_type(self.device_type, device)
        try:
            native, ordinal = runtime.native(), runtime.ordinal_of(device)
            if not native.device_info(ordinal)["mem_ops"]:
                raise DeviceError("the device has no memory operations of streams")
            with self._lock:
                page = self._book(ordinal).page
                stream = native.stream_create(ordinal, 0)
                try:
                    value = page.read(_PROBE) + 1
                    native.stream_write_u64(stream, page.address(_PROBE), value, ordinal)
                    native.stream_wait_u64_geq(stream, page.address(_PROBE), value, ordinal)
                    native.stream_synchronize(stream, ordinal)
                finally:
                    native.stream_destroy(stream, ordinal)
                seen = page.read(_PROBE)
            if seen != value:
                raise DeviceError(f"the stream wrote {value}, and the host reads {seen}")
        except Exception as exc:
            raise RuntimeError(f"event IPC by counters is not supported on {device}: {exc}") from exc

    def create_event(self, device: Any) -> TimelineEvent:
        """A new event of this process."""
        native, ordinal = runtime.native(), runtime.ordinal_of(device)
        event = TimelineEvent(ordinal, mark=native.event_create(ordinal))
        weakref.finalize(event, _destroy, native, event.mark, ordinal).atexit = False
        return event

    def export_event(self, event: TimelineEvent, device: Any) -> bytes:
        """Bytes by which another process finds the last record of now."""
        _check_own(event)
        with self._lock:
            book = self._book(event.ordinal)
            slot = event.slot or _PROBE + 1
            handle = _Handle(book.place, runtime.uuid_of(event.ordinal), slot, event.value)
        return _TAG + msgspec.msgpack.encode(handle)

    def import_event(self, handle: bytes, device: Any) -> TimelineEvent:
        """The record that another process exported as ``handle``.

        Raises:
            ValueError: Not such bytes, of another device, or a record of this process that it never made.
            DeviceError: The exporter has ended, or its page cannot be mapped.
        """
        found = _decode(handle)
        ordinal = runtime.ordinal_of(device)
        if found.device != runtime.uuid_of(ordinal):
            raise ValueError(f"event handle of device {found.device}: expected {runtime.uuid_of(ordinal)}")
        page = self._page(found, ordinal)
        return TimelineEvent(ordinal, page, found.slot, found.value)

    def record_event(self, event: TimelineEvent, stream: Any) -> None:
        """Mark the present end of ``stream``.

        Raises:
            ValueError: Another process created the event.
        """
        _check_own(event)
        native, handle = runtime.native(), runtime.stream_handle(stream)
        with self._lock:  # numbers must reach the stream in their order
            book = self._book(event.ordinal)
            line = self._stream(book, handle)
            native.stream_write_u64(handle, book.page.address(line.slot), line.value + 1, event.ordinal)
            line.value += 1
            event.page, event.slot, event.value = book.page, line.slot, line.value
            native.event_record(event.mark, handle, event.ordinal)
            line.waits = [wait for wait in line.waits if wait.fault or wait in self._watched]
            event.behind = tuple(line.waits)

    def wait_event(self, event: TimelineEvent, stream: Any) -> None:
        """Let later work on ``stream`` wait for ``event``. Does not block the host.

        Raises:
            RuntimeError: It never will be complete.
        """
        if not event.value:
            return
        native, handle = runtime.native(), runtime.stream_handle(stream)
        if event.mark:
            _check_behind(event)
            native.stream_wait_event(handle, event.mark, event.ordinal)
            return
        if event.page.tells_of_death and self.query_event(event):
            return
        seconds = self._wait_seconds if event.page.tells_of_death else self._unseen_seconds
        mark = native.event_create(event.ordinal)
        deadline = time.monotonic() + seconds
        wait = _Wait(event.page, event.slot, event.value, deadline, event.ordinal, mark)
        with self._lock:
            try:
                line = self._stream(self._book(event.ordinal), handle)
                native.stream_wait_u64_geq(handle, event.page.address(event.slot), event.value, event.ordinal)
            except BaseException:
                _destroy(native, mark, event.ordinal)
                raise
            # From here on the stream waits: it is watched, whatever else fails.
            line.waits.append(wait)
            self._watched.append(wait)
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(
                    target=self._watch, args=(native,), name="lmcache-cuda-waits", daemon=True
                )
                self._watcher.start()
            native.event_record(mark, handle, event.ordinal)

    def query_event(self, event: TimelineEvent) -> bool:
        """Whether the work before ``event`` is done.

        Raises:
            RuntimeError: It never will be: its process has ended, or what it waited for has.
        """
        if not event.value:
            return True
        if event.mark:
            done = bool(runtime.native().event_query(event.mark, event.ordinal))
            _check_behind(event)
            return done
        if event.page.read(event.slot) >= event.value:
            return True
        # What it completed before it died is complete: look at the counter last.
        if event.page.owner_is_gone() and event.page.read(event.slot) < event.value:
            raise DeviceError(_died(event))
        return bool(event.page.read(event.slot) >= event.value)

    def synchronize_event(self, event: TimelineEvent, device: Any) -> None:
        """Block the host until the work before ``event`` is done.

        Raises:
            TimeoutError: Another process's is not after ``wait_seconds``.
            RuntimeError: It never will be.
        """
        if event.mark and event.value:
            runtime.native().event_synchronize(event.mark, event.ordinal)
            _check_behind(event)
            return
        end = time.monotonic() + self._wait_seconds
        nap, longest = _NAPS
        while not self.query_event(event):
            if time.monotonic() > end:
                raise TimeoutError(f"event of another process: not complete after {self._wait_seconds:g} s")
            time.sleep(nap)
            nap = min(longest, nap * 2)

    # --- pages and slots -----------------------------------------------------------------------------------

    def _book(self, ordinal: int) -> _Book:
        with self._lock:
            if ordinal not in self._books:
                self._books[ordinal] = _Book(*self._make_page(ordinal))
            return self._books[ordinal]

    def _stream(self, book: _Book, handle: int) -> _Stream:
        """The slot of a stream. Where all are taken, that of one that has nothing under way goes on with it."""
        line = book.streams.get(handle)
        if line is None and book.next_slot < SLOTS:
            line = _Stream(book.next_slot)
            book.next_slot += 1
        elif line is None:
            idle = next((h for h, s in book.streams.items() if book.page.read(s.slot) >= s.value), None)
            if idle is None:
                raise DeviceError(f"events of {SLOTS - 1} streams are under way at once: expected fewer")
            line = book.streams.pop(idle)
            line.waits = []
        book.streams[handle] = line
        return line

    def _page(self, found: _Handle, ordinal: int) -> Any:
        key = (found.place, ordinal)
        with self._lock:
            own = self._books.get(ordinal)
            if own is not None and own.place == found.place:
                _check_made(own, found)
                return own.page
            page = self._opened.get(key)
        if page is None:
            fresh = found.place.open(ordinal)  # not under the lock: its owner may be slow to answer
            with self._lock:
                page = self._opened.setdefault(key, fresh)
                if page is fresh:
                    self._recent.append(page)
        return page

    # --- the watcher ---------------------------------------------------------------------------------------

    def _watch(self, native: Any) -> None:
        """Look after open waits until there are none."""
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                waits = list(self._watched)
            ended = [wait for wait in waits if self._has_ended(native, wait)]
            with self._lock:
                self._watched = [wait for wait in self._watched if wait not in ended]
                if not self._watched:
                    self._watcher = None
                    return

    def _has_ended(self, native: Any, wait: _Wait) -> bool:
        """Whether the stream has passed the wait; one that never would is made to."""
        try:
            if wait.page.read(wait.slot) >= wait.value:
                if not native.event_query(wait.mark, wait.ordinal):
                    return False
                native.event_destroy(wait.mark, wait.ordinal)
                return True
            late = not wait.page.tells_of_death and time.monotonic() > wait.deadline
            if late or wait.page.owner_is_gone():
                why = "did not complete it in time" if late else "has ended before completing it"
                wait.fault = f"a stream waited for an event of another process, which {why}"
                logger.error("%s; what came behind it is void", wait.fault)
                wait.page.force(wait.slot, wait.value)
            return False
        except Exception as exc:
            wait.fault = f"a stream's wait for another process cannot be watched: {exc}"
            logger.error("%s", wait.fault)
            return True


def _check_type(served: str, device: Any) -> None:
    asked = "" if device is None or isinstance(device, int) else str(getattr(device, "type", device))
    if asked.partition(":")[0] not in ("", served):
        raise RuntimeError(f"event IPC of {served!r} does not serve device {device!s}")


def _check_own(event: TimelineEvent) -> None:
    if not event.mark:
        raise ValueError("an imported event is not recorded or exported: make one of your own")


def _check_behind(event: TimelineEvent) -> None:
    fault = next((wait.fault for wait in event.behind if wait.fault), "")
    if fault:
        raise DeviceError(f"{fault}; what is recorded behind it is void")


def _check_made(book: _Book, found: _Handle) -> None:
    """A number that this process has yet to write would be forced into its own slot once the wait for it is late."""
    made = next((line.value for line in book.streams.values() if line.slot == found.slot), 0)
    if found.value > made:
        raise ValueError(f"event handle {found.slot}.{found.value} of this process: it has recorded {made}")


def _died(event: TimelineEvent) -> str:
    return f"event {event.slot}.{event.value} of another process: it has ended before completing it"


def _decode(handle: bytes) -> _Handle:
    if bytes(handle[: len(_TAG)]) != _TAG:
        raise ValueError(f"not an event handle by counters: {len(handle)} bytes begin {bytes(handle[:5])!r}")
    try:
        return msgspec.msgpack.decode(handle[len(_TAG) :], type=_Handle)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as exc:
        raise ValueError(f"not an event handle by counters: {' '.join(str(exc).split())}") from None


def _destroy(native: Any, event: int, ordinal: int) -> None:
    try:
        native.event_destroy(event, ordinal)
    except RuntimeError as exc:
        logger.debug("event not destroyed: %s", exc)


#: Names of LMCACHE_CUDA_EVENTS and how their pages are made.
PAGES: dict[str, Callable[[int], tuple[Any, Any]]] = {"host": HostPage.create, "device": DevicePage.create}
