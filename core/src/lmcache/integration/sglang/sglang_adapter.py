"""LMCache inside SGLang's process, for releases whose radix cache imports this module.

Slots may be given for all tokens of a sequence (negative for those that SGLang has) or for those from ``offset`` on;
the length tells. Chunks are loaded whole, so ``offset`` counts down to a chunk's edge; slots before it stay untouched
if they are negative.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache.errors import ConfigError, LMCacheError
from lmcache.integration.sglang.identity import check_no_adapters, is_mla, model_extra, weights_revision
from lmcache.logging import init_logger
from lmcache.utils import EngineType
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import CreateGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

__all__ = [
    "ENGINE_NAME",
    "LMCacheConnector",
    "LMCacheLayerwiseConnector",
    "LoadMetadata",
    "StoreMetadata",
    "init_lmcache_engine",
    "key_of",
]

logger = init_logger(__name__)

ENGINE_NAME = "sglang-instance"


@dataclass
class StoreMetadata:
    """Tokens to store, and the slot of each. ``last_node`` is SGLang's, of whose key the extra key is read where
    ``extra_key`` does not say it; ``cache_salt`` likewise. ``offset`` is SGLang's and without effect."""

    last_node: Any
    token_ids: Sequence[int]
    kv_indices: torch.Tensor
    offset: int
    request_id: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None


@dataclass
class LoadMetadata:
    """Tokens to load beyond the first ``offset``, and their slots (see the module). ``prefix_pad`` is SGLang's."""

    token_ids: Sequence[int]
    slot_mapping: torch.Tensor
    offset: int
    prefix_pad: int = 0
    request_id: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None


def init_lmcache_engine(
    model_config: Any,
    tp_size: int,
    local_rank: int,
    global_rank: int,
    kv_dtype: torch.dtype,
    config_file: str = "",
    kv_head_dim: int | None = None,
) -> LMCacheEngine:
    """The engine of this process; made if there is none.

    Args:
        model_config: SGLang's ``ModelConfig``.
        local_rank: index of this rank's device.
        global_rank: its rank among the tensor-parallel ones.
        config_file: YAML; empty: what ``LMCACHE_CONFIG_FILE`` names, and the environment.
        kv_head_dim: width of one row of an MLA cache.

    Raises:
        ConfigError: a setting that is wrong, an MLA model without ``kv_head_dim``, or an engine that is there with
            other settings.
        RuntimeError: no connector for the device (docs/connectors.md).
    """
    config = LMCacheEngineConfig.load(config_file or None)
    mla, chunk = is_mla(model_config), config.chunk_size
    if mla and (kv_head_dim or 0) < 1:
        raise ConfigError(f"kv_head_dim={kv_head_dim!r}: expected the width of a row of the MLA cache")
    heads = 1 if mla else model_config.get_num_kv_heads(tp_size)
    width = int(kv_head_dim or 0) if mla else model_config.head_dim
    metadata = LMCacheMetadata(
        model_name=str(model_config.model_path),
        world_size=tp_size,
        local_world_size=tp_size,
        worker_id=global_rank,
        local_worker_id=local_rank,
        kv_dtype=kv_dtype,
        kv_shape=(model_config.num_hidden_layers, 1 if mla else 2, chunk, heads, width),
        use_mla=mla,
        chunk_size=chunk,
        model_revision=weights_revision(model_config),
        engine="sglang",
        kv_extra=model_extra(model_config),
    )
    connector = CreateGPUConnector(config, metadata, EngineType.SGLANG)
    return LMCacheEngineBuilder.get_or_create(ENGINE_NAME, config, metadata, connector)


class LMCacheConnector:
    """Whole sequences at once.

    Args:
        sgl_config: SGLang's ``ModelConfig``.
        tp_size, rank: tensor-parallel ranks, and this one.
        k_pool, v_pool: per layer ``[slots, heads, head size]``; for MLA ``k_pool`` is ``[slots, 1, width]`` and
            ``v_pool`` is not looked at.
        config_file: see :func:`init_lmcache_engine`.
        tp_group: ranks that must load as many tokens; without it each says what it loaded itself.

    Raises: see :func:`init_lmcache_engine`; ConfigError also for ``use_layerwise`` that is not this class's, and for an
        SGLang with LoRA adapters.
    """

    layerwise = False

    def __init__(
        self,
        sgl_config: Any,
        tp_size: int,
        rank: int,
        k_pool: list[torch.Tensor],
        v_pool: list[torch.Tensor],
        config_file: str = "",
        tp_group: Any = None,
    ) -> None:
        if not k_pool:
            raise ConfigError("k_pool: expected a tensor per layer, got none")
        check_no_adapters()
        mla, device = is_mla(sgl_config), k_pool[0].device
        self.sgl_config = sgl_config
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.device = device
        self.num_layer = sgl_config.num_hidden_layers
        self.kvcaches: list[Any] = list(k_pool) if mla else [list(k_pool), list(v_pool)]
        self.lmcache_engine = init_lmcache_engine(
            sgl_config,
            tp_size,
            rank if device.index is None else device.index,
            rank,
            k_pool[0].dtype,
            config_file,
            kv_head_dim=k_pool[0].shape[-1] if mla else None,
        )
        if self.lmcache_engine.config.use_layerwise != self.layerwise:
            self.close()
            raise ConfigError(
                f"use_layerwise={not self.layerwise}: expected {self.layerwise} for {type(self).__name__}"
            )
        self.lmcache_engine.post_init(kvcaches=self.kvcaches)

    def load_kv(self, load_metadata: LoadMetadata) -> int:
        """Load what is kept beyond the first ``offset`` tokens; how many tokens that is.

        Raises:
            ValueError: slots for another number of tokens.
        """
        tokens, kwargs, mask = self._wanted(load_metadata)
        mask_found = self.lmcache_engine.retrieve(tokens, mask=mask, **kwargs)
        found = mask_found.nonzero()
        end = int(found[-1]) + 1 if len(found) else 0
        return max(0, self._least(end) - load_metadata.offset)

    def store_kv(self, store_metadata: StoreMetadata) -> None:
        """Keep the KV of all whole chunks. What goes wrong is logged, and costs what was to be stored.

        Raises:
            ValueError: slots for another number of tokens.
        """
        meta = store_metadata
        tokens = list(meta.token_ids)
        slots = meta.kv_indices.to(device=self.device, dtype=torch.int64)
        if len(slots) != len(tokens):
            raise ValueError(f"kv_indices of {len(slots)} slots: expected one per token, {len(tokens)}")
        configs = _configs(*key_of(meta))
        try:
            self._store(tokens, kvcaches=self.kvcaches, slot_mapping=slots, request_configs=configs)
        except (LMCacheError, RuntimeError) as exc:
            logger.warning("request %s: not stored: %s", meta.request_id or "-", exc)

    def _store(self, tokens: list[int], **kwargs: Any) -> None:
        self.lmcache_engine.store(tokens, **kwargs)

    def get_kv_events(self) -> Iterable[Any]:
        """What was stored since the last call (``enable_kv_events``)."""
        return self.lmcache_engine.get_kv_events()

    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.lmcache_engine.config.chunk_size

    def reset(self) -> None:
        """Drop everything that is kept."""
        self.lmcache_engine.clear()

    def close(self) -> None:
        """Write what waits, and let go of everything. Closing twice is allowed."""
        LMCacheEngineBuilder.destroy(ENGINE_NAME)

    def global_min_tokens(self, local_tokens: int, tp_group: Any, device: torch.device | None = None) -> int:
        """The least of the ranks' numbers. Collective."""
        if self.tp_size == 1 or tp_group is None:
            return local_tokens
        tensor = torch.tensor([local_tokens], dtype=torch.int64, device=device or self.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=tp_group)
        return int(tensor.item())

    def _least(self, tokens: int) -> int:
        return self.global_min_tokens(tokens, self.tp_group)

    def _wanted(self, meta: LoadMetadata) -> tuple[list[int], dict[str, Any], torch.Tensor]:
        """Tokens, what the engine's load takes, and the mask of what is to be loaded."""
        tokens, given = list(meta.token_ids), meta.slot_mapping.to(device=self.device, dtype=torch.int64)
        if len(given) == len(tokens):
            slots = given
        elif len(given) == len(tokens) - meta.offset:
            slots = torch.cat([torch.full((meta.offset,), -1, dtype=torch.int64, device=self.device), given])
        else:
            raise ValueError(
                f"slot_mapping of {len(given)} slots: expected one per token, {len(tokens)}, or per token from "
                f"offset {meta.offset} on"
            )
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: meta.offset // self.chunk_size() * self.chunk_size()] = False
        configs = _configs(meta.cache_salt, meta.extra_key)
        return tokens, {"kvcaches": self.kvcaches, "slot_mapping": slots, "request_configs": configs}, mask


@dataclass
class _Load:
    """A load under way: its steps, how many layers were handed to the connector, and its pins."""

    steps: Generator[Any, None, None]
    handed: int
    lookup_id: str


class LMCacheLayerwiseConnector(LMCacheConnector):
    """Layer by layer, beside SGLang's forward pass: ``start_load_kv`` before it, ``load_kv_layerwise`` in it."""

    layerwise = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loads: list[_Load] = []
        super().__init__(*args, **kwargs)

    def start_load_kv(self, load_metadata: LoadMetadata) -> int:
        """Begin to load what is kept beyond the first ``offset`` tokens; how many tokens every rank will get.

        The first layer is under way on return. 0: there is nothing to wait for. Collective with ``tp_group``.

        Raises:
            ValueError: slots for another number of tokens.
        """
        tokens, kwargs, mask = self._wanted(load_metadata)
        lookup_id, offset, load = uuid.uuid4().hex, load_metadata.offset, None
        try:
            end = self._least(
                self.lmcache_engine.lookup(
                    tokens, lookup_id=lookup_id, pin=True, request_configs=kwargs["request_configs"]
                )
            )
            while end > offset:
                load, got = self._begin(tokens, end, mask, lookup_id, kwargs)
                agreed = self._least(got)
                if agreed == end:
                    next(load.steps)
                    self._loads.append(load)
                    load.handed, load, lookup_id = 1, None, ""
                    return end - offset
                # A rank found less than its lookup said; others would fill slots that SGLang takes back.
                load.steps.close()
                load, end = None, agreed
            return 0
        finally:
            if load is not None:
                load.steps.close()
            if lookup_id:
                self.lmcache_engine.lookup_unpin(lookup_id)

    def _begin(
        self, tokens: list[int], end: int, mask: torch.Tensor, lookup_id: str, kwargs: dict[str, Any]
    ) -> tuple[_Load, int]:
        """The load of the first ``end`` tokens, and how many of them it will bring or SGLang has."""
        steps = self.lmcache_engine.retrieve_layer(
            tokens[:end],
            mask=mask[:end],
            req_id=lookup_id,
            sync=True,
            **{**kwargs, "slot_mapping": kwargs["slot_mapping"][:end]},
        )
        skipped = int((~mask[:end]).sum())
        count = next(steps)
        return _Load(steps, 0, lookup_id), (skipped + int(count) if count else 0)

    def load_kv_layerwise(self, layer_id: int) -> None:
        """Before layer ``layer_id`` is computed: it is in SGLang's pages on return, and the next one under way.

        Raises: what the connector does; then no load is left.
        """
        if not self._loads:
            return
        try:
            for load in list(self._loads):
                if load.handed != layer_id + 1:
                    continue
                next(load.steps)  # hands the next layer over, or ends the last
                load.handed += 1
                if load.handed > self.num_layer:
                    next(load.steps, None)
                    self._end(load)
            self._wait()
        except BaseException:
            self._end_all()
            raise

    def _wait(self) -> None:
        """SGLang computes on another stream than the one it calls us on, so the host waits."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).synchronize()

    def _end(self, load: _Load) -> None:
        self._loads.remove(load)
        try:
            load.steps.close()
        finally:
            self.lmcache_engine.lookup_unpin(load.lookup_id)

    def _end_all(self) -> None:
        for load in list(self._loads):
            self._end(load)

    def _store(self, tokens: list[int], **kwargs: Any) -> None:
        steps = self.lmcache_engine.store_layer(tokens, sync=False, **kwargs)
        try:
            for _ in steps:
                pass
        finally:
            steps.close()

    def reset(self) -> None:
        """End loads under way, and drop everything that is kept."""
        self._end_all()
        super().reset()

    def close(self) -> None:
        if hasattr(self, "lmcache_engine"):
            self._end_all()
        super().close()


def key_of(meta: StoreMetadata) -> tuple[str | None, str | None]:
    """Salt and extra key of a store: what SGLang says, else what the key of its tree's node says."""
    key = getattr(meta.last_node, "key", None)
    return (
        meta.cache_salt or getattr(key, "cache_salt", None),
        meta.extra_key or getattr(key, "extra_key", None),
    )


def _configs(cache_salt: str | None, extra_key: str | None) -> dict[str, Any]:
    """Salt and extra key (which names the LoRA adapter) as the engine's request settings."""
    given = {"lmcache.cache_salt": cache_salt, "lmcache.lora": extra_key}
    return {key: value for key, value in given.items() if value}
