"""``kv_connector_extra_config``: the keys we know, their types, and what we refuse."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lmcache.errors import ConfigError
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.client import ClientOptions
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol.endpoint import endpoint

logger = init_logger(__name__)

PREFIX = "lmcache.mp."


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str | int):
        raise ConfigError(f"{key}={value!r}: expected text")
    return str(value)


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{key}={value!r}: expected a number of seconds")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.05 <= number <= 3600:
        raise ConfigError(f"{key}={value!r}: expected a number of seconds within 0.05..3600")
    return number


def _seconds_or_0(key: str, value: Any) -> float:
    return 0.0 if value in (0, "0") and not isinstance(value, bool) else _seconds(key, value)


def _rate(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise ConfigError(f"{key}={value!r}: expected a positive number of MB per second")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: expected true or false (a JSON boolean)")
    return value


def _shm(key: str, value: Any) -> str:
    if value not in ("auto", "require", "off"):
        raise ConfigError(f"{key}={value!r}: expected auto, require or off")
    return str(value)


_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "host": _text,
    "port": _text,
    "mp_transfer_mode": _text,
    "mq_timeout": _seconds,
    "heartbeat_interval": _seconds,
    "fence_timeout": _seconds,
    "prefetch_timeout": _seconds_or_0,
    "min_mb_per_second": _rate,
    "shm": _shm,
    "save_decode_cache": _flag,
    "model_revision": _text,
}
"""Without the prefix ``lmcache.mp.``."""

_REFUSED = {
    "server_urls": "one server per engine; give lmcache.mp.host and lmcache.mp.port",
    "lazy_offload": "chunks are stored as soon as they are computed",
    "autostart": "start `lmcache server` yourself",
    "transfer_intermediate_tensors": "not supported",
    "isolated_ipc": "how memory is exported is the device plugin's own affair",
    "use_vmm_api": "how memory is exported is the device plugin's own affair",
    "hash_algorithm": "keys are always BLAKE3",
}


class ConnectorSettings(msgspec.Struct, kw_only=True, frozen=True):
    """What a user set for one engine."""

    address: str
    client: ClientOptions
    mode: MPTransferMode = MPTransferMode.AUTO
    save_decode_cache: bool = False
    prefetch_timeout: float = 2.0
    """Seconds that a request may wait for the server to fetch its KV from tiers below L1; 0: it never waits."""
    model_revision: str = ""
    layerwise: bool = False
    """Whether layers are moved one by one, beside the engine; one KV group, engine_driven only."""
    min_tokens: int = 0
    """A hit of fewer tokens counts as none."""


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Read and check the connector's extra config.

    Raises:
        ConfigError: for a key nobody knows, a value of the wrong kind, or a wish that cannot be met.
    """
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if not key.startswith("lmcache."):
            _check_stray(key)
            continue
        name = key.removeprefix(PREFIX)
        if name in _REFUSED and key.startswith(PREFIX):
            if value not in (False, None, "") and (name, value) != ("hash_algorithm", "blake3"):
                raise ConfigError(f"{key}={value!r}: {_REFUSED[name]}; remove it")
        elif name not in _KEYS or not key.startswith(PREFIX):
            raise ConfigError(f"{key}: no such setting{_did_you_mean(key)}")
        else:
            values[name] = _KEYS[name](key, value)

    mode_source, mode = f"{PREFIX}mp_transfer_mode", values.get("mp_transfer_mode")
    if mode is None:
        mode_source, mode = "LMCACHE_MP_TRANSFER_MODE", os.environ.get("LMCACHE_MP_TRANSFER_MODE") or "auto"
    options = ClientOptions(
        control_timeout=values.get("mq_timeout", ClientOptions().control_timeout),
        heartbeat_interval=values.get("heartbeat_interval", ClientOptions().heartbeat_interval),
        data_bytes_per_second=values.get("min_mb_per_second", ClientOptions().data_bytes_per_second / 1e6)
        * 1e6,
        fence_timeout=values.get("fence_timeout", ClientOptions().fence_timeout),
        shm=values.get("shm", "auto"),
    )
    return ConnectorSettings(
        address=endpoint(values.get("host", "tcp://localhost"), values.get("port")),
        client=options,
        mode=MPTransferMode.parse(mode, source=mode_source),
        save_decode_cache=values.get("save_decode_cache", False),
        prefetch_timeout=values.get("prefetch_timeout", 2.0),
        model_revision=values.get("model_revision", ""),
    )


def _did_you_mean(key: str) -> str:
    # Without the prefix, by which alone all would be alike.
    close = difflib.get_close_matches(key.rpartition(".")[2], _KEYS, 1, 0.6)
    if close:
        return f"; did you mean {PREFIX}{close[0]}?"
    return f"; known: {', '.join(PREFIX + name for name in _KEYS)}"


def _check_stray(key: str) -> None:
    """Other software may read other keys of the same map; only what looks like a slip of ours is an error."""
    close = difflib.get_close_matches(key, [PREFIX + name for name in _KEYS], 1, 0.8)
    if close:
        raise ConfigError(f"{key}: no such setting; did you mean {close[0]}?")
    logger.debug("kv_connector_extra_config key %s is not ours; ignored", key)
