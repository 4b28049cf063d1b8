"""Names that vLLM's connector module imports from here; they stand for this package's own parts."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from lmcache.integration.vllm.scheduler_side import SchedulerSide as LMCacheMPSchedulerAdapter
from lmcache.integration.vllm.worker_side import WorkerSide as LMCacheMPWorkerAdapter
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem

LoadStoreOp: TypeAlias = "LoadItem | StoreItem"


class ParallelStrategy(NamedTuple):
    """One worker's place among tensor- (``tp``) and pipeline-parallel (``pp``) ranks."""

    rank: int
    ranks: int
    tp_size: int
    pp_size: int


__all__ = [
    "LMCacheMPSchedulerAdapter",
    "LMCacheMPWorkerAdapter",
    "LoadStoreOp",
    "ParallelStrategy",
]
