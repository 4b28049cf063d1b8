"""A prompt's KV from a cache engine inside this process, and back: whole, or layer by layer as the model runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache

from lmcache.errors import ConfigError, LayoutError
from lmcache.integration.transformers import identity, paged, tensors
from lmcache.integration.transformers.guards import ModelWatch, check_generate
from lmcache.utils import EngineType
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["InProcessCache"]

_V3 = "use_gpu_connector_v3"
_HINTS: Any = {"engine_kv_format": paged.PAGE_FORMAT}


class InProcessCache:
    """Loads and saves the KV of prompts of one model, in this process's memory and in the tiers below it.

    With ``use_layerwise`` a layer is loaded while the model computes the one before it, and stored as soon as it has
    the prompt. Storage that fails costs hits and raises nothing. Weights that change after construction make
    everything a miss. One sequence at a time, at positions from 0 on, without padding; one request at a time. A
    context manager; after :meth:`close` all is a miss.

    Args:
        config: Settings of the engine.
        model: a causal language model that keeps full attention in every layer, on one device, ready to run
            (``eval`` mode).
        salt: what else separates equal prompts, such as a tenant.
        tags: more of the same, by name.
        revision: identity of the weights, if the caller vouches for one, here or as ``model_revision`` of
            ``extra_config``; else their content is hashed here.

    Raises:
        ConfigError, LayoutError: for settings that cannot be served, or a model that cannot be cached.
        StartupError: for storage that cannot be had.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        model: Any,
        *,
        salt: str = "",
        tags: dict[str, str] | None = None,
        revision: str = "",
    ) -> None:
        identity.check_supported(model)
        vouched = _checked(config, revision)
        self._model, self._shape = model, identity.kv_shape(model)
        device = _device(model, self._shape)
        self._watch = ModelWatch(model, not vouched, "make a new InProcessCache")
        self._config = config
        self._request = {
            "lmcache.cache_salt": salt,
            **{f"lmcache.tag.{name}": value for name, value in (tags or {}).items()},
        }
        self._turn = threading.Lock()
        about = _metadata(model, self._shape, config, vouched, device)
        self.engine = LMCacheEngine(config, about, _connector(config, about, device))

    def __enter__(self) -> InProcessCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits and let go of everything."""
        self.engine.close()

    @contextmanager
    def request(
        self, input_ids: Any, *, new_tokens: int = 256, save: bool = True
    ) -> Iterator[tuple[DynamicCache, int]]:
        """A cache for a prompt, and how many of its tokens are in it, at most all but the last; the rest is for the
        model to compute within the block. At its end the prompt is stored, as far as it was computed.

        If the block raises, nothing more is stored and the cache is empty. Else it can be used after the block.

        Args:
            input_ids: int64 tensor ``[1, T]`` or ``[T]``, or a list of integers.
            new_tokens: room for what follows the prompt; more fits, at the price of a copy.
            save: whether to store.

        Raises:
            ConfigError: for several sequences at once, or while another request is under way. Nothing because of
                storage.
        """
        ids = tensors.token_ids(input_ids)
        if not self._watch.ok():
            yield DynamicCache(config=self._model.config), 0
            return
        with self._alone():
            past, reused, run = self._begin(ids, new_tokens, save)
            try:
                yield past, reused
                if not run.finish() and save and run.intact and self._watch.ok():
                    self._store(ids, past)
            except BaseException:
                past.reset()
                raise
            finally:
                for layer in past.layers:
                    layer.request = None
                run.close()

    def save(self, input_ids: Any, past_key_values: DynamicCache) -> None:
        """Store a sequence, such as prompt and answer, after its request.

        Args:
            input_ids: the tokens; may be more or fewer than ``past_key_values`` has.
            past_key_values: the cache that :meth:`request` gave.

        Raises:
            ConfigError: for several sequences, or while a request is under way. LayoutError: for another cache.
        """
        ids = tensors.token_ids(input_ids)
        if self._watch.ok():
            with self._alone():
                self._store(ids, past_key_values)

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """``model.generate`` on what is known of the prompt, whose KV is stored.

        Args:
            input_ids: int64 tensor ``[1, T]``. ``options`` go to ``generate``, whose answer is returned.

        Raises:
            ConfigError: for several sequences or beams, other input than tokens at positions from 0 on, or a
                mask that hides tokens; or while a request is under way.
        """
        check_generate(self._model, options)
        new = options.get("max_new_tokens") or self._model.generation_config.max_new_tokens or 256
        with self.request(input_ids, new_tokens=new) as (past, _):
            return self._model.generate(input_ids, past_key_values=past, **options)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One at a time: the connector knows the pages of one request."""
        if not self._turn.acquire(blocking=False):
            raise ConfigError(
                "a request is under way: expected one at a time; leave its block first, or make one"
                " InProcessCache per thread"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _begin(self, ids: list[int], new_tokens: int, save: bool) -> tuple[DynamicCache, int, paged.Request]:
        pages = paged.new_pages(self._shape, len(ids) + new_tokens)
        moved = self._moved(pages, len(ids))
        load = store = None
        if self._config.use_layerwise:
            load = paged.Steps(self.engine.retrieve_layer(ids, **moved))
            found = int(load.to(1))
            if save:
                store = paged.Steps(self.engine.store_layer(ids, **moved))
        else:
            found = int(self.engine.retrieve(ids, **moved).sum())
        reused = max(0, min(found, len(ids) - 1))
        past = paged.paged_cache(self._model, pages, reused)
        run = paged.Request(len(pages), len(ids), load, store, self._watch.ok)
        for layer in past.layers:
            layer.request = run
        return past, reused, run

    def _store(self, ids: list[int], past: DynamicCache) -> None:
        pages, known = paged.pages_of(past)
        ids = ids[:known]
        if not ids:
            return
        moved = self._moved(pages, len(ids))
        if self._config.use_layerwise:
            paged.Steps(self.engine.store_layer(ids, **moved)).to(len(pages) + 1)
        else:
            self.engine.store(ids, **moved)

    def _moved(self, pages: list[torch.Tensor], tokens: int) -> dict[str, Any]:
        """What the engine and its connector are to know of a request: token t is in slot t."""
        return {
            "kvcaches": pages,
            "slot_mapping": torch.arange(tokens),
            "request_configs": self._request,
        }


def _checked(config: LMCacheEngineConfig, revision: str) -> str:
    """The revision that somebody vouches for; empty: nobody does.

    Raises:
        ConfigError: A connector is asked for whose groups of layers are not here; or two revisions are given.
    """
    asked = config.get_extra_config_value(_V3)
    if asked:
        raise ConfigError(f"extra_config {_V3}={asked!r}: expected it off with transformers; remove it")
    configured = str(config.get_extra_config_value("model_revision") or "")
    if revision and configured and revision != configured:
        raise ConfigError(
            f"revision={revision!r}: extra_config model_revision is {configured!r}; expected one of the two"
        )
    return revision or configured


def _device(model: Any, shape: identity.KVShape) -> torch.device:
    devices = list(dict.fromkeys(shape.devices))
    if len(devices) > 1:
        raise LayoutError(
            f"{type(model).__name__}: layers on {', '.join(map(str, devices))}: expected one device; use PrefixCache"
        )
    return devices[0]


def _metadata(
    model: Any, shape: identity.KVShape, config: LMCacheEngineConfig, revision: str, device: torch.device
) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=type(model).__name__,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=device.index or 0,
        kv_dtype=shape.dtype,
        kv_shape=(shape.layers, 2, config.chunk_size, shape.kv_heads, shape.head_size),
        chunk_size=config.chunk_size,
        model_revision=identity.revision_of(model, revision),
        engine=EngineType.TRANSFORMERS.value,
        kv_extra=identity.settings_of(model),
    )


def _connector(config: LMCacheEngineConfig, about: LMCacheMetadata, device: torch.device) -> Any:
    """That of vLLM's pages, which these are. A model on the host is reason enough to use the host's."""
    if device.type != "cpu":
        from lmcache.v1.gpu_connector import CreateGPUConnector

        return CreateGPUConnector(config, about, EngineType.VLLM, layout_hints=_HINTS)
    from lmcache.v1.gpu_connector import gpu_connectors

    kind: Any = (
        gpu_connectors.VLLMPagedMemLayerwiseGPUConnector
        if config.use_layerwise
        else gpu_connectors.VLLMPagedMemGPUConnectorV2
    )
    return kind.from_metadata(about, device=device, layout_hints=_HINTS)
