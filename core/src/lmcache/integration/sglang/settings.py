"""Settings of the multi-process connector: SGLang's ``--lmcache-config-file``, and the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from lmcache.errors import ConfigError
from lmcache.integration.vllm.settings import PREFIX, ConnectorSettings, read_settings
from lmcache.v1.config import FIELDS, REFUSED
from lmcache.v1.config.sources import FILE_VARIABLE, from_file
from lmcache.v1.platform.base.device_spec import MPTransferMode

__all__ = ["mp_settings"]

_KEYS = ("mp_host", "mp_port", "extra_config")


def mp_settings(
    config_file: str | None = None, environ: Mapping[str, str] | None = None
) -> ConnectorSettings:
    """``mp_host``, ``mp_port`` and ``extra_config`` with the keys ``lmcache.mp.*``; the environment
    (``LMCACHE_MP_HOST``, ``LMCACHE_MP_PORT``) over the file.

    Args:
        config_file: a YAML file; None or empty: what ``LMCACHE_CONFIG_FILE`` names, if it does.
        environ: the environment; None: that of this process.

    Raises:
        ConfigError: for a key that does not belong here, a value of the wrong kind, a mode that SGLang's pages are
            not moved in.
    """
    environ = os.environ if environ is None else environ
    path = config_file or environ.get(FILE_VARIABLE)
    values: dict[str, tuple[str, Any]] = dict(from_file(path)) if path else {}
    for key in _KEYS[:2]:
        variable = f"LMCACHE_{key.upper()}"
        if environ.get(variable):
            values[key] = (variable, environ[variable])
    for key, (source, _) in values.items():
        if key not in _KEYS:
            raise ConfigError(f"{key} ({source}): {_misplaced(key)}")
    _, extra = values.get("extra_config", ("", None))
    if not isinstance(extra or {}, dict):
        raise ConfigError(f"extra_config={extra!r}: expected a map with keys such as {PREFIX}mq_timeout")
    given = dict(extra or {})
    for key, name in (("mp_host", "host"), ("mp_port", "port")):
        if key in values:
            given[PREFIX + name] = values[key][1]
    settings = read_settings(given)
    if settings.mode is MPTransferMode.LMCACHE_DRIVEN:
        raise ConfigError(
            f"{PREFIX}mp_transfer_mode={settings.mode.value}: SGLang's pages are moved by its workers; "
            "expected auto or engine_driven"
        )
    return settings


def _misplaced(key: str) -> str:
    if key in FIELDS or key in REFUSED:
        return "a setting of the in-process engine, which does nothing here; give it to `lmcache server`"
    close = difflib.get_close_matches(key, _KEYS, 1, 0.6)
    return (
        f"no such setting; did you mean {close[0]}?"
        if close
        else f"no such setting; known: {', '.join(_KEYS)}"
    )
