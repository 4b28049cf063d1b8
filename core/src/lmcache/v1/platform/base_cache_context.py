"""Another path of ``lmcache.v1.platform.base.cache_context``, which published plugins import."""

from __future__ import annotations

from lmcache.v1.platform.base.cache_context import BaseCacheContext

__all__ = ["BaseCacheContext"]
