"""What a request must be before the service acts on it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.logging import init_logger, warn_once
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.server.attach import stranger
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.sessions import Session
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.leases import Entry

logger = init_logger(__name__)

_MAX_OBJECT_BYTES = 1 << 34
_MAX_ACCOUNT = 64


def check_layouts(namespaces: Sequence[Namespace], chunk_size: int) -> None:
    """Refuse layouts that chunks of this server do not fit."""
    for ns in namespaces:
        if ns.block_size < 1 or ns.chunk_size != chunk_size or ns.chunk_size % ns.block_size:
            raise Refused(
                "chunk_size",
                f"chunk size {chunk_size}: not a multiple of the engine's block size {ns.block_size};"
                " start the server with a --chunk-size that is",
            )
        if not ns.page_bytes or min(ns.page_bytes) < 1 or ns.object_bytes > _MAX_OBJECT_BYTES:
            raise Refused(
                "bad_request",
                f"pages of {ns.page_bytes} bytes: expected positive sizes below {_MAX_OBJECT_BYTES}",
            )


def warn_of_room(engine: str, ranks: int, namespaces: Sequence[Namespace], capacity: int) -> None:
    """Say, once per engine, that L1 is smaller than one of its chunks: it would run uncached in silence."""
    size = ranks * sum(ns.object_bytes for ns in namespaces)
    if size > capacity:
        warn_once(
            logger,
            f"room:{engine}",
            "engine %s: a chunk takes %.1f MiB over all ranks, L1 has %.1f: not one fits, so nothing is cached;"
            " expected an L1 of many chunks",
            engine,
            size / (1 << 20),
            capacity / (1 << 20),
        )


def check_mode(msg: m.Register, modes: Sequence[str]) -> None:
    """Refuse a mode that is not served, and exported memory that does not go with the layouts."""
    mode = "engine_driven" if msg.device is None else "lmcache_driven"
    if mode not in modes:
        raise Refused(
            "mode",
            f"transfer mode {mode}: this server serves {', '.join(modes)} only;"
            " start it with --supported-transfer-mode auto",
        )
    if msg.device is not None:
        exported = [len(group) for group in msg.device.groups]
        layers = [len(ns.page_bytes) for ns in msg.namespaces]
        if exported != layers:
            raise Refused(
                "bad_request", f"exported layers per KV group {exported}: the layouts have {layers}"
            )


def check_peer(session: Session) -> None:
    """Refuse device memory of a process that the kernel has not named, or that may not ask us to open memory.

    Anybody who reaches the request port can write a descriptor of what this server's user may open.
    """
    if session.peer is None:
        raise Refused(
            "not_attached",
            "exported device memory, but is not connected to the server's Unix socket; attach first",
        )
    why = stranger(session.peer, "export memory to")
    if why is not None:
        raise Refused("bad_request", why)


def digests(joined: bytes) -> list[bytes]:
    """Chunk digests as a list; refuse what are none."""
    try:
        return m.split_hashes(joined)
    except ValueError as exc:
        raise Refused("bad_request", str(exc)) from None


def check_account(account: str) -> None:
    """Refuse what is no name of an account: it reaches people's terminals."""
    if len(account) > _MAX_ACCOUNT or not account.isprintable():
        raise Refused(
            "bad_request", f"account {account[:40]!r}: expected up to {_MAX_ACCOUNT} printable characters"
        )


def check_share(namespaces: Sequence[tuple[bytes, Namespace]], share: Sequence[Entry]) -> int:
    """How many chunks a rank's share of a read lease is; refuse one that was looked up for other layouts."""
    chunks = len(share) // len(namespaces)
    want = [ns.object_bytes for _, ns in namespaces for _ in range(chunks)]
    if [entry.size for entry in share] != want:
        raise Refused("bad_request", "the lease is for other layouts than are registered now; look up again")
    return chunks


def check_blocks(
    namespaces: Sequence[tuple[bytes, Namespace]], chunks: Sequence[int], blocks: Sequence[Sequence[int]]
) -> None:
    """Refuse block ids that are not those of ``chunks[group]`` whole chunks."""
    want = [n * ns.blocks_per_chunk for n, (_, ns) in zip(chunks, namespaces, strict=True)]
    if [len(ids) for ids in blocks] != want:
        raise Refused(
            "bad_request", f"block ids {[len(ids) for ids in blocks]}: expected {want} per KV group"
        )


def joined_keys(joined: bytes) -> list[bytes]:
    """Keys that a peer sent; refuse what are none."""
    try:
        return p.split_keys(joined)
    except ValueError as exc:
        raise Refused("bad_request", str(exc)) from None


def check_push(msg: p.PushReserve) -> None:
    """Refuse keys, sizes, waits and accounts that make no sense."""
    keys = joined_keys(msg.keys)
    if len(keys) != len(msg.sizes):
        raise Refused("bad_request", f"{len(msg.sizes)} sizes: expected one for each of {len(keys)} keys")
    if not 1 <= min(msg.sizes) <= max(msg.sizes) <= _MAX_OBJECT_BYTES:
        raise Refused(
            "bad_request",
            f"objects of {min(msg.sizes)} to {max(msg.sizes)} bytes: expected 1 to {_MAX_OBJECT_BYTES}",
        )
    if len(msg.layouts) > p.MAX_LAYOUTS:
        raise Refused("bad_request", f"{len(msg.layouts)} layouts: expected up to {p.MAX_LAYOUTS}")
    if not 0 <= msg.wait <= p.MAX_WAIT:
        raise Refused("bad_request", f"wait of {msg.wait} s: expected 0 to {p.MAX_WAIT:g}")
    if len(msg.account) > _MAX_ACCOUNT or not msg.account.isprintable():
        raise Refused(
            "bad_request", f"account {msg.account[:40]!r}: expected up to {_MAX_ACCOUNT} printable characters"
        )
