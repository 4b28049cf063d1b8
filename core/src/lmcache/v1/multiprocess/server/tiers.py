"""From the operator's ``--l2-adapter`` to the tiers below L1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.errors import ConfigError
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.registry import Maker, build, parse
from lmcache.v1.storage.tiers import L1_NAME, TierOptions

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.server.config import ServerConfig

__all__ = ["build_adapters", "close_adapters", "parse_adapters", "tier_options"]

_QUEUE_GIB = 0.25
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parse_adapters(texts: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Each adapter's name and options, in the order of the flags, which is that of the tiers.

    A name is the JSON's ``name``, else its type, with a number from the second of a type on.

    Raises:
        ConfigError: for what is no JSON object with a ``type``, or a name that is none or is taken.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    taken = {L1_NAME}
    for text in texts:
        spec = parse(text)
        name = spec.pop("name", None)
        if name is None:
            kind = str(spec["type"])
            same = [n for n in range(1, len(texts) + 1) if _numbered(kind, n) not in taken]
            name = _numbered(kind, same[0])
        elif not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
            raise ConfigError(
                f"--l2-adapter name {name!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . -, and none of"
                f" {', '.join(sorted(taken))}"
            )
        taken.add(name)
        found.append((name, spec))
    return found


def _numbered(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}-{number}"


def build_adapters(texts: Sequence[str], makers: Mapping[str, Maker]) -> list[tuple[str, StorageAdapter]]:
    """The adapters that ``--l2-adapter`` asks for, by name; ``makers`` are those of plugins, by type.

    Raises:
        ConfigError: for a bad option. StartupError: for an engine that cannot be had, or a package that is missing.
        In both cases those made before are closed.
    """
    built: list[tuple[str, StorageAdapter]] = []
    try:
        for name, spec in parse_adapters(texts):
            built.append((name, build(spec, makers)))
    except BaseException:
        close_adapters(built)
        raise
    return built


def tier_options(config: ServerConfig) -> TierOptions:
    """What the flags say of all tiers."""
    queue = config.l2_queue_gb
    if queue is None:  # what waits is pinned: it must not be all there is
        queue = min(_QUEUE_GIB, config.l1_size_gb / 4 / max(1, len(config.l2_adapter)))
    return TierOptions(
        store_policy=config.l2_store_policy,
        prefetch_policy=config.l2_prefetch_policy,
        queue_bytes=max(1, int(queue * (1 << 30))),
        load_seconds=config.l2_load_seconds,
        store_seconds=config.l2_store_seconds,
    )


def close_adapters(adapters: Sequence[tuple[str, StorageAdapter]]) -> None:
    """Let go of adapters that no store has taken over."""
    for _, adapter in adapters:
        adapter.close()
