"""Which objects a chunk is stored as: their layouts, and the namespaces in their keys."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.logging import init_logger, warn_once
from lmcache.v1.cache_engine.token_database import Chunk
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.keys import Namespace, object_key
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.memory.metadata import Layout, dtype_name, layout_of
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["ChunkObjects"]

logger = init_logger(__name__)


class ChunkObjects:
    """The objects of one chunk: one, or one per layer where layers move one by one.

    Args:
        config: Settings.
        metadata: What the engine says of itself. Layer groups must be known by now if there are any.
        connector: Asked for ``get_shapes`` and ``get_dtypes`` or else ``get_shape``, and for ``memory_format`` if it
            has one.
        owner_rank: The rank in the key: 0 for everybody where all ranks hold the same.

    Raises:
        ConfigError: Connector, settings and metadata do not go together.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, connector: Any, owner_rank: int
    ) -> None:
        self.chunk_size = config.chunk_size
        self._metadata = metadata
        self._layerwise = config.use_layerwise
        self._connector = connector
        layerwise = bool(getattr(connector, "is_layerwise", config.use_layerwise))
        if layerwise != config.use_layerwise:
            raise ConfigError(
                bad_value(
                    "use_layerwise", config.use_layerwise, f"{layerwise}, as {type(connector).__name__} works"
                )
            )
        self.per_chunk = metadata.kv_shape[0] if self._layerwise else 1
        self.layout = lru_cache(maxsize=2 * self.chunk_size)(self._layout)
        full = self.layout(self.chunk_size)
        if full.fmt is MemoryFormat.BINARY and not metadata.engine:
            raise ConfigError(
                bad_value(
                    "metadata.engine",
                    "",
                    "the engine and its version",
                    "opaque pages differ by it",
                )
            )
        revision = config.get_extra_config_value("model_revision") or metadata.model_revision
        self.namespaces = [
            self._namespace(full, str(revision or _unknown(metadata)), index, owner_rank)
            for index in range(self.per_chunk)
        ]
        self._by_digest = {namespace.digest(): namespace for namespace in self.namespaces}

    def rows(self, chunks: Sequence[Chunk]) -> list[list[tuple[bytes, int]]]:
        """Key and bytes of each object of each chunk."""
        names, full = list(self._by_digest), self.chunk_size
        sizes = {tokens: self.layout(tokens).nbytes for tokens in {end - start for start, end, _ in chunks}}
        if len(names) == 1 and sizes.keys() == {full}:  # the common case, and the path of every lookup
            size, name = sizes[full], names[0]
            return [[(object_key(name, digest), size)] for _, _, digest in chunks]
        return [
            [(object_key(name, digest), sizes[end - start]) for name in names]
            for start, end, digest in chunks
        ]

    def namespace_of(self, digest: bytes) -> Namespace | None:
        """A namespace by its digest, for the headers of stored objects."""
        return self._by_digest.get(digest)

    def is_ours(self, key: bytes) -> bool:
        return key[:-32] in self._by_digest

    def tokens_of(self, nbytes: int) -> int:
        """Tokens in an object of so many bytes."""
        full = self.layout(self.chunk_size).nbytes
        return min(self.chunk_size, nbytes * self.chunk_size // full)

    def _layout(self, tokens: int) -> Layout:
        """What the connector says, or the common form where it does not."""
        ask = self._connector
        several = getattr(ask, "get_shapes", None)
        shapes = several(tokens) if several is not None else [ask.get_shape(tokens)]
        dtypes = ask.get_dtypes() if hasattr(ask, "get_dtypes") else [self._metadata.kv_dtype] * len(shapes)
        fmt = getattr(ask, "memory_format", self._usual_format())
        if len({shape[0] for shape in shapes}) > 1:  # groups of layers with and without K apart
            fmt = MemoryFormat.UNDEFINED
        return layout_of([tuple(shape) for shape in shapes], dtypes, fmt)

    def _usual_format(self) -> MemoryFormat:
        if self._metadata.use_mla:
            return MemoryFormat.KV_MLA_FMT
        return MemoryFormat.KV_T2D if self._layerwise else MemoryFormat.KV_2LTD

    def _namespace(self, full: Layout, revision: str, index: int, rank: int) -> Namespace:
        meta = self._metadata
        tokens = self.chunk_size
        # Bytes of a token, tensor by tensor; a tensor that no token count divides is a page of its own kind.
        sizes = [end - start for start, end in zip(full.starts, full.ends, strict=True)]
        extra = {
            "tensors": "; ".join(
                f"{'x'.join(map(str, shape))} {dtype_name(dtype)}"
                for shape, dtype in zip(full.shapes, full.dtypes, strict=True)
            ),
            "sizes": " ".join(map(str, sizes)),
            **meta.kv_extra,
        }
        return Namespace(
            model=meta.model_name,
            revision=revision,
            engine=meta.engine,
            format=full.fmt.name,
            dtype=dtype_name(meta.kv_dtype),
            block_size=1,
            chunk_size=tokens,
            kv_heads=meta.kv_shape[3],
            head_size=meta.kv_shape[4],
            page_bytes=tuple(size // tokens for size in sizes),
            group=index,
            groups=self.per_chunk,
            tp_rank=rank,
            tp_size=meta.world_size,
            extra=extra,
        )


@cache
def _made_up(process: int) -> str:
    """One for each process: a child that is forked may load other weights."""
    return secrets.token_hex(16)


def _unknown(metadata: LMCacheMetadata) -> str:
    warn_once(
        logger,
        metadata.model_name,
        "%s: which revision of its weights this is was not told, so nothing is shared with other processes or after a "
        'restart; set extra_config: {"model_revision": …} to a name of your own for them',
        metadata.model_name,
    )
    return f"unknown:{_made_up(os.getpid())}"
