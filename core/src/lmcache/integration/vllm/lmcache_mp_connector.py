"""The vLLM v1 KV connector (vLLM 0.32, ``KVConnectorBase_V1``): between vLLM's calls and the two sides.

Loads and stores are plain copies that end within the call that starts them, so blocks are never held back and
nothing is polled. With one KV group a load happens in the step that needs it, and a failed one is reported by block
ids; with several groups vLLM can only be told of failed requests, so the load takes a step of its own.

Nothing here raises into a running engine because of the cache server. A setting that cannot be met is an error at
start, where somebody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import lmcache
from lmcache.errors import ConfigError
from lmcache.integration.vllm.identity import (
    attention_windows,
    check_supported,
    describe_groups,
    lora_identity,
    media_by_content,
    model_revision,
)
from lmcache.integration.vllm.scheduler_side import SchedulerSide, StepPlan
from lmcache.integration.vllm.settings import ConnectorSettings, read_settings
from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy
from lmcache.integration.vllm.worker_side import StepResult, WorkerSide
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    create_transfer_context,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class LMCacheMPConnectorMetadata(KVConnectorMetadata):
    """One step's plan, from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class LoadsDone(KVConnectorWorkerMetadata):
    """From a worker to the scheduler: the loads of ``step`` were tried."""

    def __init__(self, step: int) -> None:
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return LoadsDone(min(self.step, cast(LoadsDone, other).step))


class LMCacheMPConnector(KVConnectorBase_V1, SupportsHMA):
    """Caches KV blocks in an ``lmcache server``.

    Settings: ``kv_connector_extra_config`` (see :mod:`lmcache.integration.vllm.settings`).

    Raises:
        ConfigError: for a setting that is unknown or cannot be met. ValueError: for a transfer mode that is
            asked for and not available.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if transfer is None or kv_cache_config is None:
            raise ConfigError(
                "LMCacheMPConnector: expected a kv_transfer_config and a kv_cache_config; this vLLM gives none"
            )
        check_supported(vllm_config, kv_cache_config)
        self._config = vllm_config
        self._kv = kv_cache_config
        self._settings = self._read_settings(transfer)
        self._parallel = ParallelStrategy(
            parallel.rank, parallel.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        self._engine = transfer.engine_id or ""
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._result = StepResult()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler_side(transfer)

    def _read_settings(self, transfer: Any) -> ConnectorSettings:
        return read_settings(transfer.kv_connector_extra_config)

    def _make_scheduler_side(self, transfer: Any) -> SchedulerSide:
        settings = self._settings
        client = CacheClient(
            settings.address, "scheduler", self._engine, 0, self._parallel.ranks, settings.client
        )
        client.start(wait=settings.client.control_timeout)
        return SchedulerSide(
            client,
            [group.kv_cache_spec.block_size for group in self._kv.kv_cache_groups],
            ranks=self._parallel.ranks,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            save_decode=settings.save_decode_cache,
            prefetch_timeout=settings.prefetch_timeout,
            min_tokens=settings.min_tokens,
            lora_identity=lora_identity,
            media_by_content=media_by_content(self._config),
            windows=attention_windows(self._kv),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: vLLM need not recompute a request only to have its KV stored."""
        return False

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the engine's pages and open the worker's session in the background."""
        settings, place = self._settings, self._parallel
        revision = model_revision(self._config, settings.model_revision)
        groups = describe_groups(self._config, self._kv, kv_caches, revision, place.rank)
        context = create_transfer_context(
            settings.mode,
            settings.address,
            self._engine,
            groups,
            place.rank,
            place.ranks,
            settings.client,
            stores=place.rank % place.tp_size % max(1, self._kv.kv_tp_replicas) == 0,
        )
        logger.info(
            "torch_dev=%s, torch_device_type=%s, server=%s, %d KV group(s), block size %s, page %d bytes",
            lmcache.torch_dev, lmcache.torch_device_type, settings.address, len(groups),
            [g.namespace.block_size for g in groups], groups[0].namespace.page_bytes[0],
        )  # fmt: skip
        context.start(wait=settings.client.control_timeout)
        layers = None
        if settings.layerwise and isinstance(context, EngineDrivenTransferContext):
            layers = LayeredTransfers(context)
        self._worker = WorkerSide(context, place.rank, layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Layer by layer, its pages are filled on return; else ``start_load_kv`` has filled all."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Layer by layer, its pages begin to be stored; else all are when the step is done."""
        if self._worker is not None:
            self._worker.save_layer(self._plan, layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is not None:
            self._result = self._worker.take_result()
        if self._groups == 1:
            return KVConnectorTransferResults()  # loaded within the step: vLLM waits for nothing
        return KVConnectorTransferResults(
            finished_recving=self._result.loaded, failed_recving=self._result.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._result.bad_blocks if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return LoadsDone(self._plan.step) if self._plan.loads else None

    @property
    def _plan(self) -> StepPlan:
        return cast(LMCacheMPConnectorMetadata, self._get_connector_metadata()).plan

    # ---- scheduler

    @property
    def _sched(self) -> SchedulerSide:
        return cast(SchedulerSide, self._scheduler)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._sched.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._groups > 1

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def allocated(self, request: Request, blocks: tuple[list[int], ...] | None, external: int) -> None:
        """vLLM allocated ``blocks`` (per group) for a request that takes ``external`` tokens from here.

        None for blocks: it is not scheduled after all, so nothing of it is to be loaded.
        """
        self._sched.allocated(request, blocks or (), external if blocks is not None else 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        scheduled: Iterable[tuple[str, int]] = [
            *((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs),
            *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        ]
        for request_id, computed in scheduled:
            blocks = state.get_block_ids(request_id) if state is not None else None
            if blocks is not None:
                new_tokens = scheduler_output.num_scheduled_tokens.get(request_id, 0)
                self._sched.scheduled(request_id, computed, new_tokens, blocks)
        return LMCacheMPConnectorMetadata(self._sched.take_plan())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.failed_recving or connector_output.invalid_block_ids:
            self._sched.failed(connector_output.failed_recving)
        if isinstance(connector_output.kv_connector_worker_meta, LoadsDone):
            self._sched.confirmed(connector_output.kv_connector_worker_meta.step)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._sched.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._sched.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Find nothing of what was stored until now; asked for when weights change in a running engine."""
        self._sched.forget()
        return True

    def shutdown(self) -> None:
        """Close this side's session."""
        if self._scheduler is not None:
            self._scheduler.client.close()
        if self._worker is not None:
            self._worker.close()
