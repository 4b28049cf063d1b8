"""What an engine says of itself to the cache that runs in its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["LMCacheMetadata"]


@dataclass
class LMCacheMetadata:
    """Model, ranks, and the shape of one chunk of KV. Mutable only in ``kv_layer_groups_manager``, which an engine
    sets once it has its caches.

    Args:
        model_name: As the engine names it.
        world_size: Workers in all.
        local_world_size: Workers on this host.
        worker_id: This worker's rank among all.
        local_worker_id: Its rank on this host: the index of its device.
        kv_dtype: Element type, of torch or its name.
        kv_shape: ``(layers, 2 or 1 for MLA, chunk size, heads, head size)``.
        use_mla: Keys and values are one latent vector.
        role: ``scheduler`` or ``worker``; None if it is both.
        chunk_size: Tokens per chunk.
        kv_layer_groups_manager: A ``KVLayerGroupsManager``; None as long as the caches are unknown.
        engine_id: Tells engines of one host apart.
        model_revision: Identity of the weights. Empty: of unknown weights, so nothing outlives the process.
        engine: Which engine computed the KV, with its version where pages are opaque.
        kv_extra: Settings that change the values of KV and not its shape, such as quantisation and rope factors.
    """

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: Any
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    role: str | None = None
    served_model_name: str | None = None
    chunk_size: int = 256
    kv_layer_groups_manager: Any = None
    engine_id: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None
    model_revision: str = ""
    engine: str = ""
    kv_extra: dict[str, str] = field(default_factory=dict)

    first_rank = 0

    def is_first_rank(self) -> bool:
        return self.worker_id == self.first_rank

    def get_shapes(self, num_tokens: int | None = None) -> list[tuple[int, ...]]:
        """``[2 or 1, layers, tokens, hidden]`` per group of like layers, for one chunk or ``num_tokens``."""
        tokens = self.chunk_size if num_tokens is None else num_tokens
        groups = self._groups()
        if groups:
            return [(g.shape_desc.kv_size, g.num_layers, tokens, g.hidden_dim_size) for g in groups]
        layers, kv_size, _, heads, head_size = self.kv_shape
        return [(kv_size, layers, tokens, heads * head_size)]

    def get_dtypes(self) -> list[Any]:
        """Element type per group."""
        return [group.dtype for group in self._groups()] or [self.kv_dtype]

    def _groups(self) -> list[Any]:
        manager = self.kv_layer_groups_manager
        return list(manager.kernel_groups) if manager is not None else []
