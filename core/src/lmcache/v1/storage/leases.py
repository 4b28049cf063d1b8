"""Leases: who may read or write which memory, and until when.

A read lease pins published objects for one request of one engine, with a share per rank that reads them. A
write lease holds memory that nobody else can see. Both carry an id that the *client* chose, so a client that
never saw the reply can still give the lease back, and an id that was given back before its request arrived is
refused.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

_MAX_TOMBSTONES = 4096


@dataclass(slots=True)
class Entry:
    """A published object: ``size`` bytes at ``offset`` of the pool's data area."""

    key: bytes
    offset: int
    size: int
    generation: int
    pins: int = 0
    account: str = ""
    """Whose quota it counts against (:func:`lmcache.v1.keys.account_id`)."""
    depth: int = 0
    """Place of its chunk in the chain that it was stored with."""
    held: bool = False
    """An operator wants it kept: it is not evicted, and cleared only by force."""
    transient: bool = False
    """It came from a tier below for one reader, and goes with its last pin."""
    young_until: float = 0.0
    """``time.monotonic``; before that it goes after those that are older."""
    born: int = 0
    """Bytes that had been published by then."""


@dataclass(slots=True)
class ReadLease:
    """Objects pinned for ``request``; ``shares[rank]`` is what that rank has yet to give back."""

    session: str
    request: str
    shares: dict[int, list[Entry]]


@dataclass(slots=True)
class Reservation:
    """Memory for one object, not yet published. ``key`` is for then; ``depth`` is its chunk's place."""

    key: bytes
    offset: int
    size: int
    generation: int
    depth: int
    written: int = 0
    """Bytes that came in frames."""
    account: str = ""


@dataclass(slots=True)
class WriteLease:
    """Memory that one worker session may write until it commits, aborts or dies.

    ``mapped`` says that the owner writes through its own mapping of the pool. Then only its abort, its commit
    or its death may free the memory: a stopped process may wake up in the middle of a copy.
    """

    session: str
    items: list[Reservation]
    mapped: bool


@dataclass(slots=True)
class Tombstones:
    """Ids of leases that were given back, the newest ``_MAX_TOMBSTONES`` of them."""

    ids: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def add(self, owner: str, lease: int) -> None:
        self.ids[owner, lease] = None
        if len(self.ids) > _MAX_TOMBSTONES:
            self.ids.popitem(last=False)

    def __contains__(self, owner_lease: tuple[str, int]) -> bool:
        return owner_lease in self.ids
