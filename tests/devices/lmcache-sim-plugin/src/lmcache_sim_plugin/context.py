"""The server's view on the KV of one worker on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch

from lmcache.v1.platform.torch_cache_context import TorchCacheContext

__all__ = ["SimCacheContext", "StreamHandle"]


class StreamHandle:
    """A stream for callers that think in handles."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.ptr: int = stream.sim_stream

    def launch_host_func(self, callback: Callable[[Any], object], arg: Any) -> None:
        """Call ``callback(arg)`` on the stream's thread, once all that is on the stream is done."""
        self._stream.launch_host_func(lambda: callback(arg))


class SimCacheContext(TorchCacheContext):
    """See :class:`TorchCacheContext`. Each context has a stream of its own."""

    device_type: ClassVar[str] = "sim"

    @cached_property
    def stream(self) -> Any:
        """The stream of this context's transfers."""
        return torch.sim.Stream(self.device)

    @cached_property
    def cupy_stream(self) -> StreamHandle:
        """The same stream."""
        return StreamHandle(self.stream)
