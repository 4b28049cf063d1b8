"""What keys must agree on with each other and with what is installed."""

from __future__ import annotations

import difflib
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.config.schema import LMCacheEngineConfig
from lmcache.v1.config.tiers import tier_specs
from lmcache.v1.storage.policies import BUILT_IN

__all__ = ["EXTRA_KEYS", "check"]

EXTRA_KEYS = (
    "save_only_first_rank",
    "use_gpu_connector_v3",
    "cpu_connector",
    "model_revision",
    "use_odirect",
)
"""Keys of ``extra_config`` that we read; plugins may read others."""


def check(config: LMCacheEngineConfig) -> None:
    """
    Raises:
        ConfigError: One line about the first thing that does not go together.
    """
    _check_policy(config)
    _check_disk(config)
    _check_disaggregation(config)
    _check_extra(config)
    if config.enable_blending:
        raise ConfigError(_said(config, "enable_blending", "false", "blending is not supported"))
    tier_specs(config)


def _said(config: LMCacheEngineConfig, key: str, expected: str, remedy: str = "") -> str:
    return bad_value(f"{key} ({config.source_of(key)})", getattr(config, key), expected, remedy)


def _check_policy(config: LMCacheEngineConfig) -> None:
    if policy_name(config.cache_policy) is None:
        raise ConfigError(_said(config, "cache_policy", f"one of {', '.join(BUILT_IN)}"))


def policy_name(wanted: str) -> str | None:
    """The eviction policy's name in our spelling; None: there is none."""
    plain = {name.lower().replace("-", ""): name for name in BUILT_IN}
    return plain.get(wanted.lower().replace("-", "").replace("_", ""))


def _check_disk(config: LMCacheEngineConfig) -> None:
    if config.local_disk and not config.max_local_disk_size:
        raise ConfigError(
            _said(
                config, "local_disk", "max_local_disk_size beside it", "e.g. max_local_disk_size: 100 (GiB)"
            )
        )
    if config.max_local_disk_size and not config.local_disk:
        raise ConfigError(
            _said(config, "max_local_disk_size", "local_disk beside it", "name a folder for it")
        )
    if config.local_disk and "," in config.local_disk:
        raise ConfigError(_said(config, "local_disk", "one folder", "join disks below the file system"))


def _check_disaggregation(config: LMCacheEngineConfig) -> None:
    if not config.enable_pd:
        for key in ("pd_role", "pd_peer_host"):
            if getattr(config, key) is not None:
                raise ConfigError(_said(config, key, "enable_pd: true beside it"))
        return
    if config.pd_role != "sender":
        raise ConfigError(
            _said(
                config,
                "pd_role",
                "sender",
                "a decoder receives through `lmcache server` and the connector LMCacheMPConnector",
            )
        )
    if config.pd_peer_host is None:
        raise ConfigError(_said(config, "pd_peer_host", "the host of the decoder's `lmcache server`"))


def _check_extra(config: LMCacheEngineConfig) -> None:
    """Only what looks like a slip of ours is an error."""
    for key in config.extra_config:
        close: list[Any] = difflib.get_close_matches(key, EXTRA_KEYS, 1, 0.8)
        if key not in EXTRA_KEYS and close:
            raise ConfigError(f"extra_config key {key!r}: no such setting; did you mean {close[0]}?")
