"""What the scripts of this folder share: device memory, timing by events, and rows of a table.

Only the native module is used, so all of it also runs over the fake driver, where the figures mean nothing.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType

MIB = 1 << 20


@dataclass
class Row:
    """One figure. `ratio` is to the ceiling of the same run; `goal` is the least ratio, or the most of `value`."""

    what: str
    value: float
    unit: str
    beside: str = ""
    ratio: float | None = None
    goal: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is not None:
            return self.ratio is not None and self.ratio >= self.goal
        return None if self.most is None else self.value <= self.most

    def line(self) -> str:
        """For people."""
        share = f"{self.ratio:7.1%} of {self.beside}" if self.ratio is not None else ""
        goal = f"goal {self.goal:.0%}" if self.goal else f"goal <= {self.most:g}" if self.most else ""
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.what:<58}{self.value:10.2f} {self.unit:<5} {share:<36} {goal:<12} {verdict}".rstrip()


def report(rows: list[Row], path: str = "") -> int:
    """Print the table, write it as JSON; exit code 1 if a goal is missed."""
    for row in rows:
        print(row.line(), flush=True)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([{**asdict(row), "met": row.met} for row in rows], file, indent=2)
    return int(any(row.met is False for row in rows))


class Rig:
    """One device, one stream, and memory that is given back at the end."""

    def __init__(self, native: ModuleType, device: int = 0, rounds: int = 5) -> None:
        self.native, self.device, self.rounds = native, device, rounds
        self.stream = native.stream_create(device)
        self._begin, self._end = (native.event_create(device, False, True) for _ in range(2))
        self._device_memory: list[int] = []
        self._host_memory: list[int] = []

    def on_device(self, nbytes: int) -> int:
        """The address of new device memory."""
        self._device_memory.append(self.native.mem_alloc(self.device, nbytes))
        return self._device_memory[-1]

    def on_host(self, nbytes: int) -> int:
        """The address of new page-locked memory."""
        self._host_memory.append(self.native.host_alloc(nbytes, 0, self.device))
        return self._host_memory[-1]

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Queue a copy between any two addresses."""
        self.native.memcpy_async(dst, src, nbytes, self.stream, self.device)

    def wait(self) -> None:
        """Until the stream is done."""
        self.native.stream_synchronize(self.stream, self.device)

    def write(self, address: int, data: bytes) -> None:
        """Bytes to device memory."""
        held = ctypes.create_string_buffer(data, len(data))
        self.copy(address, ctypes.addressof(held), len(data))
        self.wait()

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of device memory."""
        held = ctypes.create_string_buffer(nbytes)
        self.copy(ctypes.addressof(held), address, nbytes)
        self.wait()
        return held.raw

    def seconds(self, work: Callable[[], object]) -> float:
        """The best time on the device of what `work` queues, by events; one round before them warms up."""
        native, best = self.native, float("inf")
        for number in range(self.rounds + 1):
            native.event_record(self._begin, self.stream, self.device)
            work()
            native.event_record(self._end, self.stream, self.device)
            native.event_synchronize(self._end, self.device)
            if number:
                best = min(best, native.event_elapsed_ms(self._begin, self._end, self.device) / 1e3)
        return max(best, 1e-9)

    def host_seconds(self, work: Callable[[], object], calls: int = 50) -> float:
        """The median time of the host in one call of `work`; the stream is idle at the beginning of each."""
        times = []
        for _ in range(calls):
            self.wait()
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        self.wait()
        return sorted(times)[len(times) // 2]

    def free(self) -> None:
        """Give back what was taken since the last call."""
        self.wait()
        while self._device_memory:
            self.native.mem_free(self.device, self._device_memory.pop())
        while self._host_memory:
            self.native.host_free(self._host_memory.pop(), self.device)

    def close(self) -> None:
        """Give everything back."""
        self.free()
        for event in (self._begin, self._end):
            self.native.event_destroy(event, self.device)
        self.native.stream_destroy(self.stream, self.device)


@contextmanager
def rig(kind: str, device: int, rounds: int) -> Iterator[Rig]:
    """The rig on one device of one kind of driver, "cuda" or "rocm"."""
    from lmcache.errors import DeviceError
    from lmcache_cuda import _native

    _native.use(kind)
    _native.set_error_type(DeviceError)
    one = Rig(_native, device, rounds)
    try:
        yield one
    finally:
        one.close()
