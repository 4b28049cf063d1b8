"""What vLLM's own ``LMCacheConnectorV1`` drives: it passes most calls on, with fewer arguments and results.

What it keeps to itself is put on the instance, where vLLM looks first: a failed load must be heard of, or nothing is
stored any more; a confirmed one, or several ranks store nothing; and the end, or what waits for a tier is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["LMCacheConnectorV1Impl"]


class LMCacheConnectorV1Impl:
    """The connector behind vLLM's wrapper ``parent``.

    Raises:
        ConfigError, StartupError: see :class:`LMCacheConnectorV1Dynamic`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, parent: KVConnectorBase_V1) -> None:
        self._inner = LMCacheConnectorV1Dynamic(vllm_config, role, getattr(parent, "_kv_cache_config", None))
        self._allocated: list[tuple[Request, int]] = []
        """This step's allocations; the wrapper keeps their blocks to itself."""
        self._wrapper = parent
        for name in ("build_connector_worker_meta", "reset_cache", "shutdown"):
            setattr(parent, name, getattr(self._inner, name))
        parent.update_connector_output = self._update_connector_output

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._inner.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._inner.bind_connector_metadata(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._inner.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._inner.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._inner.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = self._inner.get_transfer_results(finished_req_ids)
        return done.finished_sending or None, done.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._inner.get_block_ids_with_load_errors()

    def get_kv_events(self) -> None:
        """None: ``enable_kv_events`` is refused at start."""

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens beyond those computed; None: ask again. With one KV group, all that comes here, they are loaded
        within the step, as the wrapper says on our behalf."""
        return self._inner.get_num_new_matched_tokens(request, num_computed_tokens)[0]

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        self._allocated.append((request, num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        allocated, self._allocated = self._allocated, []
        state = scheduler_output.kv_connector_block_state
        for request, tokens in allocated:
            blocks = state.get_block_ids(request.request_id) if state is not None else None
            self._inner.allocated(request, blocks, tokens)
        return self._inner.build_connector_meta(scheduler_output)

    def _update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        type(self._wrapper).update_connector_output(self._wrapper, connector_output)
        self._inner.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._inner.request_finished(request, block_ids)
