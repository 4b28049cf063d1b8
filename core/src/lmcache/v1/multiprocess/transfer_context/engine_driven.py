"""Engine-driven transfer: the worker copies pages itself, into and out of the server's pool.

Where the pool can be mapped, a store is reserve, copy, commit (two round trips) and a load is copy, release
(none that is waited for). Where it cannot, the same messages carry the payload in frames. Which of the two is
decided once per session and shows in the server's status.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import ClassVar

from lmcache.errors import LMCacheError
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.base import Binding, LoadItem, TransferContext, check_chunks
from lmcache.v1.multiprocess.transfer_context.pages import ChunkCopy, KVGroupPages, Span, copy_pages
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect
from lmcache.v1.storage.shm_pool import PoolView


class EngineDrivenTransferContext(TransferContext):
    """Stores and loads pages of one worker, which copies them.

    An engine whose pages do not stay in one place gives their place with each transfer (``pages``): groups
    made of those in ``self.groups``, equal in all but addresses, strides, tensors and number of blocks.
    """

    mode: ClassVar[MPTransferMode] = MPTransferMode.ENGINE_DRIVEN

    @property
    def path(self) -> str:
        """ "shared_memory", "frames", or "down" while there is no session."""
        if not self.client.up:
            return "down"
        return "shared_memory" if self._bound.pool is not None else "frames"

    def _announce(self, client: CacheClient, namespaces: list[Namespace]) -> None:
        mapped = client.attachment is not None and client.attachment.pool is not None
        client.register(m.Register(session=client.session, namespaces=namespaces, mapped=mapped))

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

    def _load(self, bound: Binding, groups: Sequence[KVGroupPages], item: LoadItem) -> None:
        pool = bound.pool
        first = 0
        for group, blocks, slots, skip in zip(groups, item.blocks, item.slots, item.skip_blocks, strict=True):
            per_chunk = group.namespace.blocks_per_chunk
            wanted: list[tuple[int, list[Span]]] = []
            for i in range(check_chunks(group, blocks, slots)):
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
