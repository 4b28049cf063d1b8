"""Messages between servers (protocol 2): one pushes objects into the other's L1, or pulls them from there.

Objects go by their full keys of :data:`KEY_BYTES`, joined: a peer knows nothing of layouts. A push is reserve, write,
commit; the commit names the xxh3_64 of each payload, and nothing is published whose bytes differ. Integers and bytes
only: what NIXL calls a serialised descriptor list is a pickle, and never on the wire.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.protocol.base import Message

KEY_BYTES = 2 * DIGEST_BYTES
MAX_KEYS = 4096
"""Objects that one message may name."""
MAX_WAIT = 60.0
"""Seconds that a reservation may wait for room."""
MAX_LAYOUTS = 64
"""That one reservation may tell of."""


class PeerOpen(Message, tag="peer_open"):
    """This session pushes or pulls. ``nixl``: the client could write to the server's memory by NIXL; may it?"""

    session: str
    nixl: bool = False


class PushReserve(Message, tag="push_reserve"):
    """Room for objects of ``sizes`` bytes. Answered by Reserved with one column, in the order of the keys.

    If there is no room for all, the answer waits for it up to ``wait`` seconds; then it gives what there is.
    ``direct``: the client writes to the memory itself (NIXL), so that the server cannot stop it.
    ``layouts``: of the objects, those that the session has not told of yet. For people; what must agree is in the keys.
    """

    session: str
    lease: int
    keys: bytes
    sizes: list[int]
    account: str = ""
    wait: float = 0.0
    direct: bool = False
    layouts: list[Namespace] = []


class PushWrite(Message, tag="push_write"):
    """The payload frame goes to ``offset`` within the ``index``-th object that was given room."""

    session: str
    lease: int
    index: int
    offset: int = 0


class PushCommit(Message, tag="push_commit"):
    """Verify and publish the objects at ``indexes`` of those that were given room; the lease ends.

    ``checksums`` are the xxh3_64 of their payloads. Nothing is written under the lease after this message.
    """

    session: str
    lease: int
    indexes: list[int]
    checksums: list[int]


class PushAbort(Message, tag="push_abort"):
    """Give leases back unpublished; unknown ids are refused from then on. No reply is needed.

    ``over``: nothing that the client wrote directly can still be on its way.
    """

    session: str
    leases: list[int]
    over: bool = True


class PeerFind(Message, tag="peer_find"):
    """Which of these objects does L1 hold? Pins and touches nothing."""

    session: str
    keys: bytes


class PullOpen(Message, tag="pull_open"):
    """Pin what L1 holds of these objects for at most ``seconds``."""

    session: str
    lease: int
    keys: bytes
    seconds: float


class PullRead(Message, tag="pull_read"):
    """``length`` bytes from ``offset`` of the object at ``index`` of the keys of the pull."""

    session: str
    lease: int
    index: int
    offset: int
    length: int


class PullClose(Message, tag="pull_close"):
    """Unpin. No reply is needed."""

    session: str
    leases: list[int]


PeerRequest: TypeAlias = (
    PeerOpen | PushReserve | PushWrite | PushCommit | PushAbort | PeerFind | PullOpen | PullRead | PullClose
)


class Region(msgspec.Struct, kw_only=True):
    """A server's L1 as NIXL registered it: the data area, and the agent to load (its ``get_agent_metadata``)."""

    agent: bytes
    base: int
    length: int
    device: int = 0


class PeerReady(Message, tag="peer_ready"):
    """Answer to PeerOpen. Without ``region`` payload travels in frames; ``why`` says why it is not there."""

    epoch: str
    region: Region | None = None
    why: str = ""


class Pushed(Message, tag="pushed"):
    """Answer to PushCommit, per index: 1 published, 2 stored already, 0 dropped because its bytes differ."""

    results: list[int]


class PeerFound(Message, tag="peer_found"):
    """Answer to PeerFind, per key."""

    held: list[bool]


class Pulled(Message, tag="pulled"):
    """Answer to PullOpen, per key: size and xxh3_64 of its payload; size -1: not there."""

    sizes: list[int]
    checksums: list[int]


PeerReply: TypeAlias = PeerReady | Pushed | PeerFound | Pulled


def split_keys(joined: bytes) -> list[bytes]:
    """Joined keys as a list.

    Raises:
        ValueError: if they are none, too many, not whole or not distinct.
    """
    count, rest = divmod(len(joined), KEY_BYTES)
    if rest or not 1 <= count <= MAX_KEYS:
        raise ValueError(f"keys of {len(joined)} bytes: expected 1 to {MAX_KEYS} of {KEY_BYTES} each")
    keys = [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
    if len(set(keys)) != count:
        raise ValueError(f"{count} keys: expected distinct ones")
    return keys
