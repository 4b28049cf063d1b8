"""What the cache engine has before any request: its storage, its life, and what people ask of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.cache_engine.chunks import ChunkStore
from lmcache.v1.cache_engine.events import CacheStoreEvent, StoreEvents
from lmcache.v1.cache_engine.identity import ChunkObjects
from lmcache.v1.cache_engine.lookups import Lookups
from lmcache.v1.cache_engine.ranks import Ranks
from lmcache.v1.cache_engine.requests import Plan, plan_of
from lmcache.v1.cache_engine.stack import StorageStack
from lmcache.v1.cache_engine.token_database import TokenDatabase
from lmcache.v1.config import LMCacheEngineConfig, places
from lmcache.v1.keys import Namespace
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage.l2.adapter import StorageAdapter

__all__ = ["EngineCore"]

_CLOSE_SECONDS = 30.0


class EngineCore:
    """The engine without its requests.

    Args:
        config: Settings.
        metadata: What the host engine says of itself.
        gpu_connector: Moves KV between the engine's pages and memory objects.
        broadcast_fn: ``(tensor, source rank)``: fill the tensor everywhere from the source's.
        broadcast_object_fn: ``(object, source rank)`` returns the source's object everywhere.
        adapters: Storage engines by name instead of the configuration's.

    Raises:
        ConfigError, StartupError: What is asked for cannot be had.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        gpu_connector: Any,
        broadcast_fn: Callable[[Any, int], Any] | None = None,
        broadcast_object_fn: Callable[[Any, int], Any] | None = None,
        adapters: Sequence[tuple[str, StorageAdapter]] | None = None,
    ) -> None:
        if metadata.chunk_size != config.chunk_size:
            raise ConfigError(
                bad_value("metadata.chunk_size", metadata.chunk_size, f"{config.chunk_size}, as chunk_size")
            )
        self.config, self.metadata, self.gpu_connector = config, metadata, gpu_connector
        self.token_database = TokenDatabase(config.chunk_size, config.save_unfull_chunk)
        self.ranks = Ranks(config, metadata, gpu_connector, broadcast_fn, broadcast_object_fn)
        self.events = StoreEvents() if config.enable_kv_events else None
        self._pid = os.getpid()
        self._making = threading.Lock()
        self._store: ChunkStore | None = None
        self._frozen = self._closed = False
        self.stack = StorageStack(config, metadata, self._namespace_of, adapters)
        try:
            self._reads_from = places(config.retrieve_locations, self.stack.specs, "retrieve_locations")
            location = None if config.store_location is None else [config.store_location]
            self._writes_to = places(location, self.stack.specs, "store_location")
        except BaseException:
            self.stack.close(0)
            raise

    def post_init(self, **kwargs: Any) -> None:
        """Take note of the engine's caches now and not at the first request.

        Args:
            kwargs: What the connector's ``initialize_kvcaches_ptr`` takes, such as ``kvcaches``.

        Raises:
            ConfigError: Connector, settings and metadata do not go together.
        """
        self._ready(kwargs)

    def _ready(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether there is anything to ask: the engine serves, and the layout of its objects is known. Where groups of
        layers differ that is so only once the connector has seen the caches."""
        if not self.is_healthy():
            return False
        if self._store is None:
            with self._making:
                if self._store is None:
                    self._make(kwargs)
        return self._store is not None

    def _make(self, kwargs: Mapping[str, Any]) -> None:
        connector = self.gpu_connector
        if "kvcaches" in kwargs and hasattr(connector, "initialize_kvcaches_ptr"):
            connector.initialize_kvcaches_ptr(**kwargs)
        groups_may_differ = hasattr(connector, "get_shapes") and self.metadata.kv_layer_groups_manager is None
        if groups_may_differ and getattr(connector, "kvcaches", None) is None:
            return
        shapes = ChunkObjects(self.config, self.metadata, connector, self.ranks.owner)
        store = ChunkStore(self.stack, shapes, self._reads_from, self._writes_to)
        self.lookups = Lookups(store, self.config.pin_timeout_sec)
        self._store = store

    @property
    def chunk_store(self) -> ChunkStore:
        """
        Raises:
            ConfigError: The layout of objects is not known yet.
        """
        self._ready({})
        if self._store is None:
            raise ConfigError("the engine's caches are unknown: expected post_init(kvcaches=…) first")
        return self._store

    def _namespace_of(self, digest: bytes) -> Namespace | None:
        return self._store.shapes.namespace_of(digest) if self._store is not None else None

    # --- operations ---------------------------------------------------------------------------------------

    def clear(
        self,
        tokens: Any = None,
        locations: Sequence[str] | None = None,
        request_configs: Mapping[str, Any] | None = None,
    ) -> int:
        """Drop what nobody uses: chunks of ``tokens``, or everything, in L1 and below.

        Args:
            locations: Names of places; None: all.

        Returns:
            Tokens whose chunks were dropped from at least one place, as far as places can tell. A place that others
            share keeps no list: what only it holds is dropped and not counted when everything is.
        """
        where = places(locations, self.stack.specs, "locations")
        if not self._ready({}):
            return 0
        chain = None
        if tokens is not None:
            chain = self._plan(tokens, None, None, None, request_configs).chain
        return self.chunk_store.clear(chain, where, self.config.blocking_timeout_secs)

    def freeze(self, enabled: bool) -> None:
        """While frozen nothing is stored, loaded from below or evicted: only what is in L1 is given out."""
        self._frozen = bool(enabled)

    def is_frozen(self) -> bool:
        return self._frozen

    def is_healthy(self) -> bool:
        """Whether the cache serves. Faults of tiers are theirs: ``status`` shows them."""
        return not self._closed and self.is_here

    @property
    def is_here(self) -> bool:
        """False in a child that was forked: it shares L1's memory, but neither the books of it nor the threads, so it
        must not write there; nor may it take a lock, which another thread may have held as it was forked."""
        return os.getpid() == self._pid

    def health(self) -> int:
        """0: healthy; -1: not."""
        return 0 if self.is_healthy() else -1

    def get_kv_events(self) -> list[CacheStoreEvent]:
        """What was stored since the last call; empty unless ``enable_kv_events`` is set."""
        return [] if self.events is None else self.events.take()

    def status(self) -> dict[str, Any]:
        """Figures for people: L1, tiers, objects that somebody holds. Does no I/O. In a forked child only that the
        engine is not there."""
        if not self.is_here:
            return {"healthy": False}
        store = self._store
        with self.stack.lock:
            if store is not None:
                store.pool.reclaim()
                self.lookups.sweep()
            return {
                "healthy": self.is_healthy(),
                "frozen": self._frozen,
                "l1": self.stack.l1.usage(),
                "tiers": self.stack.tiers.status(),
                "lookups": 0 if store is None else len(self.lookups),
                "live_objects": 0 if store is None else store.pool.live,
                "stored_tokens": 0 if store is None else store.stored_tokens,
                "no_room_chunks": 0 if store is None else store.no_room,
            }

    def flush(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Whether tiers wrote all that waited, within so long."""
        return self.is_here and self.stack.tiers.flush(seconds)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what waits, within so long, and let go of everything. Closing twice is allowed, and
        in a forked child does nothing: all of it is the parent's."""
        if not self.is_here:
            return
        with self._making:
            if self._closed:
                return
            self._closed = True
        if self._store is not None:
            with self.stack.lock:
                self.lookups.clear()
                self._store.pool.reclaim()
        self.stack.close(seconds)

    def _plan(self, tokens: Any, hashes: Any, offsets: Any, mask: Any, configs: Any) -> Plan:
        return plan_of(self.token_database, tokens, hashes, offsets, mask, configs)
