"""Keeping a stream busy, so that a test can look at what is not done yet."""

from __future__ import annotations

import time
from typing import Any

from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["LONG", "Stall"]

LONG = 0.5
"""Seconds for which a stream is to be busy."""

_ELEMENTS = 1 << 22
_MOST = 4096


class Stall:
    """Busies streams of one backend, in the best way that it offers: its own ``conformance_stall(stream,
    seconds)``, a ``_sleep(cycles)`` of its torch module, or else copies."""

    def __init__(self, spec: DeviceSpec, dev: Any, device: Any) -> None:
        self._spec, self._dev, self._device = spec, dev, device
        self._own = getattr(spec, "conformance_stall", None)
        self._sleep = None if self._own else getattr(dev, "_sleep", None)
        self._cost = 0.0
        self._buffers: Any = None

    def __call__(self, seconds: float = LONG) -> None:
        """Queue work of about ``seconds`` on the current stream, and return at once."""
        if self._own is not None:
            self._own(self._spec.current_stream(self._device), seconds)
        elif self._sleep is not None:
            self._sleep(int(seconds * 2e9))  # cycles of some 2 GHz
        else:
            self._copy(seconds)

    def _copy(self, seconds: float) -> None:
        import torch

        if self._buffers is None:
            ones = torch.ones(_ELEMENTS).to(self._device)
            self._buffers = ones, torch.zeros(_ELEMENTS).to(self._device)
            self._round(8)
            self._dev.synchronize()
            began = time.monotonic()
            self._round(8)
            self._dev.synchronize()
            self._cost = (time.monotonic() - began) / 8
        self._round(min(_MOST, int(seconds / max(self._cost, 1e-6))))

    def _round(self, count: int) -> None:
        source, target = self._buffers
        for _ in range(count):
            target.copy_(source, non_blocking=True)
