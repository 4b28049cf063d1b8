"""Worker side: does what the scheduler's plan says, for one rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lmcache.integration.vllm.scheduler_side import StepPlan
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, PagesUnsafe, TransferContext

logger = init_logger(__name__)


@dataclass(slots=True)
class StepResult:
    """What became of a step's loads."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class WorkerSide:
    """Runs step plans through a transfer context.

    Args:
        context: this rank's transfer context.
        rank: which of a load's slots are ours.
    """

    def __init__(self, context: TransferContext, rank: int) -> None:
        self.context = context
        self._rank = rank
        self._failed_step = -1
        self._result = StepResult()

    def load(self, plan: StepPlan) -> None:
        """Do the plan's loads; they are complete on return."""
        if not plan.loads:
            return
        items = [replace(item, slots=slots[self._rank]) for item, slots in plan.loads]
        try:
            failed = self.context.load(items)
        except PagesUnsafe:
            raise  # somebody else may be writing into these pages: there is no going on
        except Exception:  # a fault of ours: these requests are recomputed, the engine lives
            logger.exception("loads of step %d", plan.step)
            failed = items
        self._result.loaded.update(item.request for item in items)
        if failed:
            self._failed_step = plan.step
            self._result.failed.update(item.request for item in failed)
            self._result.bad_blocks.update(block for item in failed for block in self._targets(item))

    def store(self, plan: StepPlan) -> None:
        """Do the plan's stores; they are complete on return."""
        if not plan.stores or self._failed_step >= plan.clean_from:
            return
        try:
            self.context.store(plan.stores)
        except Exception:  # a fault of ours costs what was to be stored, not the engine
            logger.exception("stores of step %d", plan.step)

    def take_result(self) -> StepResult:
        """What became of the loads since the last call."""
        result, self._result = self._result, StepResult()
        return result

    def _targets(self, item: LoadItem) -> list[int]:
        """The blocks that a load fills. Never the null block, which other requests have, too."""
        return [
            block
            for group, blocks, skip in zip(self.context.groups, item.blocks, item.skip_blocks, strict=True)
            for block in blocks[skip:]
            if block != group.null_block
        ]
