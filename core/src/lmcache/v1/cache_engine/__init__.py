"""The cache engine that runs inside the process of a serving engine."""

from __future__ import annotations

from lmcache.v1.cache_engine.builder import LMCacheEngineBuilder
from lmcache.v1.cache_engine.engine import LMCacheEngine
from lmcache.v1.cache_engine.events import CacheStoreEvent
from lmcache.v1.cache_engine.token_database import Chunk, TokenDatabase

__all__ = ["CacheStoreEvent", "Chunk", "LMCacheEngine", "LMCacheEngineBuilder", "TokenDatabase"]
