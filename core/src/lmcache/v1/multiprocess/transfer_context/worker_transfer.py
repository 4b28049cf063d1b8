"""Engine-driven transfer: the worker copies pages itself, into and out of the server's pool.

Where the pool can be mapped, a store is reserve, copy, commit (two round trips) and a load is copy, release
(none that is waited for). Where it cannot, the same messages carry the payload in frames. Which of the two is
decided once per session and shows in the server's status.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import ChunkCopy, KVGroupPages, Span, copy_pages
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)


@dataclass(slots=True)
class StoreItem:
    """Chunks to store. ``blocks[group]`` are the engine's block ids for all of them, in order."""

    chunk_size: int
    hashes: list[bytes]
    blocks: list[list[int]]


@dataclass(slots=True)
class LoadItem:
    """Chunks to load under a read lease. ``slots[group]`` is flat (offset, generation) as the lookup gave it.

    ``blocks[group]`` are the block ids of all chunks in order, of which the first ``skip_blocks[group]`` are
    not written (the engine holds them already).
    """

    request: str
    lease: int
    epoch: str
    slots: list[list[int]]
    blocks: list[list[int]]
    skip_blocks: list[int]


@dataclass(slots=True)
class TransferCounters:
    """What this worker has moved since it started."""

    stored_chunks: int = 0
    stored_bytes: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    failed_loads: int = 0
    dropped_stores: int = 0


class Binding(NamedTuple):
    """What a session moves bytes with. Replaced as a whole, so that no transfer mixes two servers."""

    session: str
    epoch: str
    groups: list[KVGroupPages]
    pool: PoolView | None


class EngineDrivenTransferContext:
    """Stores and loads pages of one worker.

    Args:
        address, engine, rank, ranks, options: see :class:`CacheClient`.
        groups: the worker's KV groups, in the engine's order. The chunk size in their namespaces is the
            server's to say; it is filled in whenever a session opens.
        stores: False for a rank whose KV another rank stores (replicated KV, as with latent attention under
            tensor parallelism).

    An engine whose pages do not stay in one place gives their place with each transfer (``pages``): groups
    made of those in ``self.groups``, equal in all but addresses, strides, tensors and number of blocks.
    """

    mode = MPTransferMode.ENGINE_DRIVEN

    def __init__(
        self,
        address: str,
        engine: str,
        groups: Sequence[KVGroupPages],
        rank: int = 0,
        ranks: int = 1,
        options: ClientOptions | None = None,
        stores: bool = True,
    ) -> None:
        self._bound = Binding("", "", list(groups), None)
        self.counters = TransferCounters()
        self._stores = stores
        self.client = CacheClient(
            address, "worker", engine, rank, ranks, options, on_open=self._register, on_lost=self._let_go
        )

    def start(self, wait: float = 0.0) -> bool:
        """Open the session in the background; wait at most ``wait`` seconds for it."""
        return self.client.start(wait)

    def close(self) -> None:
        """Close the session and let go of the pool. The engine's tensors may go away afterwards."""
        self.client.close()
        self._let_go()

    @property
    def groups(self) -> list[KVGroupPages]:
        """The KV groups, with the chunk size of the server that was seen last."""
        return self._bound.groups

    @property
    def path(self) -> str:
        """ "shared_memory", "frames", or "down" while there is no session."""
        if not self.client.up:
            return "down"
        return "shared_memory" if self._bound.pool is not None else "frames"

    # ---- store

    def store(self, items: Sequence[StoreItem], pages: Sequence[KVGroupPages] | None = None) -> int:
        """Store chunks; those that the server holds already, or has no room for, are passed over.

        Returns:
            Number of objects (chunk x group) published. Never raises for what the server or the network does.
        """
        if not self._stores or not items or not self.client.up:
            return 0
        bound = self._bound
        wanted = _wanted(bound.groups, items)
        if not any(wanted):
            return 0
        lease = self.client.new_lease()
        try:
            return self._store(bound, _placed(bound.groups, pages), wanted, lease)
        except (LMCacheError, ValueError) as exc:
            self.counters.dropped_stores += sum(len(w) for w in wanted)
            warn_once(logger, f"store:{type(exc).__name__}", "store dropped: %s", exc)
            self.client.post(m.Abort(session=bound.session, leases=[lease]))
            return 0

    def _store(
        self, bound: Binding, groups: Sequence[KVGroupPages], wanted: list[dict[bytes, list[int]]], lease: int
    ) -> int:
        session, pool = bound.session, bound.pool
        request = m.Reserve(session=session, lease=lease, hashes=[b"".join(w) for w in wanted])
        reply = expect(m.Reserved, self.client.call(request)[0])
        if [len(slots) for slots in reply.slots] != [2 * len(w) for w in wanted]:
            want = [len(w) for w in wanted]
            raise LMCacheError(f"reserve: expected slots of {want} chunks, the server answers {reply.slots}")
        index = nbytes = 0
        for group, chunks, slots in zip(groups, wanted, reply.slots, strict=True):
            offsets = slots[::2]
            granted = [
                (offset, group.spans(blocks))
                for offset, blocks in zip(offsets, chunks.values(), strict=True)
                if offset >= 0
            ]
            if pool is None:
                self._write_frames(session, group, lease, index, [spans for _, spans in granted])
            else:
                copies = [ChunkCopy(*_at(pool, offset, group), spans) for offset, spans in granted]
                copy_pages(group, "store", copies)
            index += len(granted)
            nbytes += len(granted) * group.namespace.object_bytes
        if not index:
            self.client.post(m.Abort(session=session, leases=[lease]))
            return 0
        commit = m.Commit(session=session, lease=lease, indexes=list(range(index)))
        done = expect(m.Ok, self.client.call(commit)[0])
        self.counters.stored_chunks += done.count
        self.counters.stored_bytes += nbytes
        return done.count

    def _write_frames(
        self, session: str, group: KVGroupPages, lease: int, first: int, chunks: list[list[Span]]
    ) -> None:
        address, view = _buffer(group.namespace.object_bytes)

        def pieces() -> Iterator[tuple[m.Write, int, list[memoryview]]]:
            for index, spans in enumerate(chunks, first):
                copy_pages(group, "store", [ChunkCopy(address, view, spans)])
                for offset in range(0, len(view), m.PIECE_BYTES):
                    piece = view[offset : offset + m.PIECE_BYTES]  # copied by the transport as it is sent
                    message = m.Write(session=session, lease=lease, index=index, offset=offset)
                    yield message, len(piece), [piece]

        for reply, _ in self.client.pipeline(pieces()):
            expect(m.Ok, reply)

    # ---- load

    def load(self, items: Sequence[LoadItem], pages: Sequence[KVGroupPages] | None = None) -> list[LoadItem]:
        """Fill the engine's pages from the cache and release the leases.

        Returns:
            The items that failed; of such an item no page may be trusted. Never raises.
        """
        failed = []
        bound = self._bound
        for item in items:
            try:
                self._load(bound, _placed(bound.groups, pages), item)
            except (LMCacheError, ValueError) as exc:
                logger.warning(
                    "request %s: load failed, its tokens are to be recomputed: %s", item.request, exc
                )
                self.counters.failed_loads += 1
                failed.append(item)
            self.client.post(m.Release(session=bound.session, leases=[item.lease]))
        return failed

    def _load(self, bound: Binding, groups: Sequence[KVGroupPages], item: LoadItem) -> None:
        pool = bound.pool
        if bound.epoch != item.epoch:
            raise LMCacheError("the server was restarted since the lookup")
        first = 0
        for group, blocks, slots, skip in zip(groups, item.blocks, item.slots, item.skip_blocks, strict=True):
            per_chunk = group.namespace.blocks_per_chunk
            if len(blocks) * 2 != len(slots) * per_chunk:
                raise LMCacheError(
                    f"{len(slots) // 2} chunks of {per_chunk} blocks for {len(blocks)} blocks of the engine"
                )
            wanted: list[tuple[int, list[Span]]] = []
            for i in range(len(slots) // 2):
                skipped = min(per_chunk, max(0, skip - i * per_chunk))
                spans = group.spans(blocks[i * per_chunk : (i + 1) * per_chunk], skipped)
                if spans:
                    wanted.append((i, spans))
            if pool is None:
                chunks = [(first + i, spans) for i, spans in wanted]
                self._read_frames(bound.session, group, item.lease, chunks)
            else:
                _copy_checked(pool, group, [(slots[2 * i], slots[2 * i + 1], spans) for i, spans in wanted])
            first += len(slots) // 2
            self.counters.loaded_chunks += len(wanted)
            self.counters.loaded_bytes += len(wanted) * group.namespace.object_bytes

    def _read_frames(
        self, session: str, group: KVGroupPages, lease: int, chunks: list[tuple[int, list[Span]]]
    ) -> None:
        address, view = _buffer(group.namespace.object_bytes)
        pieces = [
            (offset, min(m.PIECE_BYTES, len(view) - offset)) for offset in range(0, len(view), m.PIECE_BYTES)
        ]
        answers = self.client.pipeline(
            (m.Read(session=session, lease=lease, index=index, offset=offset, length=length), length, ())
            for index, _ in chunks
            for offset, length in pieces
        )
        for _, spans in chunks:
            for (offset, length), (_, frames) in zip(pieces, answers, strict=False):  # answers go on
                if len(frames) != 1 or len(frames[0]) != length:
                    raise LMCacheError(
                        f"read of {length} bytes: the reply carries {[len(f) for f in frames]}"
                    )
                view[offset : offset + length] = frames[0]
            copy_pages(group, "load", [ChunkCopy(address, view, spans)])

    # ---- session

    def _register(self, client: CacheClient) -> None:
        pool = client.attachment.pool if client.attachment is not None else None
        welcome = client.welcome
        if welcome is None:
            raise LMCacheError("register before hello")
        groups = [
            replace(group, namespace=msgspec.structs.replace(group.namespace, chunk_size=welcome.chunk_size))
            for group in self.groups
        ]
        namespaces = [group.namespace for group in groups]
        client.register(m.Register(session=client.session, namespaces=namespaces, mapped=pool is not None))
        self._bound = Binding(client.session, welcome.epoch, groups, pool)

    def _let_go(self) -> None:
        """The server has ended, or we have. A copy under way has the pool for itself until it is done."""
        self._bound = self._bound._replace(pool=None)


class LMCacheDrivenTransferContext:
    """The server moves device memory itself. Not built into this version: constructing it is an error."""

    mode = MPTransferMode.LMCACHE_DRIVEN

    def __init__(self, *_: object, **__: object) -> None:
        raise ValueError(
            "transfer mode lmcache_driven: required platform capability checks failed (no tensor IPC wrapper,"
            " event IPC or cache context here); use engine_driven or auto"
        )


def create_transfer_context(
    mode: MPTransferMode | str, *args: object, **kwargs: object
) -> EngineDrivenTransferContext:
    """The transfer context for a mode; the other arguments are :class:`EngineDrivenTransferContext`'s.

    Raises:
        ConfigError: for an unknown mode. ValueError: for a mode that cannot be delivered here.
    """
    chosen = mode if isinstance(mode, MPTransferMode) else MPTransferMode.parse(mode)
    if chosen is MPTransferMode.LMCACHE_DRIVEN:
        LMCacheDrivenTransferContext()
    return EngineDrivenTransferContext(*args, **kwargs)  # type: ignore[arg-type]


def _wanted(groups: Sequence[KVGroupPages], items: Sequence[StoreItem]) -> list[dict[bytes, list[int]]]:
    """Per group, chunk digest to block ids; a chunk with a null block is not wanted (its KV is not there)."""
    wanted: list[dict[bytes, list[int]]] = [{} for _ in groups]
    for item in items:
        for group, blocks, into in zip(groups, item.blocks, wanted, strict=True):
            if item.chunk_size != group.namespace.chunk_size:
                continue  # planned before the server came back with another chunk size
            per_chunk = group.namespace.blocks_per_chunk
            for i, chunk in enumerate(item.hashes):
                mine = blocks[i * per_chunk : (i + 1) * per_chunk]
                if len(mine) == per_chunk and group.null_block not in mine:
                    into[chunk] = mine
    return wanted


def _placed(groups: Sequence[KVGroupPages], pages: Sequence[KVGroupPages] | None) -> Sequence[KVGroupPages]:
    """The groups where ``pages`` says that they are; as registered if it says nothing."""
    if pages is None:
        return groups
    if [p.namespace for p in pages] != [g.namespace for g in groups]:
        raise LMCacheError("the server came back with another chunk size while the pages were laid out")
    return pages


def _at(pool: PoolView, offset: int, group: KVGroupPages) -> tuple[int, memoryview]:
    size = group.namespace.object_bytes
    if offset < 0 or offset + size > pool.data_bytes:
        raise LMCacheError(f"slot at {offset} with {size} bytes: outside the pool of {pool.data_bytes}")
    return pool.address + offset, pool.data[offset : offset + size]


def _copy_checked(pool: PoolView, group: KVGroupPages, chunks: list[tuple[int, int, list[Span]]]) -> None:
    """Load ``(offset, generation, spans)`` from the pool; fails unless the bytes were the object's throughout."""
    copies = [ChunkCopy(*_at(pool, offset, group), spans) for offset, _, spans in chunks]
    for copied in (False, True):
        if copied:
            copy_pages(group, "load", copies)
        for offset, generation, _ in chunks:
            if pool.generation(offset) != generation:
                raise LMCacheError("the server took the object back (its lease ended)")


def _buffer(size: int) -> tuple[int, memoryview]:
    raw = bytearray(size)
    return ctypes.addressof(ctypes.c_char.from_buffer(raw)), memoryview(raw)
