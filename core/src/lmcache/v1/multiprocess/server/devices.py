"""lmcache-driven requests: what the server moves itself, and who may see it when.

All methods are called under the server's lock but for the callbacks of a side, which take it. A store has an
internal write lease that only its end gives back: the device may be writing there, whatever became of the
worker. It is published when the device has done the copy *and* the worker has committed. A load keeps its
objects pinned until the device has read them.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lmcache.logging import init_logger
from lmcache.v1.keys import Namespace, object_key
from lmcache.v1.multiprocess.pool_pins import PoolPins
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.leases import Entry, Reservation
from lmcache.v1.storage.shm_pool import PoolView

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.device_side import DeviceSide

logger = init_logger(__name__)

Later: TypeAlias = "Callable[[m.Reply], None]"
Settled: TypeAlias = "Callable[[m.Reply, list[bytes]], None]"
"""Told the reply to a commit, and the keys that it published."""


def served_modes(supported: str) -> list[str]:
    """The modes that a server started with ``--supported-transfer-mode`` serves; auto: all that it can."""
    mode = MPTransferMode.parse(supported, source="--supported-transfer-mode")
    if mode is not MPTransferMode.AUTO:
        return [mode.value]
    modes = [MPTransferMode.ENGINE_DRIVEN.value]
    return [*modes, MPTransferMode.LMCACHE_DRIVEN.value] if importlib.util.find_spec("torch") else modes


@dataclass(slots=True)
class _Store:
    """A store under way. The bits say what has happened; the last of them publishes or frees."""

    owner: str
    lease: int
    count: int
    copied: bool = False
    committed: bool = False
    dropped: bool = False
    settled: Settled | None = None
    """Told what became of it once the worker has committed."""


@dataclass(slots=True)
class _Worker:
    side: DeviceSide
    stores: dict[int, _Store] = field(default_factory=dict)


class Devices:
    """Sides by session.

    Args:
        view, l1: the pool and its index.
        lock: the server's.
        published: told the keys of what was published.
    """

    def __init__(
        self,
        view: PoolView,
        l1: L1Cache,
        lock: threading.Lock,
        metrics: Metrics,
        published: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._published = published
        self._metrics = metrics
        self._view = view
        self._pins = PoolPins(view)
        self._l1 = l1
        self._lock = lock
        self._workers: dict[str, _Worker] = {}
        self._ending: list[tuple[str, DeviceSide]] = []
        """Dropped, and maybe not done. A session that registers again and again has several."""

    def __contains__(self, session: str) -> bool:
        return session in self._workers

    def open(
        self,
        session: str,
        exporter: int,
        export: m.DeviceExport,
        namespaces: Sequence[Namespace],
        later: Later,
    ) -> None:
        """Map a worker's memory; ``later`` gets Ok, or the reason why not. A mapping of before is dropped.

        Args:
            exporter: the worker's process; memory of another one is refused.
        """
        from lmcache.v1.multiprocess.device_side import DeviceSide

        self.drop(session)

        def opened(error: str) -> None:
            if error:
                with self._lock:
                    worker = self._workers.get(session)
                    if worker is not None and worker.side is side:
                        self.drop(session)
                logger.warning("device memory of a worker cannot be mapped: %s", error)
                later(m.Error(code="device", message=error))
            else:
                later(m.Ok())

        side = DeviceSide(export.groups, namespaces, self._view, opened, exporter, self._pins.pin)
        self._workers[session] = _Worker(side)

    def store(
        self, session: str, msg: m.DeviceStore, columns: Sequence[Sequence[tuple[bytes, int]]],
        blocks_per_chunk: Sequence[int], later: Later,
    ) -> m.Reply | None:  # fmt: skip
        """Reserve room and queue the copy; ``later`` gets Moved once it is queued.

        Raises:
            KeyError: no such worker, or the lease id is used up.
        """
        from lmcache.v1.multiprocess.device_side import Move, Part

        worker = self._workers[session]
        owner = f"{session}/device"
        # As if by a mapped client: nothing but the end of the copy may free this memory.
        slots = self._l1.reserve(owner, msg.lease, columns, mapped=True, account=msg.account)
        parts = []
        for column, blocks, per_chunk in zip(slots, msg.blocks, blocks_per_chunk, strict=True):
            granted = [i for i, (offset, _) in enumerate(column) if offset >= 0]
            ids = [block for i in granted for block in blocks[i * per_chunk : (i + 1) * per_chunk]]
            parts.append(Part([column[i][0] for i in granted], ids))
        count = sum(len(part.offsets) for part in parts)
        if not count:
            self._l1.abort(owner, msg.lease)
            return m.Moved(count=0)
        store = worker.stores[msg.lease] = _Store(owner, msg.lease, count)
        answer = once(later)

        def done(error: str) -> None:
            with self._lock:
                store.copied = True
                if error:
                    store.dropped = True
                self._settle(worker, store)
            if error:
                logger.warning("store of %d objects dropped: %s", count, error)
                answer(m.Error(code="device", message=error))  # the answer, unless it was queued before

        worker.side.submit(
            Move("store", parts, msg.event, lambda event: answer(m.Moved(count=count, event=event)), done)
        )
        return None

    def holds(self, session: str, lease: int) -> bool:
        """Whether a store of a device is under way under this lease."""
        worker = self._workers.get(session)
        return worker is not None and lease in worker.stores

    def commit(self, session: str, lease: int, settled: Settled) -> None:
        """The worker keeps the pages until the copy is done; ``settled`` is told once that is published or dropped.

        Raises:
            KeyError: no such store.
        """
        worker = self._workers[session]
        store = worker.stores[lease]
        store.committed, store.settled = True, settled
        self._settle(worker, store)

    def abort(self, session: str, lease: int) -> None:
        """The worker gave up: whatever was read is not to be published."""
        worker = self._workers.get(session)
        if worker is not None and (store := worker.stores.get(lease)) is not None:
            store.dropped = True
            self._settle(worker, store)
        else:
            self._l1.abort(f"{session}/device", lease)  # it may come later: then it is refused

    def load(
        self, session: str, msg: m.DeviceLoad, share: Sequence[Entry], chunks: int, later: Later
    ) -> None:
        """Queue the copy of a share of a read lease; ``later`` gets Moved once the device has done it.

        Args:
            share: the objects of ``chunks`` chunks, one KV group after the other.

        Raises:
            KeyError: no such worker.
        """
        from lmcache.v1.multiprocess.device_side import Move, Part

        worker = self._workers[session]
        parts = [
            Part([entry.offset for entry in share[group * chunks : (group + 1) * chunks]], blocks, skip)
            for group, (blocks, skip) in enumerate(zip(msg.blocks, msg.skip, strict=True))
        ]
        held = list(share)
        self._l1.pin_entries(held)

        def done(error: str) -> None:
            with self._lock:
                self._l1.unpin_entries(held)
            if not error:
                self._metrics.device_loaded.inc(len(held))
            later(m.Error(code="device", message=error) if error else m.Moved(count=len(held)))

        worker.side.submit(Move("load", parts, msg.event, lambda event: None, done))

    def fence(self, session: str, later: Later) -> m.Reply | None:
        """Answer once all that was queued for a session before has ended."""
        worker = self._workers.get(session)
        sides = [side for ident, side in self._ending if ident == session]
        sides = [side for side in [*sides, *([worker.side] if worker else [])] if not side.join(0)]
        if not sides:
            return m.Ok()
        passed = itertools.count(1)

        def one_passed() -> None:
            if next(passed) == len(sides):
                later(m.Ok())

        for side in sides:
            side.fence(one_passed)
        return None

    def drop(self, session: str) -> None:
        """The worker is gone: its memory is unmapped once the device is done with it."""
        worker = self._workers.pop(session, None)
        if worker is None:
            return
        for store in list(worker.stores.values()):
            store.dropped = True
            self._settle(worker, store)
        worker.side.close()
        self._ending = [(ident, side) for ident, side in self._ending if not side.join(0)]
        self._ending.append((session, worker.side))

    def close(self) -> None:
        """Drop all and wait for the device to be done. Not under the lock: the sides' ends take it."""
        with self._lock:
            for session in list(self._workers):
                self.drop(session)
            ending, self._ending = self._ending, []
        ended = [side.join() for _, side in ending]
        if all(ended):
            self._pins.release()
        else:
            logger.warning("a device did not end its transfers in time; they end with this process")

    def _settle(self, worker: _Worker, store: _Store) -> None:
        if not store.copied or not (store.committed or store.dropped):
            return
        worker.stores.pop(store.lease, None)
        settled = store.settled or (lambda reply, keys: None)
        if store.dropped:
            self._l1.abort(store.owner, store.lease)
            settled(m.Error(code="device", message="the store was dropped; nothing of it is published"), [])
            return
        keys = written_keys(self._l1.reserved(store.owner, store.lease), range(store.count))
        count = self._l1.commit(store.owner, store.lease, range(store.count))
        self._metrics.stored_objects.inc(count)
        self._metrics.device_stored.inc(count)
        self._published(keys)
        settled(m.Ok(count=count), keys)


def once(later: Later) -> Later:
    """The first answer is the answer, from whatever thread."""
    answers = itertools.count()

    def answer(reply: m.Reply) -> None:
        if next(answers) == 0:
            later(reply)

    return answer


def written_keys(items: Sequence[Reservation], indexes: Iterable[int]) -> list[bytes]:
    """Keys of the reservations at ``indexes``, first chunks first; indexes that there are none for are passed over."""
    chosen = [items[i] for i in set(indexes) if 0 <= i < len(items)]
    return [item.key for item in sorted(chosen, key=lambda item: item.depth)]


def device_columns(
    namespaces: Sequence[tuple[bytes, Namespace]], hashes: Sequence[Sequence[bytes]]
) -> list[list[tuple[bytes, int]]]:
    """Keys and sizes of the objects of chunks, per KV group."""
    return [
        [(object_key(digest, chunk), ns.object_bytes) for chunk in chunks]
        for (digest, ns), chunks in zip(namespaces, hashes, strict=True)
    ]
