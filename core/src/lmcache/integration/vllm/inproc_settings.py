"""Settings of the in-process connector: from the keys that users of LMCache know to a server inside the engine."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.logging import init_logger, warn_once
from lmcache.v1.config import FIELDS, REFUSED, LMCacheEngineConfig, policy_name, tier_specs
from lmcache.v1.config.sources import from_environment, from_file, merged, named_file
from lmcache.v1.multiprocess.client import ClientOptions
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.embedded import embedded_address
from lmcache.v1.platform.base.device_spec import MPTransferMode

__all__ = ["connector_settings", "in_users_words", "read_config", "server_config"]

logger = init_logger(__name__)

PREFIX = "lmcache."
SOURCE = "kv_connector_extra_config"
_MP_PREFIX = "lmcache.mp."
_WRAPPERS_OWN = ("use_native",)
_PATIENCE_SECONDS = 2.0
_FLUSH_SECONDS = 3.0
"""vLLM gives its workers some four seconds to end."""

_UNSERVED: Mapping[str, str] = {
    "save_unfull_chunk": "whole chunks of an engine's pages are stored",
    "enable_kv_events": "the cache publishes no events; vLLM's own are those of its blocks",
    "store_location": "every tier is stored to; name those that you want",
    "retrieve_locations": "every tier is read; name those that you want",
}
"""Keys that the in-process engine serves and this connector does not, unless they ask for nothing."""

_WORDS: Mapping[str, str] = {
    "--l1-size-gb": "max_local_cpu_size",
    "--chunk-size": "chunk_size",
    "--eviction-policy": "cache_policy",
    "--l2-adapter": "l2_adapters",
    "--l2-load-seconds": "blocking_timeout_secs",
    "--l2-prefetch-seconds": "blocking_timeout_secs",
}


def read_config(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
    """``kv_connector_extra_config`` over ``LMCACHE_<KEY>`` over the file of ``LMCACHE_CONFIG_FILE``.

    Keys of the map are those of the configuration, bare or with the prefix ``lmcache.``.

    Raises:
        ConfigError: one line, for a key nobody knows, a value of the wrong kind, or a wish that cannot be met.
    """
    path = named_file(environ)
    layers = [from_file(path)] if path else []
    config = merged([*layers, from_environment(environ), _layer(extra)])
    for key, remedy in _UNSERVED.items():
        if getattr(config, key):
            name = f"{key} ({config.source_of(key)})"
            raise ConfigError(f"{name}={getattr(config, key)!r}: not supported with vLLM; {remedy}")
    return config


def _layer(extra: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    layer: dict[str, tuple[str, Any]] = {}
    known = [*FIELDS, *REFUSED]
    for name, value in extra.items():
        key = name.removeprefix(PREFIX)
        if name.startswith(_MP_PREFIX):
            raise ConfigError(f"{name}: a setting of LMCacheMPConnector; name that connector, or remove it")
        if key in known or name.startswith(PREFIX):
            if key in layer:
                raise ConfigError(f"{SOURCE}: {key} and {PREFIX}{key} are the same setting; give one of them")
            layer[key] = (SOURCE, value)
        elif name not in _WRAPPERS_OWN:
            # Other software may read other keys of the same map; only what looks like a slip of ours is an error.
            close = difflib.get_close_matches(name, FIELDS, 1, 0.8)
            if close:
                raise ConfigError(f"{name} ({SOURCE}): no such setting; did you mean {close[0]}?")
            warn_once(logger, name, "%s key %s is none of LMCache's; it is not read here", SOURCE, name)
    return layer


def connector_settings(config: LMCacheEngineConfig, engine: str) -> ConnectorSettings:
    """How the two sides of an engine's connector reach its server, and what they do."""
    patience = _PATIENCE_SECONDS
    if config.source_of("lookup_timeout_ms") != "default":
        patience = config.lookup_timeout_ms / 1000
    return ConnectorSettings(
        address=embedded_address(engine),
        client=ClientOptions(),
        mode=MPTransferMode.ENGINE_DRIVEN,
        save_decode_cache=config.save_decode_cache,
        prefetch_timeout=patience,
        model_revision=str(config.extra_config.get("model_revision", "")),
        layerwise=config.use_layerwise,
        min_tokens=config.min_retrieve_tokens,
    )


def server_config(config: LMCacheEngineConfig, block_sizes: Sequence[int], replica: int = 0) -> ServerConfig:
    """What the server inside the engine keeps chunks in.

    Args:
        block_sizes: Tokens per block of each KV group of the engine.
        replica: Which of several data-parallel engines with the same settings this is; each has a disk folder of its
            own.

    Raises:
        ConfigError: chunks are not whole blocks, or a value is out of the server's range.
    """
    whole = math.lcm(*block_sizes)
    for size in block_sizes:
        if config.chunk_size % size:
            raise ConfigError(
                bad_value(
                    f"chunk_size ({config.source_of('chunk_size')})",
                    config.chunk_size,
                    f"a multiple of this engine's block size {size}",
                    f"e.g. {-(-config.chunk_size // whole) * whole}",
                )
            )
    made = ServerConfig(
        l1_size_gb=config.max_local_cpu_size,
        chunk_size=config.chunk_size,
        eviction_policy=policy_name(config.cache_policy) or config.cache_policy,
        supported_transfer_mode="engine_driven",
        l2_adapter=tuple(json.dumps(spec) for _, spec in tier_specs(config, replica=replica)),
        l2_store_policy="write_behind" if config.local_cpu else "skip_l1",
        l2_prefetch_policy="retain" if config.local_cpu else "drop",
        l2_load_seconds=min(config.blocking_timeout_secs, 3600.0),
        l2_prefetch_seconds=min(config.blocking_timeout_secs, 3600.0),
        l2_flush_seconds=_FLUSH_SECONDS,
    )
    try:
        made.check()
    except ConfigError as exc:
        raise ConfigError(in_users_words(str(exc))) from None
    return made


def in_users_words(text: str) -> str:
    """An error of the server with the names of keys in place of its flags."""
    for flag, key in _WORDS.items():
        text = text.replace(flag, key)
    return text
