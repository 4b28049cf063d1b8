"""A configuration for people: every value with its source, secrets masked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmcache.v1.config.schema import FIELDS, LMCacheEngineConfig

__all__ = ["masked", "shown"]

_MASK = "***"
_SECRET = re.compile(r"pass|secret|token|credential|api_?key|access_?key|private", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@]*@")
_QUERY = re.compile(r"(?<=[?&])([^=&]*)=([^&]*)")


def shown(config: LMCacheEngineConfig) -> dict[str, dict[str, Any]]:
    """Key to ``value`` and ``source``."""
    return {key: {"value": masked(getattr(config, key)), "source": config.source_of(key)} for key in FIELDS}


def masked(value: Any, key: str = "") -> Any:
    """``value`` without passwords: those in URLs, and whatever a key says is one."""
    if isinstance(value, Mapping):
        return {k: masked(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [masked(v, key) for v in value]
    if value not in (None, "") and _SECRET.search(key):
        return _MASK
    if isinstance(value, str) and "://" in value:
        value = _USERINFO.sub(f"{_MASK}@", value)
        return _QUERY.sub(lambda m: f"{m[1]}={_MASK}" if _SECRET.search(m[1]) else m[0], value)
    return value
