"""Blocks between pages and chunks in host memory.

What moves is settled per span in ``_host_jobs.py``, once for all planes; here the planes are shared out.

Threads are plain ones and torch is kept in each of them: its OpenMP threads wait for each other at the end of
every copy, and with another process on the machine that fell to 0.05.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from lmcache.v1.platform.torch_ops._host_jobs import Job, jobs_of
from lmcache.v1.platform.torch_ops._paged import PlaneGroup
from lmcache.v1.platform.torch_ops._spans import Span

if TYPE_CHECKING:
    import torch

__all__ = ["copy_blocks"]

_UNIT = 4 << 20
"""Bytes that a thread takes at once."""
_THREADED = 8 << 20
"""Bytes from which a second thread pays."""
_MAX_THREADS = 4


class _Unit(NamedTuple):
    """What a thread does at once: some spans in one plane."""

    jobs: Sequence[Job]
    at: int


def copy_blocks(
    groups: Sequence[PlaneGroup],
    work: Sequence[tuple[Span, torch.Tensor]],
    to_chunk: bool,
) -> None:
    """Copy the blocks of each span between all planes and the span's chunk; done on return.

    Args:
        groups: Planes on the host.
        work: Spans, and their chunks as integers, ``[KV, NL, slots, hidden]``.
        to_chunk: From pages to chunks, or the reverse.
    """
    import torch

    units: list[_Unit] = []
    total = 0
    with torch.inference_mode():
        for group in groups:
            if group.shape.page == 0:
                continue
            jobs = list(jobs_of(group, work, to_chunk))
            total += sum(job.nbytes for job in jobs) * len(group.addresses)
            batches = list(_batches(jobs))
            units += [_Unit(batch, at) for at in range(len(group.addresses)) for batch in batches]
    _share(units, _threads() if total >= _THREADED else 1)


def _batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Jobs of about ``_UNIT`` bytes together."""
    batch: list[Job] = []
    held = 0
    for job in jobs:
        if batch and held + job.nbytes > _UNIT:
            yield batch
            batch, held = [], 0
        batch.append(job)
        held += job.nbytes
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------- threads


def _threads() -> int:
    """No more than torch may use for its own work, and than there are cores for this thread."""
    import torch

    allowed: int = torch.get_num_threads()
    return min(_MAX_THREADS, allowed, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="lmcache-blocks")


def _share(units: Sequence[_Unit], threads: int) -> None:
    """Run all units, each by the thread that comes first."""
    queue = iter(units)
    helpers: list[Future[None]] = [_pool().submit(_run, queue) for _ in range(min(threads, len(units)) - 1)]
    try:
        _run(queue)
    finally:
        # A helper that has not begun by now has nothing to do (nor will it ever begin, after a fork).
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _run(queue: Iterator[_Unit]) -> None:
    import torch

    with torch.inference_mode():  # per thread; tensors made in it can only be written in it
        for jobs, at in queue:
            for job in jobs:
                job.copy(at)
