"""Engines by name, so that every part of a host engine finds the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lmcache.errors import ConfigError
from lmcache.v1.cache_engine.engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["LMCacheEngineBuilder"]


class LMCacheEngineBuilder:
    """The engines of this process, by instance id."""

    _engines: dict[str, LMCacheEngine] = {}  # noqa: RUF012 -- the process's own registry, guarded by the lock
    _lock = threading.Lock()

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        gpu_connector: Any,
        broadcast_fn: Callable[[Any, int], Any] | None = None,
        broadcast_object_fn: Callable[[Any, int], Any] | None = None,
    ) -> LMCacheEngine:
        """The engine of this id; made if there is none.

        Raises:
            ConfigError: There is one, with other settings or metadata.
        """
        with cls._lock:
            found = cls._engines.get(instance_id)
            if found is None or not found.is_here:  # the parent's, in a child that was forked
                found = LMCacheEngine(config, metadata, gpu_connector, broadcast_fn, broadcast_object_fn)
                cls._engines[instance_id] = found
                return found
            changed = [key for key, value in config.values().items() if found.config.values()[key] != value]
            if changed or found.metadata != metadata:
                raise ConfigError(
                    f"engine {instance_id}: it is there with other {', '.join(changed) or 'metadata'};"
                    " destroy it first, or take another id"
                )
            return found

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """The engine of this id, if this process has one."""
        with cls._lock:
            found = cls._engines.get(instance_id)
        return found if found is not None and found.is_here else None

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close it and forget it. Harmless if there is none."""
        with cls._lock:
            found = cls._engines.pop(instance_id, None)
        if found is not None:
            found.close()
