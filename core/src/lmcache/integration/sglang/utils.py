"""The configuration as SGLang 0.5.13 to 0.5.20 asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache.integration.sglang.settings import mp_settings
from lmcache.integration.vllm.settings import ConnectorSettings

__all__ = ["MPConfig", "lmcache_get_config", "settings_of"]

_read: dict[tuple[str, int], ConnectorSettings] = {}


@dataclass(frozen=True)
class MPConfig:
    """Where the server is."""

    mp_host: str
    mp_port: int


def lmcache_get_config(config_file: str = "") -> MPConfig:
    """Read and check a configuration file of the multi-process connector.

    SGLang hands only host and port on to the connector; the other settings are kept here for :func:`settings_of`.

    Raises:
        ConfigError: see :func:`mp_settings`.
    """
    settings = mp_settings(config_file or None)
    host, _, port = settings.address.removeprefix("tcp://").rpartition(":")
    _read[host, int(port)] = settings
    return MPConfig(host, int(port))


def settings_of(host: str, port: int) -> ConnectorSettings:
    """The settings that were read with this host and port; defaults if none were.

    Raises:
        ConfigError: an address that is none.
    """
    found = _read.get((host, int(port)))
    return found or mp_settings(None, {"LMCACHE_MP_HOST": host, "LMCACHE_MP_PORT": str(port)})
