"""Ranks that hold the same KV (MLA): one stores, all retrieve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.cache_engine.chunks import Held
from lmcache.v1.cache_engine.identity import ChunkObjects
from lmcache.v1.cache_engine.token_database import Chunk
from lmcache.v1.config import LMCacheEngineConfig, tier_specs
from lmcache.v1.memory.allocators import AdHocMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["Ranks"]

_SHARED = ("shared_fs", "redis", "s3", "mooncake")


class Ranks:
    """Who stores, under whose rank, and how the others get it.

    With ``extra_config: {"save_only_first_rank": true}``, which only MLA models allow, rank 0 stores for all. The
    others take it from a tier that all share; or, where the engine gives its collectives, from rank 0, which then reads
    for all: every rank must retrieve the same requests in the same order.

    Raises:
        ConfigError: It is asked for and neither way is there, or ranks hold different KV.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        connector: Any,
        broadcast_fn: Callable[[Any, int], Any] | None,
        broadcast_object_fn: Callable[[Any, int], Any] | None,
    ) -> None:
        wanted = bool(config.get_extra_config_value("save_only_first_rank", False))
        one = wanted and metadata.world_size > 1
        if wanted and not metadata.use_mla:
            raise ConfigError(
                bad_value(
                    "extra_config save_only_first_rank", True, "an MLA model", "its ranks hold different KV"
                )
            )
        together = broadcast_fn is not None and broadcast_object_fn is not None
        if one and not together and not any(t.spec["type"] in _SHARED for t in tier_specs(config)):
            raise ConfigError(
                bad_value(
                    "extra_config save_only_first_rank",
                    True,
                    "a storage engine that ranks share, or broadcast functions",
                    "set remote_url, or leave it out",
                )
            )
        self.owner = metadata.first_rank if one else metadata.worker_id
        self.stores = not one or metadata.is_first_rank()
        self._reads = metadata.is_first_rank()
        self._device = getattr(connector, "device", None)
        self._send = broadcast_fn if one and together else None
        self._tell = broadcast_object_fn if one and together else None

    def shared(
        self, read: Callable[[], list[Held]], wanted: Sequence[Chunk], shapes: ChunkObjects
    ) -> list[Held]:
        """What ``read`` gives; on other ranks, where the first one reads for all, what it gave there."""
        if self._send is None or self._tell is None:
            return read()
        if not self._reads:
            return self._received(wanted[: int(self._tell(None, 0))], self._send, shapes)
        held: list[Held] = []
        try:
            held = read()
        finally:
            self._tell(len(held), 0)  # the others wait for it, whatever happened
        for _, objs in held:
            for obj in objs:
                self._send(self._moved(obj.raw_tensor), 0)
        return held

    def _received(
        self, chunks: Sequence[Chunk], send: Callable[[Any, int], Any], shapes: ChunkObjects
    ) -> list[Held]:
        allocator = AdHocMemoryAllocator()
        held: list[Held] = []
        for chunk in chunks:
            form = shapes.layout(chunk.tokens)
            objs = allocator.batched_allocate(form.shapes, form.dtypes, shapes.per_chunk, form.fmt)
            if objs is None:
                raise MemoryError(
                    f"{form.nbytes * shapes.per_chunk} bytes for a chunk from rank 0: not to be had"
                )
            held.append(Held(chunk, objs))
            for obj in objs:
                tensor = self._moved(obj.raw_tensor)
                send(tensor, 0)
                obj.raw_tensor.copy_(tensor)
        return held

    def _moved(self, tensor: Any) -> Any:
        """On the device, where collectives of a device's own want it."""
        return tensor if self._device is None else tensor.to(self._device)
