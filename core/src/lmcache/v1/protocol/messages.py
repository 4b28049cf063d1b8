"""The wire protocol: msgpack maps, one struct per message, a tag field ``op``.

Frames of a request: [id: 8 bytes, little-endian, 0 = no reply wanted] [message] [payload]*; of a reply: the
same, with the request's id. Unknown fields are ignored, so a field may be added within a protocol version; a
new message or a changed meaning raises :data:`PROTOCOL`. Every request with an id gets its reply or an
:class:`Error`. Nothing on the wire is executable: no pickle, no names to import.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.protocol.base import Message as Message
from lmcache.v1.protocol.peer import PeerReply, PeerRequest

PROTOCOL = 2
PROTOCOL_MIN = 1
MAX_FRAME_BYTES = 64 << 20
PIECE_BYTES = 8 << 20
"""Payload of objects travels in pieces of at most this size."""

Role: TypeAlias = Literal["scheduler", "worker", "tool"]


class Hello(Message, tag="hello"):
    """Open a session. ``engine`` joins an engine's scheduler and workers, which are ``ranks`` in number."""

    protocol_min: int
    protocol_max: int
    role: Role
    engine: str = ""
    rank: int = 0
    ranks: int = 1
    client: str = ""


class Bye(Message, tag="bye"):
    """Close a session; everything it owns is given back."""

    session: str


class Ping(Message, tag="ping"):
    """Keep a session alive, and learn whether the server still knows it."""

    session: str = ""


class DeviceExport(msgspec.Struct, kw_only=True):
    """A worker's KV memory, for a server that moves it itself (lmcache-driven mode).

    ``groups[g]`` are the wire descriptors of group ``g``'s page tensors, in layer order. Each is a tensor of bytes,
    ``[num_blocks, 1, page_bytes]``: what is in a page is the engine's own business.
    """

    groups: list[list[bytes]]


class Register(Message, tag="register"):
    """A worker names the layouts of its KV groups, in group order. Lookups hit only once all ranks did."""

    session: str
    namespaces: list[Namespace]
    mapped: bool
    """True if this worker copies through its own mapping of the pool."""
    device: DeviceExport | None = None
    """Given in lmcache-driven mode. The answer then waits until the server has mapped the memory."""


class Lookup(Message, tag="lookup"):
    """How many chunks from ``start`` on are stored for every rank and group? They are pinned under ``lease``.

    ``hashes`` are the 32-byte chunk digests, joined, from chunk ``known`` on; the first ``known`` were sent
    before for the same request in this session.

    Where tiers below L1 may hold more than L1 does, ``wait`` says what to do. Negative, as from a client of protocol
    1: answer at once with what L1 holds. From 0 on: fetch the rest, and answer when that is done, or after ``wait``
    seconds with ``pending``; then ask again under the same lease id, with whatever ``wait``.
    """

    session: str
    request: str
    lease: int
    hashes: bytes
    known: int = 0
    start: int = 0
    wait: float = -1.0
    account: str = ""
    """Whose quota what is fetched counts against (:func:`lmcache.v1.keys.account_id`)."""


class Reserve(Message, tag="reserve"):
    """Room for new objects: joined chunk digests per KV group, in group order."""

    session: str
    lease: int
    hashes: list[bytes]
    account: str = ""


class Write(Message, tag="write"):
    """In-frame store: the payload frame goes to ``offset`` within reservation ``index``."""

    session: str
    lease: int
    index: int
    offset: int = 0


class Commit(Message, tag="commit"):
    """Publish the reservations at ``indexes``; the lease's others are freed.

    Answered at once, but where a tier is to be written in step with L1: then once it holds them or gave up, after
    ``wait`` seconds at most.
    """

    session: str
    lease: int
    indexes: list[int]
    wait: float = 1.0


class DeviceStore(Message, tag="device_store"):
    """lmcache-driven store: chunk digests (joined) and their block ids, per KV group.

    The server reads the pages once ``event`` (exported by the worker) has passed, and answers :class:`Moved`
    when that is queued. Nothing is published before the worker's Commit, by which it says that it keeps the
    pages as they are until the answered event has passed, and before the device has done the copy.
    """

    session: str
    lease: int
    hashes: list[bytes]
    blocks: list[list[int]]
    event: bytes
    account: str = ""


class DeviceLoad(Message, tag="device_load"):
    """lmcache-driven load of this rank's share of a read lease into ``blocks``, after ``event`` has passed.

    The first ``skip[group]`` blocks of a group are not written. Answered when the device has done the copy.
    """

    session: str
    lease: int
    blocks: list[list[int]]
    skip: list[int]
    event: bytes


class DeviceFence(Message, tag="device_fence"):
    """Give this rank's share of a read lease back for good. Answered once no copy for the session is under way:
    from then on the server does not write to the worker's memory for it."""

    session: str
    lease: int


class Abort(Message, tag="abort"):
    """Give write leases back unpublished. No reply is needed; unknown ids are refused from then on."""

    session: str
    leases: list[int]


class Read(Message, tag="read"):
    """In-frame load: ``length`` bytes from ``offset`` of the ``index``-th object of this rank's share."""

    session: str
    lease: int
    index: int
    offset: int
    length: int


class Release(Message, tag="release"):
    """Give read leases back: this worker's share, or from the scheduler all shares. No reply is needed."""

    session: str
    leases: list[int]


class EndRequest(Message, tag="end_request"):
    """The engine is done with these requests: drop their read leases and hashes. No reply is needed."""

    session: str
    requests: list[str]


class Query(Message, tag="query"):
    """How much of a chain of chunks is stored, per namespace? Pins and touches nothing."""

    hashes: bytes


class Status(Message, tag="status"):
    """The server's state as a map."""


class Clear(Message, tag="clear"):
    """Drop every object that is not pinned, from L1 and every tier.

    ``tiers`` (protocol 2): from these only, ``l1`` or a tier's name. ``account``: only what counts against it.
    ``force``: also what an operator holds; never what is being read.
    """

    tiers: list[str] | None = None
    account: str | None = None
    force: bool = False


class ListObjects(Message, tag="list_objects"):
    """Objects in L1 by ascending key, ``limit`` of them, from the one after key ``after`` on. Protocol 2.

    ``account``: only what counts against it. ``tier``: those of a tier that belongs to the server alone, whose sizes
    include the header; with ``account`` refused where its engine does not know whose each object is.
    """

    tier: str = "l1"
    after: bytes = b""
    limit: int = 100
    account: str | None = None


class Hold(Message, tag="hold"):
    """Keep what L1 holds of a chain of chunks, for every known namespace, from being evicted. Protocol 2.

    ``on`` false: let go of it. Holds belong to the running server.
    """

    hashes: bytes
    on: bool = True


class Warm(Message, tag="warm"):
    """Fetch a chain of chunks from the tiers into L1, for every known namespace. Protocol 2.

    Answered like Query, once that is done or ``wait`` seconds are over.
    """

    hashes: bytes
    account: str = ""
    wait: float = 1.0


class SetQuota(Message, tag="set_quota"):
    """Limit the bytes that count against ``account`` in L1, or in a tier of the server's own; None: no limit any
    more. Protocol 2."""

    account: str
    limit_bytes: int | None
    tier: str = "l1"


class Quotas(Message, tag="quotas"):
    """What each account uses, and its limits. Protocol 2."""


Request: TypeAlias = (
    Hello
    | Bye
    | Ping
    | Register
    | Lookup
    | Reserve
    | Write
    | Commit
    | DeviceStore
    | DeviceLoad
    | DeviceFence
    | Abort
    | Read
    | Release
    | EndRequest
    | Query
    | Status
    | Clear
    | ListObjects
    | Hold
    | Warm
    | SetQuota
    | Quotas
    | PeerRequest
)


class Attach(msgspec.Struct, kw_only=True):
    """Where a client on the same host asks for the pool's descriptor."""

    socket: str
    """Unix socket; a leading ``@`` stands for the abstract namespace."""
    host: str
    """Boot id of the server's host: a client elsewhere need not try."""
    data_bytes: int


class Welcome(Message, tag="welcome"):
    """Answer to Hello. ``epoch`` is new at each start of the server; ``session`` is this client's secret."""

    protocol: int
    epoch: str
    session: str
    chunk_size: int
    version: str
    attach: Attach | None = None
    modes: tuple[str, ...] = ("engine_driven",)
    """Transfer modes that this server serves."""


class Pong(Message, tag="pong"):
    """Answer to Ping. ``known`` is false when the session has to be opened again."""

    epoch: str
    known: bool
    chunk_size: int
    version: str
    modes: tuple[str, ...] = ("engine_driven",)


class Ok(Message, tag="ok"):
    """Done; ``count`` says how many where that means something, ``counts`` by tier; -1: not known."""

    count: int = 0
    counts: dict[str, int] = {}


class Found(Message, tag="found"):
    """Answer to Lookup: ``chunks`` are stored from the start asked for.

    ``slots[rank][group]`` is flat: offset and generation of each chunk's object in the pool.
    """

    epoch: str
    chunks: int
    slots: list[list[list[int]]] = []
    pending: bool = False
    """More is being fetched: nothing is pinned yet, ask again under the same lease id."""


class Reserved(Message, tag="reserved"):
    """Answer to Reserve: flat offset and generation per object; offset -1: stored already, -2: no room."""

    epoch: str
    slots: list[list[int]]


class Moved(Message, tag="moved"):
    """Answer to DeviceStore and DeviceLoad: ``count`` objects move, and are where they belong once ``event``
    (exported by the server) has passed."""

    count: int
    event: bytes = b""


class Holding(msgspec.Struct, kw_only=True):
    """One namespace's answer to Query."""

    model: str
    revision: str
    dtype: str
    group: int
    groups: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    chunks: int
    tier: str


class Holdings(Message, tag="holdings"):
    """Answer to Query."""

    chunk_size: int
    rows: list[Holding]


class Stored(msgspec.Struct, kw_only=True):
    """One object. ``model`` is empty if its namespace is not known, ``account`` None where it is not known."""

    key: bytes
    size: int
    model: str
    account: str | None
    pins: int
    held: bool


class Listing(Message, tag="listing"):
    """Answer to ListObjects. ``more``: there are others after the last one."""

    objects: list[Stored]
    more: bool


class Account(msgspec.Struct, kw_only=True):
    """One account's use of L1 or of a tier. ``limit_bytes`` None: no limit."""

    account: str
    used_bytes: int
    objects: int
    limit_bytes: int | None
    tier: str = "l1"


class Accounts(Message, tag="accounts"):
    """Answer to Quotas: a row for every account that uses L1, or has a limit there; then likewise of every tier that
    knows."""

    rows: list[Account]


class State(Message, tag="state"):
    """Answer to Status."""

    fields: dict[str, object]


class Error(Message, tag="error"):
    """The request failed. ``code`` is for programs, ``message`` is one line for people."""

    code: str
    message: str


Reply: TypeAlias = (
    Welcome | Pong | Ok | Found | Reserved | Moved | Holdings | Listing | Accounts | State | Error | PeerReply
)

request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode


def split_hashes(joined: bytes) -> list[bytes]:
    """Joined digests as a list.

    Raises:
        ValueError: if the length is not a multiple of a digest's.
    """
    if len(joined) % DIGEST_BYTES:
        raise ValueError(f"chunk digests of {len(joined)} bytes: expected a multiple of {DIGEST_BYTES}")
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]
