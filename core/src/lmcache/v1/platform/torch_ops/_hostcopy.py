"""Blocks between pages and chunks in host memory.

What moves is settled per span in ``_host_jobs.py``, once for all planes; here the planes are shared out, those of a
layer together: where K and V lie side by side in a page, the second finds in the cache what came with the first.

Threads are plain ones and torch is kept in each of them: its OpenMP threads wait for each other at the end of
every copy, and with another process on the machine that fell to 0.05.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

from lmcache.v1.platform.torch_ops._host_jobs import Job, jobs_of
from lmcache.v1.platform.torch_ops._paged import PlaneGroup
from lmcache.v1.platform.torch_ops._spans import Span
from lmcache.v1.utils.shared_work import run_together

if TYPE_CHECKING:
    import torch

__all__ = ["copy_blocks", "share"]

_UNIT = 4 << 20
"""Bytes that a thread takes at once."""
_THREADED = 8 << 20
"""Bytes from which a second thread pays."""
_MAX_THREADS = 4


_Unit: TypeAlias = Sequence[tuple[Job, int]]
"""What a thread does at once: jobs of one layer, each in one plane."""


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

    layers: dict[int, list[tuple[Job, int]]] = {}
    with torch.inference_mode():
        for group in groups:
            if group.shape.page:
                jobs = list(jobs_of(group, work, to_chunk))
                for at in range(len(group.addresses)):
                    layers.setdefault(group.layer + at, []).extend((job, at) for job in jobs)
    total = sum(job.nbytes for layer in layers.values() for job, _ in layer)
    share([partial(_copy, unit) for layer in layers.values() for unit in _units(layer)], total)


def _copy(unit: _Unit) -> None:
    for job, at in unit:
        job.copy(at)


def _units(layer: _Unit) -> Iterator[_Unit]:
    """Jobs of about ``_UNIT`` bytes together."""
    unit: list[tuple[Job, int]] = []
    held = 0
    for job, at in layer:
        if unit and held + job.nbytes > _UNIT:
            yield unit
            unit, held = [], 0
        unit.append((job, at))
        held += job.nbytes
    yield unit


# ------------------------------------------------------------------------------------------------- threads


def _threads() -> int:
    """No more than torch may use for its own work, and than there are cores for this thread."""
    import torch

    allowed: int = torch.get_num_threads()
    return min(_MAX_THREADS, allowed, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="lmcache-blocks")


def share(tasks: Sequence[Callable[[], None]], nbytes: int) -> None:
    """Run all tasks, each by the thread that comes first, in torch's inference mode.

    Args:
        tasks: On the host, independent of each other.
        nbytes: What they move in all.

    Raises:
        Exception: What a task has raised; none runs any more, but not all need have run.
    """
    threads = min(_threads(), len(tasks)) if nbytes >= _THREADED else 1
    run_together(_pool(), threads - 1, partial(_run, iter(tasks)))


def _run(queue: Iterator[Callable[[], None]]) -> None:
    import torch

    with torch.inference_mode():  # per thread; tensors made in it can only be written in it
        for task in queue:
            task()
