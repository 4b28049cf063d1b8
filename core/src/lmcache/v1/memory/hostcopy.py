"""Copies between addresses of host memory, without the GIL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from lmcache.v1.utils.memcpy import copy_each
from lmcache.v1.utils.shared_work import run_together

_THREADED_BYTES = 32 << 20
_MAX_THREADS = 4


@cache
def _helpers() -> tuple[int, ThreadPoolExecutor]:
    # One core in two: the engine computes on the others. A single core saturates memory on small machines.
    threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
    return threads, ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="lmcache-copy")


def copy_runs(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, for all i; the bytes are in place on return.

    The ranges must not overlap. Large sets are shared among a few plain threads.
    """
    threads, pool = _helpers()
    if threads == 1 or len(dst) < threads or sum(sizes) < _THREADED_BYTES:
        copy_each(dst, src, sizes)
        return
    step = -(-len(dst) // threads)
    parts = [slice(at, at + step) for at in range(0, len(dst), step)]
    run_together(pool, threads - 1, partial(_copy, dst, src, sizes, iter(parts)))


def _copy(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int], parts: Iterator[slice]) -> None:
    for part in parts:
        copy_each(dst[part], src[part], sizes[part])
