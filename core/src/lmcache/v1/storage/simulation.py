"""How many blocks of recorded requests a cache would have held: of a policy, and of the best there could be.

A trace is a list of requests, a request the list of the keys of its blocks from the front of its prompt on.
``docs/eviction.md`` says what is counted as what.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from itertools import chain

from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.shm_pool import PAGE, PoolView, table_bytes

__all__ = ["hits_by_access", "hits_through_l1", "most_hits"]

Trace = Sequence[Sequence[bytes]]


def hits_by_access(policy: EvictionPolicy, trace: Trace, blocks: int) -> int:
    """Blocks of ``trace`` that a cache of ``blocks`` blocks holds when their turn comes.

    One block after the other. What is not held comes in at once and, when the cache is full, in the place of
    the first victim; it stays out if the policy names none.
    """
    held: set[bytes] = set()
    hits = 0
    for key in chain.from_iterable(trace):
        if key in held:
            hits += 1
            policy.touch([key])
            continue
        if len(held) >= blocks:
            victim = next(iter(policy.victims()), None)
            if victim is None:
                continue
            held.remove(victim)
            policy.remove(victim)
        held.add(key)
        policy.add(key, 1)
    return hits


def hits_through_l1(policy: EvictionPolicy, trace: Trace, blocks: int) -> int:
    """Blocks of ``trace`` that the server's own L1, with its default watermarks, loads.

    Per request: look up the longest prefix, pin it, store the rest, release, end. Only the prefix counts.
    """
    l1 = L1Cache(_sparse_pool(blocks), policy=policy)
    hits = 0
    for lease, request in enumerate(trace):
        found = l1.prefix_length([(key,) for key in request])
        hits += found
        l1.pin("engine", lease, "session", "request", {0: [request[:found]]})
        (slots,) = l1.reserve("session", lease, [[(key, PAGE) for key in request[found:]]], True)
        l1.commit("session", lease, range(sum(offset >= 0 for offset, _ in slots)))
        l1.release("engine", lease)
        l1.touch([request], used=False)
    return hits


def most_hits(trace: Trace, blocks: int) -> int:
    """Blocks of ``trace`` that the best cache of ``blocks`` blocks holds, which knows the future.

    Of what is held and what just came, that goes whose next use is farthest away: Belady, "A study of
    replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (1966). What just came may be
    what goes, so no cache can do better, whether it takes in everything or not.
    """
    accesses = list(chain.from_iterable(trace))
    next_use = _next_uses(accesses)
    held: dict[bytes, int] = {}
    farthest: list[tuple[int, bytes]] = []  # a heap; entries that ``held`` does not confirm are out of date
    hits = 0
    for i, key in enumerate(accesses):
        again = next_use[i]
        hits += key in held
        if again == len(accesses):
            held.pop(key, None)
            continue
        held[key] = again
        heapq.heappush(farthest, (-again, key))
        if len(held) > blocks:
            while True:
                use, goes = heapq.heappop(farthest)
                if held.get(goes) == -use:
                    break
            del held[goes]
    return hits


def _next_uses(accesses: Sequence[bytes]) -> list[int]:
    """Where each access's key is used next; the number of accesses if it is not."""
    never = len(accesses)
    uses = [never] * never
    seen: dict[bytes, int] = {}
    for i in range(never - 1, -1, -1):
        uses[i] = seen.get(accesses[i], never)
        seen[accesses[i]] = i
    return uses


def _sparse_pool(pages: int) -> PoolView:
    """A pool in which nobody writes, so that of its pages none becomes memory."""
    fd = os.memfd_create("lmcache-simulation", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, table_bytes(pages * PAGE) + pages * PAGE)
        return PoolView(fd, pages * PAGE)
    finally:
        os.close(fd)
