"""The server's view on the KV of one worker on a GPU."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.torch_cache_context import TorchCacheContext
from lmcache_cuda import runtime

__all__ = ["GPUCacheContext", "StreamHandle"]

logger = init_logger(__name__)


class StreamHandle:
    """A stream for callers that think in handles.

    Args:
        stream: The stream; it lives as long as this object.
        ordinal: Its device.
    """

    def __init__(self, stream: Any, ordinal: int) -> None:
        self._stream, self._ordinal = stream, ordinal
        self.ptr: int = runtime.stream_handle(stream)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[int, Callable[[Any], object], Any] | None] | None = None

    def launch_host_func(self, callback: Callable[[Any], object], arg: Any) -> None:
        """Call ``callback(arg)`` once all that is on the stream now is done, on a thread of this object's.

        Work that is queued later does not wait for the callback: a callback of Python on the driver's own thread
        would have every stream of the process wait for the interpreter.
        """
        native = runtime.native()
        event = native.event_create(self._ordinal)
        try:
            native.event_record(event, self.ptr, self._ordinal)
        except BaseException:
            native.event_destroy(event, self._ordinal)
            raise
        with self._lock:
            if self._calls is None:
                self._calls = queue.SimpleQueue()
                weakref.finalize(self, self._calls.put, None).atexit = False
                threading.Thread(
                    target=_call_when_done, args=(self._calls, self._ordinal), name="lmcache-cuda-host", daemon=True
                ).start()  # fmt: skip
            self._calls.put((event, callback, arg))


def _call_when_done(calls: Any, ordinal: int) -> None:
    native = runtime.native()
    while (call := calls.get()) is not None:  # None: its stream's object has gone
        event, callback, arg = call
        try:
            native.event_synchronize(event, ordinal)
            native.event_destroy(event, ordinal)
        except RuntimeError as exc:  # what came before it has failed: nothing is done that could be told
            logger.error("a callback of a stream is not called: %s", exc)
            continue
        try:
            callback(arg)
        except Exception:
            logger.exception("a callback of a stream failed")


class GPUCacheContext(TorchCacheContext):
    """See :class:`TorchCacheContext`. Each context has streams of its own."""

    device_type: ClassVar[str] = "cuda"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for index in range(len(self._groups)):
            self._tell_alignment(index)

    def _tell_alignment(self, kernel_group_idx: int) -> None:
        """Let kernels that read the table on the device know how wide their copies may be."""
        alignment = 0
        for address in self.get_kernel_group_kv_pointer_list(kernel_group_idx):
            alignment |= address
        self.get_kernel_group_kv_pointers(kernel_group_idx).lmcache_alignment = alignment

    @property
    def ordinal(self) -> int:
        """The index of the device in this process."""
        return runtime.ordinal_of(self.device)

    @cached_property
    def stream(self) -> Any:
        """The stream of this context's transfers."""
        return runtime.new_stream(self.ordinal)

    @cached_property
    def cupy_stream(self) -> StreamHandle:
        """The same stream."""
        return StreamHandle(self.stream, self.ordinal)

    @cached_property
    def high_priority_stream(self) -> Any:
        """A second one, for what must not queue behind the first; the device serves it before others."""
        return runtime.new_stream(self.ordinal, high_priority=True)

    @cached_property
    def high_priority_cupy_stream(self) -> StreamHandle:
        """The same as :attr:`high_priority_stream`."""
        return StreamHandle(self.high_priority_stream, self.ordinal)

    def stage_block_ids(self, block_ids: Sequence[int]) -> Any:
        """See :class:`BaseCacheContext`; from page-locked memory, so that the host never waits.

        Raises:
            ValueError: More ids than the buffer holds.
        """
        capacity = self.block_ids_buffer_.numel()
        if len(block_ids) > capacity:
            raise ValueError(f"{len(block_ids)} block ids: expected at most {capacity} in one transfer")
        staged = self.block_ids_buffer_[: len(block_ids)]
        staged.copy_(runtime.ids_for_upload(list(block_ids)), non_blocking=True)
        return staged

    def close(self) -> None:
        """Wait for both streams, then unmap. May be called more than once."""
        try:
            if not self._closed and "high_priority_stream" in self.__dict__:
                self.high_priority_stream.synchronize()
        finally:
            super().close()
