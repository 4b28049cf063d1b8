"""Copies between addresses of host memory, without the GIL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

_THREADED_BYTES = 32 << 20
_MAX_THREADS = 4

_memcpy = ctypes.CDLL(None).memcpy  # a CDLL call releases the GIL
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


class Run(NamedTuple):
    """``size`` bytes from address ``src`` to address ``dst``; the two must not overlap."""

    dst: int
    src: int
    size: int


def _copy(runs: Sequence[Run]) -> None:
    copy = _memcpy
    for dst, src, size in runs:
        copy(dst, src, size)


@cache
def _helpers() -> tuple[int, ThreadPoolExecutor]:
    # One core in two: the engine computes on the others. A single core saturates memory on small machines.
    threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
    return threads, ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="lmcache-copy")


def copy_runs(runs: Sequence[Run]) -> None:
    """Do the copies; large sets are shared among a few plain threads. Returns when all bytes are in place."""
    threads, pool = _helpers()
    if threads == 1 or len(runs) < threads or sum(run.size for run in runs) < _THREADED_BYTES:
        _copy(runs)
        return
    step = -(-len(runs) // threads)
    rest = [pool.submit(_copy, runs[at : at + step]) for at in range(step, len(runs), step)]
    _copy(runs[:step])
    for future in rest:
        future.result()
