"""A stream on the host: one thread that runs what is queued, in order."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache.v1.platform.cpu.stub_cpu_device import StubEvent

__all__ = ["CpuStream"]

logger = init_logger(__name__)

_NUMBERS = itertools.count(1)
_DEADLINE = 30.0


class CpuStream:
    """Asynchronous host work in the form of a device stream. Threads may share it.

    What a queued callable raises is the stream's: the rest of the queue is dropped uncalled, and from then on
    every submission and ``synchronize`` raise DeviceError.

    Args:
        device: For those who ask; the stream does not use it.
        name: Of the thread, and in messages.
    """

    def __init__(self, device: Any = "cpu", priority: int = 0, name: str = "lmcache-stream") -> None:
        self.device, self.priority = device, priority
        self.ptr = self.cuda_stream = next(_NUMBERS)
        """Unique among the streams of the process, never 0."""
        self.name = f"{name}-{self.ptr}"
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[Any], Any], Any]] = deque()
        self._submitted = self._finished = 0
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def launch_host_func(self, callback: Callable[[Any], Any], arg: Any = None) -> None:
        """Call ``callback(arg)`` on the stream's thread after all that was submitted before.

        Raises:
            DeviceError: Earlier work failed, or the stream is closed.
        """
        with self._changed:
            self._raise_error()
            if self._closing:
                raise DeviceError(f"stream {self.name} is closed")
            self._queue.append((callback, arg))
            self._submitted += 1
            self._changed.notify_all()

    def query(self) -> bool:
        """Whether all that was submitted is done; does not block. DeviceError if some of it failed."""
        with self._changed:
            self._raise_error()
            return self._finished == self._submitted

    def synchronize(self, timeout: float = _DEADLINE) -> None:
        """Block until what was submitted before this call is done.

        Raises:
            DeviceError: Some of it failed.
            TimeoutError: It is not done after ``timeout`` seconds.
            RuntimeError: Called by work on this stream, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"stream {self.name}: work on it cannot wait for it")
        with self._changed:
            target = self._submitted
            done = self._changed.wait_for(
                lambda: self._error is not None or self._finished >= target, timeout
            )
            self._raise_error()
            if not done:
                left = target - self._finished
                raise TimeoutError(
                    f"stream {self.name}: {left} pieces of work are not done after {timeout:g} s"
                )

    def record_event(self, event: Any = None) -> Any:
        """Mark the stream's present end with ``event``, or with a new event for use in this process."""
        event = StubEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Let later work wait for ``event``, as it is recorded now."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for what is on ``stream`` now."""
        self.wait_event(stream.record_event())

    def close(self, timeout: float = _DEADLINE) -> None:
        """Let what was submitted run, then end the thread. May be called more than once.

        Raises:
            TimeoutError: The work is not done after ``timeout`` seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"stream {self.name}: its work is not done after {timeout:g} s")

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            cause = f"{type(self._error).__name__}: {self._error}"
            raise DeviceError(f"stream {self.name}: earlier work failed: {cause}") from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                callback, arg = self._queue.popleft()
            error = _failure(callback, arg)
            del callback, arg  # what it holds must not stay until the next one comes
            self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        dropped: list[Any] = []
        with self._changed:
            self._finished += 1
            if error is not None:
                self._error = error
                dropped = list(self._queue)
                self._queue.clear()
                self._finished = self._submitted
            self._changed.notify_all()
        if error is not None:
            logger.error(
                "stream %s failed, %d pieces of work are dropped: %s: %s",
                self.name, len(dropped), type(error).__name__, error,
            )  # fmt: skip


def _failure(callback: Callable[[Any], Any], arg: Any) -> BaseException | None:
    try:
        callback(arg)
    except BaseException as exc:  # the thread goes on, to say so to whoever asks
        return exc
    return None
