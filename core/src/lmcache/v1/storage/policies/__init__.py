"""The eviction policies of our own, by the names that ``--eviction-policy`` takes. ``docs/eviction.md`` compares
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lmcache.v1.storage.eviction import LRU, EvictionPolicy
from lmcache.v1.storage.policies.arc import ARC
from lmcache.v1.storage.policies.lfu import LFU
from lmcache.v1.storage.policies.plain import FIFO, Noop
from lmcache.v1.storage.policies.s3fifo import S3FIFO

__all__ = ["ARC", "BUILT_IN", "FIFO", "LFU", "LRU", "S3FIFO", "Noop"]

BUILT_IN: Mapping[str, Callable[[], EvictionPolicy]] = {
    "LRU": LRU,
    "LFU": LFU,
    "FIFO": FIFO,
    "ARC": ARC,
    "S3-FIFO": S3FIFO,
    "noop": Noop,
}
