"""One step's loads and stores layer by layer, in a thread beside the engine's: for engines that wait for each layer.

Layer 1 is copied while the engine computes layer 0, and stored while it computes layer 2. An engine that does not wait
for a layer, as one that replays a recorded graph, has computed with what may not have been there: such a load fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.multiprocess.transfer_context.base import Binding, LoadItem, StoreItem, wanted_chunks
from lmcache.v1.multiprocess.transfer_context.beside import Beside
from lmcache.v1.multiprocess.transfer_context.engine_driven import (
    EngineDrivenTransferContext,
    check_generations,
    pool_copies,
    wanted_spans,
)
from lmcache.v1.multiprocess.transfer_context.pages import (
    ChunkCopy,
    Direction,
    KVGroupPages,
    Span,
    copy_pages,
)
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.shm_pool import PoolView

__all__ = ["LayeredTransfers"]

logger = init_logger(__name__)


@dataclass(slots=True)
class _Loads:
    """What is being loaded: items with the marks that show whose bytes they are, and each layer's copies."""

    bound: Binding
    marks: list[tuple[LoadItem, list[tuple[int, int]]]] = field(default_factory=list)
    failed: list[LoadItem] = field(default_factory=list)
    layers: dict[str, Future[None]] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    """Layers that the engine has not waited for yet."""


@dataclass(slots=True)
class _Stores:
    """What is being stored: what each lease was granted, all copies, and the layers whose copy has begun."""

    bound: Binding
    leases: dict[int, list[list[tuple[int, list[Span]]]]] = field(default_factory=dict)
    copies: list[ChunkCopy] = field(default_factory=list)
    layers: dict[str, Future[None]] = field(default_factory=dict)
    whole: list[StoreItem] = field(default_factory=list)
    """Stored at the end, where there is no pool to copy to."""


class LayeredTransfers:
    """Loads and stores of an engine with one KV group.

    Args:
        context: This worker's; stays the caller's.

    Raises:
        LMCacheError: The group's namespace does not name the layer of each of its tensors.
    """

    def __init__(self, context: EngineDrivenTransferContext) -> None:
        self._context = context
        namespace = context.groups[0].namespace
        if len(namespace.layers) != len(namespace.page_bytes):
            raise LMCacheError(
                f"{len(namespace.layers)} names of layers for {len(namespace.page_bytes)} tensors: expected one each,"
                " or what is not named would not be moved"
            )
        self._parts = _parts(namespace.layers)
        self._beside = Beside(context.groups[0])
        self._thread = ThreadPoolExecutor(1, "lmcache-layers")
        self._loads: _Loads | None = None
        self._stores: _Stores | None = None

    def close(self) -> None:
        """End the thread, once it has done what was asked."""
        self._thread.shutdown()

    def _move(
        self, mark: Any, group: KVGroupPages, direction: Direction, copies: list[ChunkCopy], part: slice
    ) -> None:
        with self._beside.after(mark):
            copy_pages(group, direction, copies, part)

    # ---- loads

    def begin_loads(self, items: Sequence[LoadItem]) -> None:
        """Begin to fill the engine's pages, the first layer first."""
        bound = self._context.bound
        loads = self._loads = _Loads(bound)
        if bound.pool is None:
            loads.failed = self._context.load(items)
            return
        group, copies = bound.groups[0], []
        for item in items:
            try:
                if bound.epoch != item.epoch:
                    raise LMCacheError("the server was restarted since the lookup")
                slots = item.slots[0]
                wanted = wanted_spans(group, item.blocks[0], slots, item.skip_blocks[0])
                marks = [(slots[2 * i], slots[2 * i + 1]) for i, _ in wanted]
                check_generations(bound.pool, marks)
                copies += pool_copies(bound.pool, group, [(slots[2 * i], spans) for i, spans in wanted])
                loads.marks.append((item, marks))
            except (LMCacheError, ValueError, IndexError) as exc:
                self._fail(loads, item, exc)
        if copies:
            loads.unseen = set(self._parts)
            mark = self._beside.mark()  # the step before may still read these pages
            loads.layers = {
                name: self._thread.submit(self._move, mark, group, "load", copies, part)
                for name, part in self._parts.items()
            }

    def wait(self, name: str) -> None:
        """Until the layer of this name is there. What went wrong with it shows at the end."""
        loads = self._loads
        if loads is not None and name in loads.layers:
            wait([loads.layers[name]])
            loads.unseen.discard(name)

    def end_loads(self) -> list[LoadItem]:
        """The items that failed, of which no page may be trusted; their leases, like all, are released."""
        loads, self._loads = self._loads, None
        if loads is None:
            return []
        wait(loads.layers.values())
        faults = [fault for layer in loads.layers.values() if (fault := layer.exception()) is not None]
        if loads.unseen:
            faults.append(LMCacheError(f"the engine did not wait for {len(loads.unseen)} layers of it"))
        counters, pool = self._context.counters, loads.bound.pool
        for item, marks in loads.marks:
            try:
                if faults:
                    raise LMCacheError(str(faults[0]))
                if pool is not None:
                    check_generations(pool, marks)
                counters.loaded_chunks += len(marks)
                counters.loaded_bytes += len(marks) * loads.bound.groups[0].namespace.object_bytes
                self._release(loads.bound, item)
            except LMCacheError as exc:
                self._fail(loads, item, exc)
        return loads.failed

    def _fail(self, loads: _Loads, item: LoadItem, exc: Exception) -> None:
        logger.warning("request %s: load failed, its tokens are to be recomputed: %s", item.request, exc)
        self._context.counters.failed_loads += 1
        loads.failed.append(item)
        self._release(loads.bound, item)

    def _release(self, bound: Binding, item: LoadItem) -> None:
        self._context.client.post(m.Release(session=bound.session, leases=[item.lease]))

    # ---- stores

    def save(self, name: str, items: Sequence[StoreItem]) -> None:
        """The layer of this name holds all that the step computes of it: begin to store it of ``items``, which are the
        same throughout the step."""
        if name not in self._parts or not items:
            return
        stores = self._stores
        if stores is None:
            stores = self._stores = _Stores(self._context.bound)
            self._begin_stores(stores, items)
        self._copy(stores, name)

    def _copy(self, stores: _Stores, name: str) -> None:
        if stores.copies and name not in stores.layers:
            group, part = stores.bound.groups[0], self._parts[name]
            mark = self._beside.mark()  # the layer is queued, and perhaps no more than that
            stores.layers[name] = self._thread.submit(self._move, mark, group, "store", stores.copies, part)

    def _begin_stores(self, stores: _Stores, items: Sequence[StoreItem]) -> None:
        if not self._context.stores or not self._context.client.up:
            return
        if stores.bound.pool is None:
            stores.whole = list(items)
            return
        for account in dict.fromkeys(item.account for item in items):
            mine = [item for item in items if item.account == account]
            wanted = wanted_chunks(stores.bound.groups, mine)
            if any(wanted):
                self._reserve(stores, stores.bound.pool, wanted, account)

    def _reserve(
        self, stores: _Stores, pool: PoolView, wanted: list[dict[bytes, list[int]]], account: str
    ) -> None:
        lease, bound = self._context.client.new_lease(), stores.bound
        try:
            granted = self._context.reserve(bound, bound.groups, wanted, lease, account)
            stores.copies += pool_copies(pool, bound.groups[0], granted[0])
            stores.leases[lease] = granted
        except (LMCacheError, ValueError) as exc:
            self._drop(stores, lease, exc)

    def end_stores(self, items: Sequence[StoreItem], keep: bool) -> int:
        """Publish what was stored, or take it back unless ``keep``; how many objects were published."""
        stores, self._stores = self._stores, None
        if stores is None:
            return self._context.store(items) if keep else 0  # the engine has shown no layer
        for name in self._parts:
            self._copy(stores, name)
        wait(stores.layers.values())
        fault = next((f for layer in stores.layers.values() if (f := layer.exception()) is not None), None)
        published = 0
        for lease, granted in stores.leases.items():
            try:
                if fault is not None or not keep:
                    raise LMCacheError(str(fault or "what it was computed from was not loaded"))
                published += self._context.commit(stores.bound, stores.bound.groups, granted, lease)
            except LMCacheError as exc:
                self._drop(stores, lease, exc)
        if stores.whole and keep:
            published += self._context.store(stores.whole)
        return published

    def _drop(self, stores: _Stores, lease: int, exc: Exception) -> None:
        self._context.counters.dropped_stores += 1
        warn_once(logger, f"store:{type(exc).__name__}", "store dropped: %s", exc)
        self._context.client.post(m.Abort(session=stores.bound.session, leases=[lease]))


def _parts(names: Sequence[str]) -> dict[str, slice]:
    """Where the tensors of each layer are in a group; a layer of several has its name as often in a row."""
    parts: dict[str, slice] = {}
    for at, name in enumerate(names):
        start = parts[name].start if name in parts else at
        parts[name] = slice(start, at + 1)
    return parts
