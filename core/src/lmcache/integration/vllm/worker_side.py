"""Worker side: does what the scheduler's plan says, for one rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lmcache.integration.vllm.scheduler_side import StepPlan
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers
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
        layers: moves each layer on its own, beside the engine; None: a step's pages are moved in one go.
    """

    def __init__(self, context: TransferContext, rank: int, layers: LayeredTransfers | None = None) -> None:
        self.context = context
        self._rank = rank
        self._layers = layers
        self._loading: list[LoadItem] = []
        """What the layers are being loaded for."""
        self._failed_step = -1
        self._result = StepResult()

    def load(self, plan: StepPlan) -> None:
        """Do the plan's loads; they are complete on return, or, layer by layer, once the engine waits for them."""
        if not plan.loads:
            return
        items = [replace(item, slots=slots[self._rank]) for item, slots in plan.loads]
        failed: list[LoadItem] = []
        try:
            if self._layers is None:
                failed = self.context.load(items)
            else:
                self._loading = items
                self._layers.begin_loads(items)
                return
        except PagesUnsafe:
            raise  # somebody else may be writing into these pages: there is no going on
        except Exception:  # a fault of ours: these requests are recomputed, the engine lives
            logger.exception("loads of step %d", plan.step)
            failed, self._loading = items, []
        self._loaded(plan, items, failed)

    def _loaded(self, plan: StepPlan, items: list[LoadItem], failed: list[LoadItem]) -> None:
        self._result.loaded.update(item.request for item in items)
        if failed:
            self._failed_step = plan.step
            self._result.failed.update(item.request for item in failed)
            self._result.bad_blocks.update(block for item in failed for block in self._targets(item))

    def wait_for_layer(self, name: str) -> None:
        """The engine is about to read a layer."""
        if self._layers is not None:
            self._layers.wait(name)

    def save_layer(self, plan: StepPlan, name: str) -> None:
        """The engine has computed a layer."""
        if self._layers is None or self._failed_step >= plan.clean_from:
            return
        try:
            self._layers.save(name, plan.stores)
        except Exception:  # a fault of ours costs what was to be stored, not the engine
            logger.exception("layer %s of step %d", name, plan.step)

    def _end_layers(self, plan: StepPlan, layers: LayeredTransfers) -> None:
        items, self._loading = self._loading, []
        try:
            failed = layers.end_loads()
        except Exception:
            logger.exception("loads of step %d", plan.step)
            failed = items
        if items:
            self._loaded(plan, items, failed)
        layers.end_stores(plan.stores, keep=self._failed_step < plan.clean_from)

    def store(self, plan: StepPlan) -> None:
        """Do the plan's stores; they and its loads are complete on return."""
        try:
            if self._layers is not None:
                self._end_layers(plan, self._layers)
            elif plan.stores and self._failed_step < plan.clean_from:
                self.context.store(plan.stores)
        except Exception:  # a fault of ours costs what was to be stored, not the engine
            logger.exception("stores of step %d", plan.step)

    def close(self) -> None:
        """Close the session and end what copies. The engine's tensors may go away afterwards."""
        if self._layers is not None:
            self._layers.close()
        self.context.close()

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
