"""Hugging Face transformers: a prompt's KV into a ``DynamicCache``, and back, by a server or in this process."""

from __future__ import annotations

from lmcache.integration.transformers.inprocess import InProcessCache
from lmcache.integration.transformers.prefix_cache import PrefixCache

__all__ = ["InProcessCache", "PrefixCache"]
