"""What the server tells of itself: to tools, to the HTTP port, to plugins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.keys import Namespace, object_key
from lmcache.v1.multiprocess.server.sessions import Session
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.tiers import TieredStore


def holdings(store: TieredStore, known: Mapping[bytes, Namespace], chain: Sequence[bytes]) -> list[m.Holding]:
    """How much of a chain of chunks is stored, per namespace and tier. A shared tier, which would have to be asked,
    has no row."""
    rows = []
    for digest, ns in known.items():
        keys = [object_key(digest, chunk) for chunk in chain]
        held = {"L1": store.l1.prefix_length([key] for key in keys)}
        for tier in store.names:
            answers = [store.known(tier, key) for key in keys]
            if None not in answers:
                held[tier] = (*answers, False).index(False)
        rows += [
            m.Holding(
                model=ns.model, revision=ns.revision, dtype=ns.dtype, group=ns.group, groups=ns.groups,
                tp_rank=ns.tp_rank, tp_size=ns.tp_size, pp_rank=ns.pp_rank, pp_size=ns.pp_size,
                chunks=chunks, tier=tier,
            )
            for tier, chunks in held.items()
        ]  # fmt: skip
    return rows


def accounts_state(l1: L1Cache) -> list[dict[str, object]]:
    """What each account uses of L1, and its limit."""
    return [
        {
            "account": name,
            "used_bytes": use.used_bytes,
            "objects": use.objects,
            "limit_bytes": use.quota_bytes,
        }
        for name, use in l1.usage_by_account().items()
    ]


def l1_state(l1: L1Cache, policy: str) -> dict[str, object]:
    """L1's usage and running totals."""
    counters = l1.counters
    return {
        **l1.usage(),
        "policy": policy,
        "stored": counters.stored,
        "evicted": counters.evicted,
        "duplicates": counters.duplicates,
        "aborted": counters.aborted,
        "dropped_full": counters.dropped_full,
    }


def session_state(session: Session, path: str) -> dict[str, object]:
    """One session; ``path`` is how its payload travels."""
    return {**public(session), "path": path, "silent_seconds": round(time.monotonic() - session.seen, 3)}


def public(session: Session) -> dict[str, Any]:
    """A session without its id, which is a secret between the client and the server."""
    return {name: getattr(session, name) for name in ("role", "engine", "rank", "client")}
