"""From a file, the environment and code to one checked configuration."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lmcache.errors import ConfigError
from lmcache.v1.config.refused import REFUSED, asks_for_nothing
from lmcache.v1.config.rules import check
from lmcache.v1.config.schema import FIELDS, LMCacheEngineConfig, convert, outline

__all__ = ["FILE_VARIABLE", "OTHER_VARIABLES", "from_environment", "from_file", "merged", "named_file"]

Layer = Mapping[str, tuple[str, Any]]
"""Key to where it was set and its value."""

PREFIX = "LMCACHE_"
FILE_VARIABLE = "LMCACHE_CONFIG_FILE"

OTHER_VARIABLES = frozenset(
    {
        FILE_VARIABLE,
        "LMCACHE_DEVICE_BACKEND",
        "LMCACHE_DISABLE_PLUGINS",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_MP_HOST",
        "LMCACHE_MP_PORT",
        "LMCACHE_MP_TRANSFER_MODE",
        "LMCACHE_NATIVE_ABI",
        "LMCACHE_TRACK_USAGE",
    }
)
"""Variables of the prefix that are no keys. A device wheel may have more, which no key resembles."""

_CLOSE = 0.8


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Does not pass over a key that is set twice: one of the two values would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is set twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def named_file(environ: Mapping[str, str] | None) -> str | None:
    """What ``LMCACHE_CONFIG_FILE`` says."""
    return (os.environ if environ is None else environ).get(FILE_VARIABLE) or None


def from_file(path: str) -> Layer:
    """A YAML file's keys.

    Raises:
        ConfigError: It cannot be read, or is no map.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.load(file, _Loader)  # noqa: S506 -- a SafeLoader
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"configuration file {path}: cannot be read ({why})") from None
    except (yaml.YAMLError, RecursionError) as exc:
        raise ConfigError(f"configuration file {path}: not YAML ({' '.join(str(exc).split())})") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"configuration file {path}: {outline(found)}: expected a map of keys, e.g. chunk_size: 256"
        )
    return {str(key): (f"file {path}", value) for key, value in found.items()}


def from_environment(environ: Mapping[str, str] | None = None) -> Layer:
    """``LMCACHE_<KEY>`` of every key.

    A variable that is neither a key nor one of our others is let pass: a device wheel may read it. One that is
    spelled almost like a key is not.

    Raises:
        ConfigError: For such a one.
    """
    layer: dict[str, tuple[str, Any]] = {}
    for name, value in (os.environ if environ is None else environ).items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in FIELDS or key in REFUSED:
            layer[key] = (name, value)
        elif close := difflib.get_close_matches(key, FIELDS, 1, _CLOSE):
            raise ConfigError(f"{name}: no such setting; did you mean {PREFIX}{close[0].upper()}?")
    return layer


def merged(layers: Sequence[Layer]) -> LMCacheEngineConfig:
    """The last layer that has a key decides. Every value of every layer is checked.

    Raises:
        ConfigError: A key is unknown or refused, a value is wrong, or values contradict each other.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for key, (source, value) in layer.items():
            if key in FIELDS:
                values[key], sources[key] = convert(key, value, source), source
            elif key not in REFUSED:
                raise ConfigError(f"{key} ({source}): no such setting{_meant(key)}")
            elif not asks_for_nothing(key, value):
                raise ConfigError(f"{key}={value!r} ({source}): not supported; {REFUSED[key]}")
    config = LMCacheEngineConfig(**values, sources=sources)
    check(config)
    return config


def _meant(key: str) -> str:
    close = difflib.get_close_matches(key.lower(), FIELDS, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(FIELDS)}"
