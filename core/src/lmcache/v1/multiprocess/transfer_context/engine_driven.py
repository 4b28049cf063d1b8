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
from lmcache.v1.multiprocess.pool_pins import lock_mapping
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
        pool = client.attachment.pool if client.attachment is not None else None
        client.register(m.Register(session=client.session, namespaces=namespaces, mapped=pool is not None))
        if pool is not None:
            self._lock_pages(pool)

    def _lock_pages(self, pool: PoolView) -> None:
        """For the device that the pages lie on. A mapping of a server that is gone is unlocked with its last user."""
        tensors = [tensor for group in self.groups for tensor in group.tensors[:1]]
        if tensors:
            lock_mapping(pool, tensors[0].device)

    def _store(
        self, bound: Binding, groups: Sequence[KVGroupPages], wanted: list[dict[bytes, list[int]]], lease: int,
        account: str,
    ) -> int:  # fmt: skip
        session, pool = bound.session, bound.pool
        granted = self.reserve(bound, groups, wanted, lease, account)
        index = 0
        for group, chunks in zip(groups, granted, strict=True):
            if pool is None:
                self._write_frames(session, group, lease, index, [spans for _, spans in chunks])
            else:
                copy_pages(group, "store", pool_copies(pool, group, chunks))
            index += len(chunks)
        return self.commit(bound, groups, granted, lease)

    def reserve(
        self, bound: Binding, groups: Sequence[KVGroupPages], wanted: list[dict[bytes, list[int]]], lease: int,
        account: str,
    ) -> list[list[tuple[int, list[Span]]]]:  # fmt: skip
        """Ask for room for ``wanted[group]``, chunk digest to block ids; per group, offset and spans of those that
        got some.

        Raises:
            LMCacheError: If the server gives none, or does not answer.
        """
        hashes = [b"".join(w) for w in wanted]
        request = m.Reserve(session=bound.session, lease=lease, hashes=hashes, account=account)
        reply = expect(m.Reserved, self.client.call(request)[0])
        if [len(slots) for slots in reply.slots] != [2 * len(w) for w in wanted]:
            want = [len(w) for w in wanted]
            raise LMCacheError(f"reserve: expected slots of {want} chunks, the server answers {reply.slots}")
        return [
            [
                (offset, group.spans(blocks))
                for offset, blocks in zip(slots[::2], chunks.values(), strict=True)
                if offset >= 0
            ]
            for group, chunks, slots in zip(groups, wanted, reply.slots, strict=True)
        ]

    def commit(
        self, bound: Binding, groups: Sequence[KVGroupPages], granted: list[list[tuple[int, list[Span]]]],
        lease: int,
    ) -> int:  # fmt: skip
        """Publish what was written to all that was granted; how many objects.

        Raises:
            LMCacheError: If the server refuses, or does not answer.
        """
        count = sum(map(len, granted))
        if not count:
            self.client.post(m.Abort(session=bound.session, leases=[lease]))
            return 0
        commit = m.Commit(session=bound.session, lease=lease, indexes=list(range(count)))
        done = expect(m.Ok, self.client.call(commit)[0])
        self.counters.stored_chunks += done.count
        self.counters.stored_bytes += sum(
            len(chunks) * group.namespace.object_bytes for group, chunks in zip(groups, granted, strict=True)
        )
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
            wanted = wanted_spans(group, blocks, slots, skip)
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


def wanted_spans(
    group: KVGroupPages, blocks: Sequence[int], slots: Sequence[int], skip: int
) -> list[tuple[int, list[Span]]]:
    """What a load copies of each chunk, by its number; a chunk of which the engine holds all is left out.

    Raises:
        LMCacheError, ValueError: If blocks and slots do not fit together.
    """
    per_chunk = group.namespace.blocks_per_chunk
    wanted = []
    for i in range(check_chunks(group, blocks, slots)):
        skipped = min(per_chunk, max(0, skip - i * per_chunk))
        spans = group.spans(blocks[i * per_chunk : (i + 1) * per_chunk], skipped)
        if spans:
            wanted.append((i, spans))
    return wanted


def pool_copies(
    pool: PoolView, group: KVGroupPages, chunks: Sequence[tuple[int, list[Span]]]
) -> list[ChunkCopy]:
    """Copies between the pages of spans and the pool, by offset in it.

    Raises:
        LMCacheError: If one is outside the pool.
    """
    size = group.namespace.object_bytes
    for offset, _ in chunks:
        if offset < 0 or offset + size > pool.data_bytes:
            raise LMCacheError(f"slot at {offset} with {size} bytes: outside the pool of {pool.data_bytes}")
    return [
        ChunkCopy(pool.address + offset, pool.data[offset : offset + size], spans) for offset, spans in chunks
    ]


def check_generations(pool: PoolView, chunks: Sequence[tuple[int, int]]) -> None:
    """Fail unless the pool holds, at each offset, the object of that generation.

    Raises:
        LMCacheError: If it does not.
    """
    for offset, generation in chunks:
        if pool.generation(offset) != generation:
            raise LMCacheError("the server took the object back (its lease ended)")


def _copy_checked(pool: PoolView, group: KVGroupPages, chunks: list[tuple[int, int, list[Span]]]) -> None:
    """Load ``(offset, generation, spans)`` from the pool; fails unless the bytes were the object's throughout."""
    copies = pool_copies(pool, group, [(offset, spans) for offset, _, spans in chunks])
    marks = [(offset, generation) for offset, generation, _ in chunks]
    check_generations(pool, marks)
    copy_pages(group, "load", copies)
    check_generations(pool, marks)


def _buffer(size: int) -> tuple[int, memoryview]:
    raw = bytearray(size)
    return ctypes.addressof(ctypes.c_char.from_buffer(raw)), memoryview(raw)
