"""One request, cut into chunks; and its columns and masks, as connectors and callers want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache.errors import ConfigError
from lmcache.v1.cache_engine.chunks import Held
from lmcache.v1.cache_engine.token_database import Chunk, Request, TokenDatabase, false_prefix, token_list
from lmcache.v1.keys import account_id

__all__ = ["Plan", "columns", "mask_of", "padded", "plan_of"]


class Plan(NamedTuple):
    """``chain`` is the whole request, of ``total`` tokens; the first ``skipped`` chunks are left out by its mask."""

    tokens: Sequence[int] | None
    total: int
    chain: list[Chunk]
    skipped: int
    request: Request

    @property
    def wanted(self) -> list[Chunk]:
        return self.chain[self.skipped :]

    @property
    def account(self) -> str:
        return account_id(self.request.scope.salt)


def plan_of(database: TokenDatabase, tokens: Any, hashes: Any, offsets: Any, mask: Any, configs: Any) -> Plan:
    """
    Raises:
        ConfigError: Neither tokens nor hashes with offsets, or one of them makes no sense.
        ValueError: The mask is none.
    """
    request = database.request(configs)
    if tokens is None:
        if hashes is None or offsets is None:
            raise ConfigError("tokens=None: expected tokens, or hashes and offsets together")
        chain = database.given(hashes, offsets)
        return Plan(None, chain[-1].end if chain else 0, chain, 0, request)
    ids = token_list(tokens)
    left_out = false_prefix(mask, len(ids), database.chunk_size)
    chain = database.chunks(ids, request)
    skipped = sum(chunk.start < left_out for chunk in chain)
    return Plan(ids, len(ids), chain, skipped, request)


def padded(chunks: Sequence[Chunk], slot_mapping: Any) -> set[int]:
    """Which of these have a token without a slot: nothing would be written there, and whatever the memory held before
    would be published.

    Args:
        slot_mapping: What the connector takes; a negative slot is none. None: nothing is said of slots.
    """
    if slot_mapping is None:
        return set()
    import torch

    several = isinstance(slot_mapping, (list, tuple)) and any(map(torch.is_tensor, slot_mapping))
    found: set[int] = set()
    for mapping in slot_mapping if several else [slot_mapping]:
        negative = torch.as_tensor(mapping) < 0
        if bool(negative.any()):
            found |= {i for i, chunk in enumerate(chunks) if bool(negative[chunk.start : chunk.end].any())}
    return found


def columns(held: Sequence[Held]) -> tuple[list[Any], list[int], list[int]]:
    """What connectors take: objects, where their tokens start, where they end."""
    objs = [obj for _, objs in held for obj in objs]
    return objs, [chunk.start for chunk, _ in held], [chunk.end for chunk, _ in held]


def mask_of(plan: Plan, held: Sequence[Held]) -> Any:
    """A tensor of bool on the host, true for the tokens of ``held``."""
    import torch

    flags = bytearray(plan.total)
    if held:
        start, end = held[0].chunk.start, held[-1].chunk.end
        flags[start:end] = b"\1" * (end - start)
    # Torch's own fill wakes its pool of threads, which costs more than all else here.
    return torch.frombuffer(flags, dtype=torch.bool) if flags else torch.zeros(0, dtype=torch.bool)
