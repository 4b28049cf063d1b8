"""Keys of LMCache 0.5 that are not served here, with what to do instead. Their old defaults pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["HARMLESS", "REFUSED", "asks_for_nothing"]

_ADAPTERS = "name a storage engine in l2_adapters"
_POOL = "the pool is reserved in full at start, in shared memory"
_SERVER = "run `lmcache server` and the connector LMCacheMPConnector"
_NOTHING = "there is nothing like it here; remove it"
_HTTP = "`lmcache server` has the HTTP endpoints"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("local_cpu_use_hugepages", "numa_mode", "reserve_local_cpu_size"), _POOL),
    **dict.fromkeys(
        (
            "enable_lazy_memory_allocator",
            "lazy_memory_initial_ratio",
            "lazy_memory_expand_trigger_ratio",
            "lazy_memory_step_ratio",
            "lazy_memory_safe_size",
        ),
        _POOL,
    ),
    "local_disk_path_sharding": "every worker has a folder of its own below local_disk",
    "remote_serde": "bytes are stored as they are",
    "pre_caching_hash_algorithm": "keys are always BLAKE3",
    **dict.fromkeys(("remote_storage_plugins", "storage_plugins", "audit_actual_remote_url"), _ADAPTERS),
    **dict.fromkeys(
        ("gds_path", "gds_path_sharding", "gds_buffer_size", "use_gds", "gds_backend"), _ADAPTERS
    ),
    **dict.fromkeys(("maru_path", "maru_pool_size", "nixl_buffer_size", "nixl_buffer_device"), _ADAPTERS),
    **dict.fromkeys(("transfer_channel", "nixl_backends", "enable_nixl_storage"), _ADAPTERS),
    **dict.fromkeys(
        (
            "blend_recompute_ratios",
            "blend_thresholds",
            "blend_check_layers",
            "blend_min_tokens",
            "blend_special_str",
        ),
        "blending is not supported",
    ),
    **dict.fromkeys(
        ("enable_p2p", "p2p_host", "p2p_init_ports", "p2p_lookup_ports"),
        "share a storage engine: " + _ADAPTERS,
    ),
    **dict.fromkeys(("mp_host", "mp_port", "external_lookup_client"), _SERVER),
    **dict.fromkeys(
        (
            "enable_controller",
            "controller_pull_url",
            "controller_reply_url",
            "lmcache_worker_ports",
            "lmcache_worker_ids",
            "lmcache_worker_heartbeat_delay_time",
            "lmcache_worker_heartbeat_time",
        ),
        "there is no controller; " + _SERVER,
    ),
    **dict.fromkeys(
        ("pd_buffer_size", "pd_buffer_device", "pd_peer_alloc_port", "pd_peer_query_port", "pd_backend_mode"),
        "chunks go to the decoder's `lmcache server`; set pd_peer_host and pd_peer_port",
    ),
    "pd_peer_init_port": "it is pd_peer_port, the request port of the decoder's `lmcache server`",
    **dict.fromkeys(
        (
            "pd_proxy_host",
            "pd_proxy_port",
            "pd_skip_proxy_notification",
            "pd_bidirectional",
            "pd_allocation_timeout_sec",
            "pd_shutdown_timeout_sec",
            "pd_condition_poll_interval_sec",
            "pd_max_prefill_len",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
            "internal_api_server_enabled",
            "internal_api_server_host",
            "internal_api_server_port_start",
            "internal_api_server_include_index_list",
            "internal_api_server_socket_path_prefix",
            "run_script_api_enabled",
            "script_allowed_imports",
        ),
        _HTTP,
    ),
    **dict.fromkeys(
        ("remote_config_url", "app_id"), "settings come from a file, the environment and code only"
    ),
    "runtime_plugin_locations": "see docs/plugins.md",
    "py_enable_gc": "the host's garbage collector is the host's",
    "priority_limit": _NOTHING,
    "hit_miss_ratio": _NOTHING,
    "lookup_server_worker_ids": _NOTHING,
    "enable_scheduler_bypass_lookup": _NOTHING,
    "pin_check_interval_sec": "pins are checked as requests come",
    **dict.fromkeys(
        (
            "enable_chunk_statistics",
            "chunk_statistics_auto_start_statistics",
            "chunk_statistics_auto_exit_timeout_hours",
            "chunk_statistics_auto_exit_target_unique_chunks",
            "chunk_statistics_strategy",
        ),
        "record requests and use `lmcache tool simulate`",
    ),
    **dict.fromkeys(
        (
            "enable_hidden_state_cache",
            "max_hidden_state_cpu_size",
            "hidden_state_layers",
            "hidden_states_retrieve_mode",
        ),
        "hidden states are not cached",
    ),
    "use_gpu_connector_v3": 'it is a key of extra_config: {"use_gpu_connector_v3": true}',
}

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "remote_serde": ("naive",),
    "pre_caching_hash_algorithm": ("blake3", "builtin"),
    "py_enable_gc": (True,),
    **dict.fromkeys(("local_disk_path_sharding", "gds_path_sharding"), ("by_gpu",)),
    "gds_backend": ("cufile",),
    "use_gds": (True,),  # how gds_path is read; that is what asks for it
    "maru_pool_size": (4.0,),
    "blend_min_tokens": (256,),
    "blend_special_str": (" # # ",),
    "mp_port": (5555,),
    "lmcache_worker_heartbeat_delay_time": (10,),
    "pd_allocation_timeout_sec": (math.inf,),
    "pd_shutdown_timeout_sec": (5.0,),
    "pd_condition_poll_interval_sec": (0.005,),
    "pd_backend_mode": ("async",),
    "internal_api_server_host": ("127.0.0.1",),
    "internal_api_server_port_start": (6999,),
    "lazy_memory_initial_ratio": (0.2,),
    "lazy_memory_expand_trigger_ratio": (0.5,),
    "lazy_memory_step_ratio": (0.1,),
    "pin_check_interval_sec": (30,),
    "chunk_statistics_strategy": ("memory_bloom_filter",),
    "max_hidden_state_cpu_size": (2.0,),
    "hidden_states_retrieve_mode": ("prefix_strict",),
}
"""Values, besides none, false, zero and nothing, that ask for what happens anyway: they were defaults."""


def asks_for_nothing(key: str, value: Any) -> bool:
    """Whether a refused key has a value that can be ignored."""
    harmless, text = HARMLESS.get(key, ()), str(value).strip().lower()
    if isinstance(value, str) and text in ("", "none", "null", "false", "0"):
        return True
    return not value or value in harmless or text in (str(one).strip().lower() for one in harmless)
