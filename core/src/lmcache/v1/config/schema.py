"""The settings of an engine that runs LMCache inside its process: one field per key, with its range."""

from __future__ import annotations

import secrets
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lmcache.errors import ConfigError, bad_value

__all__ = ["FIELDS", "Field", "LMCacheEngineConfig", "convert"]

_MIB = 1 / 1024
Flag = Annotated[bool, Meta(description="true or false")]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20, description="tokens, from 1 to 1048576")]
Count = Annotated[int, Meta(ge=0, le=1 << 30, description="tokens, from 0 to 1073741824")]
PoolGib = Annotated[float, Meta(ge=_MIB, le=1 << 20, description="GiB, from 1/1024 to 1048576")]
DiskGib = Annotated[float, Meta(ge=0, le=1 << 30, description="GiB, from 0 to 1073741824")]
Seconds = Annotated[float, Meta(ge=0.01, le=86400, description="seconds, from 0.01 to 86400")]
Millis = Annotated[float, Meta(ge=1, le=3_600_000, description="milliseconds, from 1 to 3600000")]
Port = Annotated[int, Meta(ge=1, le=65535, description="a port, from 1 to 65535")]
Text = Annotated[str, Meta(min_length=1, description="text")]
Names = Annotated[tuple[str, ...], Meta(description="a list of names, or names separated by commas")]
Specs = Annotated[
    tuple[dict[str, Any], ...],
    Meta(description='a list of maps like {"type": "disk", "path": "/var/cache/lmcache", "max_gb": 100}'),
]
Free = Annotated[dict[str, Any], Meta(description="a map")]
Role = Annotated[Literal["sender", "receiver", "both"], Meta(description="sender, receiver or both")]


class LMCacheEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a user set. Made by ``load``, ``from_file``, ``from_env``, ``from_dict`` or ``from_defaults``, which check
    it; ``docs/configuration.md`` explains each key."""

    chunk_size: Tokens = 256
    local_cpu: Flag = True
    max_local_cpu_size: PoolGib = 5.0
    local_disk: Text | None = None
    max_local_disk_size: DiskGib = 0.0
    remote_url: Text | None = None
    l2_adapters: Specs = ()
    cache_policy: Text = "ARC"
    save_unfull_chunk: Flag = False
    save_decode_cache: Flag = False
    use_layerwise: Flag = False
    min_retrieve_tokens: Count = 0
    enable_async_loading: Flag = False
    blocking_timeout_secs: Seconds = 10.0
    lookup_timeout_ms: Millis = 3000.0
    pin_timeout_sec: Seconds = 300.0
    store_location: Text | None = None
    retrieve_locations: Names | None = None
    enable_kv_events: Flag = False
    enable_blending: Flag = False
    enable_pd: Flag = False
    pd_role: Role | None = None
    pd_peer_host: Text | None = None
    pd_peer_port: Port = 5555
    lmcache_instance_id: Text | None = None
    extra_config: Free = {}
    sources: dict[str, str] = {}
    """Where the values came from that are not defaults: key to ``file PATH``, a variable's name or ``code``."""

    # --- where values come from ---------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> LMCacheEngineConfig:
        """All sources: ``overrides`` over the environment over the file over defaults.

        Args:
            path: A YAML file; None: what ``LMCACHE_CONFIG_FILE`` names, if it does.
            overrides: Values set in code.
            environ: The environment; None: that of this process.

        Raises:
            ConfigError: One line that names the key, its value, its source and what was expected.
        """
        from lmcache.v1.config.sources import from_environment, from_file, merged, named_file

        path = path or named_file(environ)
        layers = [from_file(path)] if path else []
        layers += [from_environment(environ), {k: ("code", v) for k, v in (overrides or {}).items()}]
        return merged(layers)

    @classmethod
    def from_defaults(cls, **overrides: Any) -> LMCacheEngineConfig:
        """Defaults with values set in code; neither file nor environment.

        Raises:
            ConfigError: As ``load``.
        """
        return cls.from_dict(overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "code") -> LMCacheEngineConfig:
        """
        Raises:
            ConfigError: As ``load``.
        """
        from lmcache.v1.config.sources import merged

        return merged([{key: (source, value) for key, value in values.items()}])

    @classmethod
    def from_file(cls, path: str) -> LMCacheEngineConfig:
        """A YAML file alone.

        Raises:
            ConfigError: As ``load``.
        """
        from lmcache.v1.config.sources import from_file, merged

        return merged([from_file(path)])

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """Variables ``LMCACHE_<KEY>`` alone.

        Raises:
            ConfigError: As ``load``.
        """
        from lmcache.v1.config.sources import from_environment, merged

        return merged([from_environment(environ)])

    # --- questions ----------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Every key and its value, without sources: what two configurations are compared by."""
        return {name: getattr(self, name) for name in FIELDS}

    def source_of(self, key: str) -> str:
        return self.sources.get(key, "default")

    def get_extra_config_value(self, key: str, default: Any = None) -> Any:
        return self.extra_config.get(key, default)

    def instance_id(self) -> str:
        """The id that was set, or one made up for this process."""
        return self.lmcache_instance_id or _made_up()

    @property
    def pool_bytes(self) -> int:
        return int(self.max_local_cpu_size * (1 << 30))


@cache
def _made_up() -> str:
    return f"lmcache-{secrets.token_hex(8)}"


class Field(typing.NamedTuple):
    """A key: its type for msgspec, and what it takes in words."""

    type: Any
    expected: str


def _fields() -> dict[str, Field]:
    hints = typing.get_type_hints(LMCacheEngineConfig, include_extras=True)
    return {name: Field(hint, _expected(hint)) for name, hint in hints.items() if name != "sources"}


def _expected(hint: Any) -> str:
    for part in (hint, *typing.get_args(hint)):
        for note in getattr(part, "__metadata__", ()):
            return str(note.description) + (" or null" if part is not hint else "")
    raise TypeError(f"{hint}: a field without a description")


FIELDS: Mapping[str, Field] = _fields()
"""Every key, in order."""


_MAPS = ("extra_config", "l2_adapters")
_KINDS: Mapping[type, str] = {
    bool: "a boolean", dict: "a map", float: "a number", int: "a number", list: "a list", str: "text",
}  # fmt: skip
_NO_MAP = ("null", "none")


def convert(key: str, value: Any, source: str) -> Any:
    """``value`` in the type of ``key``. Text is read as what it says: ``"true"``, ``"5"``, ``"a,b"``, JSON for maps.

    Raises:
        ConfigError: It is something else.
    """
    field = FIELDS[key]
    try:
        return msgspec.convert(_parsed(key, value), field.type, strict=not isinstance(value, str))
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        name = f"{key} ({source})"
        if key in _MAPS:  # which may hold a password
            raise ConfigError(f"{name}={outline(value)}: expected {field.expected}") from None
        raise ConfigError(bad_value(name, value, field.expected)) from None


def outline(value: Any) -> str:
    """What a value of YAML is, without showing any of it."""
    if isinstance(value, (str, list)):
        return f"{_KINDS[type(value)]} of {len(value)}"
    return _KINDS.get(type(value), type(value).__name__)


def _parsed(key: str, value: Any) -> Any:
    """Text of a variable as lists, maps or null where the key takes them; no map is an empty one."""
    if key in _MAPS and (value is None or (isinstance(value, str) and value.strip().lower() in _NO_MAP)):
        return {} if key == "extra_config" else []
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if key in _MAPS:
        return msgspec.json.decode(text)
    if key == "retrieve_locations":
        return (
            msgspec.json.decode(text)
            if text[:1] == "["
            else [w.strip() for w in text.split(",") if w.strip()]
        )
    return None if text.lower() in ("null", "none") else text
