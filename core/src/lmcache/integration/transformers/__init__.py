"""Hugging Face transformers: a prompt's KV from the cache server into a ``DynamicCache``, and back."""

from __future__ import annotations

from lmcache.integration.transformers.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
