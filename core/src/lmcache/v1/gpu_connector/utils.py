"""Names by which engines and backends import what is known of KV layouts; see ``lmcache.v1.kv_layout``."""

from __future__ import annotations

from typing import Any

from lmcache.errors import ConfigError
from lmcache.v1.kv_layout import (
    LayoutHints,
    get_group_data_ptrs,
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)

__all__ = [
    "LayoutHints",
    "assert_layerwise_gpu_connector",
    "get_group_data_ptrs",
    "normalize_and_discover_per_layer_formats",
    "normalize_kv_and_discover_format",
]


def assert_layerwise_gpu_connector(connector: Any) -> None:
    """
    Raises:
        ConfigError: The connector does not go layer by layer.
    """
    if not getattr(connector, "is_layerwise", False):
        raise ConfigError(
            f"{type(connector).__name__} does not go layer by layer: expected use_layerwise=true and a device whose "
            "connector does"
        )
