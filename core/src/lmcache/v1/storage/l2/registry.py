"""From an operator's JSON to a storage adapter. Nothing of an engine is imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2.adapter import StorageAdapter

__all__ = ["BUILT_IN", "Kind", "build", "check_type", "parse"]


class Kind(NamedTuple):
    """A built-in adapter: its class by name, what it needs, and how to get that."""

    module: str
    """Has ``make(options: Mapping[str, Any]) -> StorageAdapter``, which raises ConfigError for a bad option."""
    text: str
    package: str = ""
    """Distribution to import, if it needs one."""
    install: str = ""


_HERE = "lmcache.v1.storage.l2"

BUILT_IN: Mapping[str, Kind] = {
    "disk": Kind(f"{_HERE}.disk", "files of this server alone, in a directory of a local file system"),
    "shared_fs": Kind(
        f"{_HERE}.shared_fs", "files in a directory that several servers share (NFS, Lustre, …)"
    ),
    "redis": Kind(
        f"{_HERE}.redis", "Redis or Valkey, also as a cluster", "redis", "pip install lmcache[redis]"
    ),
    "s3": Kind(f"{_HERE}.s3", "an S3-compatible object store", "obstore", "pip install lmcache[s3]"),
    "mooncake": Kind(
        f"{_HERE}.mooncake", "a Mooncake Store pool", "mooncake", "pip install lmcache[mooncake]"
    ),
    "peer": Kind(
        "lmcache.v1.multiprocess.peer.adapter",  # by name: it needs the protocol, which storage may not import
        "another lmcache server, to which chunks are pushed (prefill to decode)",
    ),
    "fault": Kind(f"{_HERE}.fault", "memory that errs on demand, for tests"),
}

_JSON_KINDS = {list: "array", bool: "boolean", int: "number", float: "number"}

Maker = Callable[[Mapping[str, Any]], StorageAdapter]


def parse(text: str) -> dict[str, Any]:
    """``--l2-adapter JSON`` as a map with a ``type``.

    Nothing of the text is shown, for an option may hold a password.

    Raises:
        ConfigError: if it is no JSON object, or has no ``type``.
    """
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as exc:
        why = "text that is no Unicode" if isinstance(exc, UnicodeEncodeError) else str(exc)
        raise ConfigError(
            f"--l2-adapter {_outline(text)}: not JSON ({why}); expected e.g."
            ' {"type": "disk", "path": "/var/cache/lmcache", "max_gb": 100}'
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise ConfigError(
            f'--l2-adapter {_outline(found)}: expected an object with a "type", one of {", ".join(BUILT_IN)}'
        )
    return found


def _outline(value: Any) -> str:
    """What people know a value by that is not what it should be: its kind and size, no values."""
    if isinstance(value, str):
        return f"of {len(value)} characters"
    if isinstance(value, dict):
        return f"with {', '.join(map(repr, value)) or 'no option'}"[:200]
    return f"as a JSON {_JSON_KINDS.get(type(value), 'null')}"


def check_type(name: str, external: Collection[str] = ()) -> None:
    """
    Raises:
        ConfigError: There is no such adapter, neither here nor among ``external``, the plugins'.
    """
    known = [*BUILT_IN, *external]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"--l2-adapter type {name!r}: expected one of {', '.join(known)}{meant}")


def build(spec: Mapping[str, Any], external: Mapping[str, Maker] | None = None) -> StorageAdapter:
    """The adapter that ``spec`` asks for; ``external`` are those of plugins, by type.

    Raises:
        ConfigError: for an unknown type or a bad option.
        StartupError: if the engine cannot be had: a package that is missing (with its install line), a directory in
            use, a server that refuses.
    """
    name, external = str(spec.get("type")), external or {}
    options = {key: value for key, value in spec.items() if key != "type"}
    check_type(name, external)
    adapter = external[name](options) if name in external else _built_in(name, options)
    adapter.type_name = name
    return adapter


def _built_in(name: str, options: Mapping[str, object]) -> StorageAdapter:
    kind = BUILT_IN[name]
    try:
        module = importlib.import_module(kind.module)
    except ImportError as exc:
        if not kind.package or (exc.name or "").partition(".")[0] != kind.package:
            raise
        raise StartupError(
            f"--l2-adapter type {name!r}: needs the package {kind.package}, which is not installed; {kind.install}"
        ) from None
    adapter: StorageAdapter = module.make(options)
    return adapter
