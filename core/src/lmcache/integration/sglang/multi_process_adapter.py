"""The multi-process connector of SGLang 0.5.13 to 0.5.20: the same connector behind calls that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lmcache.errors import ConfigError, LMCacheError
from lmcache.integration.sglang.identity import check_no_adapters
from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLookupOperation
from lmcache.integration.sglang.sglang_adapter import LoadMetadata, StoreMetadata, key_of
from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector
from lmcache.integration.sglang.utils import settings_of
from lmcache.logging import init_logger

__all__ = ["LMCacheMPConnector"]

logger = init_logger(__name__)


class LMCacheMPConnector:
    """One rank's connector. Nothing the server or the network does is raised into the scheduler.

    Args:
        sgl_config: SGLang's ``ModelConfig``.
        tp_size, rank, tp_group: tensor-parallel ranks; a group for tensors on the pools' device.
        page_size: token slots per page.
        host, port: of the server.
        k_pool, v_pool: per layer ``[slots, heads, head size]``.

    Raises:
        ConfigError, LayoutError: one line: a setting that is wrong, an SGLang with LoRA adapters, or KV that cannot
            be cached.
    """

    def __init__(
        self,
        sgl_config: Any,
        tp_size: int,
        rank: int,
        page_size: int,
        host: str,
        port: int,
        k_pool: list[torch.Tensor],
        v_pool: list[torch.Tensor],
        tp_group: Any = None,
    ) -> None:
        if not k_pool:
            raise ConfigError("k_pool: expected a tensor per layer, got none")
        check_no_adapters()
        pool = SimpleNamespace(k_buffer=list(k_pool), v_buffer=list(v_pool))
        self._unified = UnifiedLMCacheMPConnector(
            config_file=settings_of(host, port),
            model_config=sgl_config,
            tp_size=tp_size,
            tp_rank=rank,
            tp_group=tp_group,
            page_size=page_size,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            req_to_token_pool=None,
            tree_components=(SimpleNamespace(name="FULL"),),
            mamba_component=None,
            sliding_window_size=None,
            group_device=k_pool[0].device,
        )
        self._found: dict[str, LMCacheLookupOperation] = {}

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers this rank."""
        return self._unified.path != "down"

    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self._unified.chunk_size

    def lookup_kv(self, token_ids: Any, request_id: str) -> int:
        """Tokens that the server holds for all ranks, pinned for the request. Waits for the answer; collective."""
        if not request_id:
            return 0
        self.release_pending(request_id)
        operation = self._unified.submit_lookup(request_id, token_ids, local_hit_tokens=0, cache_salt="")
        while (total := self._unified.poll_lookup(operation)) is None:
            pass  # a poll takes a millisecond itself, and the lookup has a deadline
        if total:
            self._found[request_id] = operation
        return total

    def release_pending(self, request_id: str) -> None:
        """What a lookup found is not wanted. Harmless if there is nothing."""
        operation = self._found.pop(request_id, None)
        if operation is not None:
            self._unified.free_lookup_locks(request_id, 0, operation.total_hit_tokens or 0)

    def retrieve_kv(self, load_metadata: LoadMetadata) -> int:
        """Fill slots with what the request's lookup found; how many tokens from ``offset`` on are there now.

        0: none, and the slots may be given back. Collective.

        Args:
            load_metadata: ``slot_mapping`` for all tokens; the first ``offset + prefix_pad`` are left alone.
        """
        meta = load_metadata
        operation = self._found.pop(meta.request_id, None)
        if operation is None:
            return 0
        total, local = operation.total_hit_tokens or 0, meta.offset + meta.prefix_pad
        load = self._unified.submit_load(
            operation, meta.slot_mapping[local:total], local_hit_tokens=local, producer_stream=None
        )
        usable = self._unified.prepare_load_on_stream(load, None) and self._unified.complete_load(load)
        return total - meta.offset if usable else 0

    def store_kv(self, store_metadata: StoreMetadata) -> None:
        """Store the KV of all whole chunks, as far as the server does not hold them. Waits; collective."""
        meta, unified = store_metadata, self._unified
        tokens = list(meta.token_ids)
        end = len(tokens) // unified.chunk_size * unified.chunk_size
        start = unified.get_store_start(meta.request_id, end)
        salt, extra = key_of(meta)
        try:
            operation = unified.submit_store(
                meta.request_id,
                tokens[:end],
                meta.kv_indices[start:end],
                device_indices_start=start,
                cache_salt=unified.build_cache_salt(salt, extra),
            )
            if operation is not None:
                operation.future.result(unified.operation_timeout)
                unified.complete_store(operation)
        except LMCacheError as exc:
            logger.warning("request %s: not stored: %s", meta.request_id, exc)

    def end_session(self, request_id: str) -> None:
        """The request ended, in whatever way: give back all that is held for it."""
        self._found.pop(request_id, None)
        self._unified.finish_request(request_id)

    def reset(self) -> None:
        """End all requests."""
        self._found.clear()
        self._unified.end_all_sessions()

    def close(self) -> None:
        """End all requests and the sessions. Closing twice is allowed."""
        self._unified.close()
