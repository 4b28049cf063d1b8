"""From keys that users know to the storage engines behind L1, and from the names of places to tiers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.config.schema import LMCacheEngineConfig

__all__ = ["L1_NAME", "TierSpec", "places", "tier_specs"]

L1_NAME = "l1"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_PLACES: Mapping[str, tuple[str, ...]] = {
    "LocalCPUBackend": (L1_NAME,),
    "LocalDiskBackend": ("disk",),
    "RemoteBackend": ("shared_fs", "redis", "s3", "mooncake"),
    "PDBackend": ("peer",),
}
"""Names of 0.5 and the types of storage engines that they stand for."""


class TierSpec(NamedTuple):
    """A storage engine by a name of its own, and what ``lmcache.v1.storage.l2.registry.build`` makes it from."""

    name: str
    spec: dict[str, Any]


def tier_specs(
    config: LMCacheEngineConfig, worker_id: int = 0, world_size: int = 1, replica: int = 0
) -> list[TierSpec]:
    """The storage engines that a configuration asks for, those to be asked first in front.

    Args:
        config: Checked values.
        worker_id: A local disk belongs to one process, so every rank has a folder of its own.
        world_size: Ranks in all.
        replica: Which of several engines with the same settings: it has folders of its own, too.

    Raises:
        ConfigError: ``remote_url`` is none of ours, or an adapter has no type, or a name that is none or is taken.
    """
    specs: list[dict[str, Any]] = []
    if config.enable_pd:
        host = str(config.pd_peer_host)
        host = f"[{host}]" if ":" in host and host[0] != "[" else host  # an IPv6 address
        specs.append({"type": "peer", "address": f"tcp://{host}:{config.pd_peer_port}", "sync": True})
    if config.local_disk:
        name = f"rank-{worker_id}-of-{world_size}"
        specs.append(_disk(config, f"{name}-replica-{replica}" if replica else name))
    for spec in config.l2_adapters:
        if not isinstance(spec.get("type"), str):
            keys = ", ".join(map(repr, spec)) or "no option"  # a value may hold a password
            raise ConfigError(f'l2_adapters entry with {keys}: expected a "type", e.g. "disk"')
        specs.append(dict(spec))
    if config.remote_url:
        specs.append(_remote(config, _split(config)))
    return _named(specs)


def _named(specs: Sequence[dict[str, Any]]) -> list[TierSpec]:
    """Each with its ``name``, else its type, with a number from the second of a type on: as the server names them."""
    named: dict[str, TierSpec] = {}
    for spec in specs:
        name, kind = spec.pop("name", None), spec["type"]
        if name is None:
            name = next(
                n for n in (kind, *(f"{kind}-{i}" for i in range(2, len(specs) + 2))) if n not in named
            )
        elif not isinstance(name, str) or not _NAME.fullmatch(name) or name in (L1_NAME, *named):
            expected = "1 to 64 of the characters A-Z a-z 0-9 _ . -, and none of"
            raise ConfigError(
                bad_value("l2_adapters name", name, f"{expected} {', '.join((L1_NAME, *named))}")
            )
        named[name] = TierSpec(name, spec)
    return list(named.values())


def _disk(config: LMCacheEngineConfig, name: str) -> dict[str, Any]:
    folder = Path(str(config.local_disk).removeprefix("file://")).expanduser()
    spec: dict[str, Any] = {
        "type": "disk",
        "path": str(folder / name),
        "max_gb": config.max_local_disk_size,
    }
    if "use_odirect" in config.extra_config:
        spec["direct"] = "on" if config.extra_config["use_odirect"] else "off"
    return spec


def _redis(url: SplitResult) -> dict[str, Any]:
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(url.scheme, url.scheme)
    text = url._replace(scheme="").geturl()
    return {"type": "redis", "url": f"{scheme}:{text if url.netloc else '//' + text}"}


def _s3(url: SplitResult) -> dict[str, Any]:
    return {"type": "s3", "url": url.geturl()}


def _folder(url: SplitResult) -> dict[str, Any]:
    return {"type": "shared_fs", "path": url.path}


def _mooncake(url: SplitResult) -> dict[str, Any]:
    return {"type": "mooncake", "master": url.netloc}


_SCHEMES: Mapping[str, Callable[[SplitResult], dict[str, Any]]] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), _redis),
    "s3": _s3,
    "fs": _folder,
    "mooncakestore": _mooncake,
}


def _split(config: LMCacheEngineConfig) -> SplitResult:
    try:
        return urlsplit(str(config.remote_url))
    except ValueError as exc:  # of its text only the reason is shown: it may hold a password
        raise ConfigError(f"remote_url ({config.source_of('remote_url')}): no URL: {exc}") from None


def _remote(config: LMCacheEngineConfig, url: SplitResult) -> dict[str, Any]:
    make = _SCHEMES.get(url.scheme)
    if make is None:
        expected = f"one of {', '.join(f'{scheme}://…' for scheme in _SCHEMES)}"
        raise ConfigError(
            bad_value(
                f"remote_url ({config.source_of('remote_url')})",
                f"{url.scheme}://…",  # the rest may hold a password
                expected,
                "other engines: l2_adapters",
            )
        )
    found = make(url)
    if found.get("path") in ("", "/") or found.get("master") == "":
        raise ConfigError(
            bad_value(
                f"remote_url ({config.source_of('remote_url')})",
                f"{url.scheme}://",
                "a place after the scheme",
            )
        )
    return found


def places(names: Sequence[str] | None, tiers: Sequence[TierSpec], setting: str) -> set[str] | None:
    """The tiers, L1 among them, that ``names`` stand for: tiers' own names, types, or names of 0.5. None: all.

    Raises:
        ConfigError: Nothing here has such a name.
    """
    if names is None:
        return None
    found: set[str] = set()
    for name in names:
        types = _PLACES.get(name, (name,))
        here = {tier.name for tier in tiers if tier.name == name or tier.spec["type"] in types}
        if L1_NAME in types:
            here.add(L1_NAME)
        if not here:
            known = [L1_NAME, *(tier.name for tier in tiers)]
            raise ConfigError(
                bad_value(setting, name, f"one of {', '.join(known)}", "or a name of 0.5 for one of these")
            )
        found |= here
    return found
