"""From a server's answer to Query, per namespace, to what people ask: how many tokens of which model?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache.cli.output import table
from lmcache.v1.protocol.messages import Holding, Holdings

if TYPE_CHECKING:
    from lmcache.cli.connect import ToolSession

_SHOWN = 20
"""Characters of a revision in the table; the JSON object has it whole."""

_Label = tuple[str, str, str, int, int, int]


class ModelHolding(msgspec.Struct, kw_only=True):
    """What a server holds of a chain of chunks for one model in one tier.

    A hit needs every rank's and every group's share, so ``tokens`` is the least over all of them.
    """

    model: str
    revision: str
    dtype: str
    groups: int
    tp_size: int
    pp_size: int
    tier: str
    tokens: int
    complete: bool
    """All ranks and groups have registered; until then nothing counts."""
    shares: list[Holding]


def summarise(rows: Iterable[Holding], chunk_size: int) -> list[ModelHolding]:
    """One entry per model and tier, the largest first.

    The answer does not say which namespaces were registered together. Where a model has several in the same
    place (another layout, say), the least over all is a bound from below. A model of one rank and one group
    has an entry for each.
    """
    sets: dict[tuple[_Label, str], list[Holding]] = {}
    for row in rows:
        label = (row.model, row.revision, row.dtype, row.groups, row.tp_size, row.pp_size)
        sets.setdefault((label, row.tier), []).append(row)
    found = []
    for (label, tier), shares in sets.items():
        _, _, _, groups, tp_size, pp_size = label
        alone = groups * tp_size * pp_size == 1
        for part in [[share] for share in shares] if alone else [shares]:
            found.append(_entry(label, tier, part, chunk_size))
    return sorted(found, key=lambda entry: (-entry.tokens, entry.model, entry.tier))


def report(session: ToolSession, tokens: int, chunks: int, found: Holdings) -> tuple[dict[str, Any], str]:
    """What is held of a prompt of ``tokens`` tokens and ``chunks`` complete chunks, as data and as text."""
    size = session.welcome.chunk_size
    models = summarise(found.rows, size)
    data = {
        "address": session.address,
        "epoch": session.welcome.epoch,
        "tokens": tokens,
        "chunk_size": size,
        "complete_chunks": chunks,
        "models": msgspec.to_builtins(models),
    }
    head = f"{session.address}: asked for {tokens} tokens, {chunks} complete chunks of {size}"
    return data, f"{head}\n{_text(models)}"


def _text(models: Sequence[ModelHolding]) -> str:
    if not models:
        return "no engine has registered a model with this server since it started"
    rows = [
        (
            entry.model,
            entry.revision if len(entry.revision) <= _SHOWN else f"{entry.revision[:_SHOWN]}…",
            entry.dtype,
            f"TP {entry.tp_size}, PP {entry.pp_size}, groups {entry.groups}",
            entry.tier,
            entry.tokens,
            "" if entry.complete else "not all ranks have registered",
        )
        for entry in models
    ]
    return table(("model", "revision", "dtype", "parts", "tier", "tokens held", "note"), rows)


def _entry(label: _Label, tier: str, shares: list[Holding], chunk_size: int) -> ModelHolding:
    model, revision, dtype, groups, tp_size, pp_size = label
    places = Counter((share.group, share.tp_rank, share.pp_rank) for share in shares)
    complete = len(places) >= groups * tp_size * pp_size
    tokens = min(share.chunks for share in shares) * chunk_size if complete else 0
    return ModelHolding(
        model=model, revision=revision, dtype=dtype, groups=groups, tp_size=tp_size, pp_size=pp_size,
        tier=tier, tokens=tokens, complete=complete, shares=shares,
    )  # fmt: skip
