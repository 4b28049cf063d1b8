"""Names by which engines and backends import what is known of KV layouts; see ``lmcache.v1.kv_layout``."""

from __future__ import annotations

from lmcache.v1.kv_layout import (
    LayoutHints,
    get_group_data_ptrs,
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)

__all__ = [
    "LayoutHints",
    "get_group_data_ptrs",
    "normalize_and_discover_per_layer_formats",
    "normalize_kv_and_discover_format",
]
