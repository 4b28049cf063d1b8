"""What both transfer modes share: the records of a step, one worker's session, and what becomes of failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import msgspec

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.attachment import Attachment
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)


class PagesUnsafe(LMCacheError):
    """A server that does not answer may still write into the engine's pages: the engine must not go on."""


@dataclass(slots=True)
class StoreItem:
    """Chunks to store. ``blocks[group]`` are the engine's block ids for all of them, in order.

    ``account`` is whose quota they count against (:func:`lmcache.v1.keys.account_id`).
    """

    chunk_size: int
    hashes: list[bytes]
    blocks: list[list[int]]
    account: str = ""


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
    attachment: Attachment | None = None


class TransferContext(ABC):
    """Stores and loads pages of one worker.

    Args:
        address, engine, rank, ranks, options: see :class:`CacheClient`.
        groups: the worker's KV groups, in the engine's order. The chunk size in their namespaces is the
            server's to say; it is filled in whenever a session opens.
        stores: False for a rank whose KV another rank stores (replicated KV, as with latent attention under
            tensor parallelism).
    """

    mode: ClassVar[MPTransferMode]
    maps_pool: ClassVar[bool] = True

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
            address, "worker", engine, rank, ranks, options,
            on_open=self._register, on_lost=self._let_go, map_pool=self.maps_pool,
        )  # fmt: skip

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
    def bound(self) -> Binding:
        """What moves bytes now. Whoever moves some in several calls keeps to what he began with."""
        return self._bound

    @property
    def stores(self) -> bool:
        """Whether this rank stores at all."""
        return self._stores

    @property
    @abstractmethod
    def path(self) -> str:
        """How payload travels; "down" while there is no session."""

    def store(self, items: Sequence[StoreItem], pages: Sequence[KVGroupPages] | None = None) -> int:
        """Store chunks; those that the server holds already, or has no room for, are passed over.

        Returns:
            Number of objects (chunk x group) published. Never raises for what the server or the network does, but
            for what the device does.
        """
        if not self._stores:
            return 0
        accounts = dict.fromkeys(item.account for item in items)
        return sum(self._store_for(a, [i for i in items if i.account == a], pages) for a in accounts)

    def _store_for(
        self, account: str, items: Sequence[StoreItem], pages: Sequence[KVGroupPages] | None
    ) -> int:
        if not self.client.up:
            return 0
        bound = self._bound
        wanted = wanted_chunks(bound.groups, items)
        if not any(wanted):
            return 0
        lease = self.client.new_lease()
        try:
            return self._store(bound, placed(bound.groups, pages), wanted, lease, account)
        except (LMCacheError, ValueError) as exc:
            self.counters.dropped_stores += sum(len(w) for w in wanted)
            warn_once(logger, f"store:{type(exc).__name__}", "store dropped: %s", exc)
            self.client.post(m.Abort(session=bound.session, leases=[lease]))
            return 0
        except Exception:  # of the device's: whoever drives it is told, and the server keeps no memory for it
            self.counters.dropped_stores += sum(len(w) for w in wanted)
            self.client.post(m.Abort(session=bound.session, leases=[lease]))
            raise

    def load(self, items: Sequence[LoadItem], pages: Sequence[KVGroupPages] | None = None) -> list[LoadItem]:
        """Fill the engine's pages from the cache and release the leases.

        Returns:
            The items that failed; of such an item no page may be trusted.

        Raises:
            PagesUnsafe: see there; lmcache-driven mode only. Nothing else is raised.
        """
        failed = []
        bound = self._bound
        for item in items:
            try:
                if bound.epoch != item.epoch:
                    raise LMCacheError("the server was restarted since the lookup")
                self._load(bound, placed(bound.groups, pages), item)
            except PagesUnsafe:
                raise
            except (LMCacheError, ValueError) as exc:
                logger.warning(
                    "request %s: load failed, its tokens are to be recomputed: %s", item.request, exc
                )
                self.counters.failed_loads += 1
                failed.append(item)
            self.client.post(m.Release(session=bound.session, leases=[item.lease]))
        return failed

    @abstractmethod
    def _store(
        self, bound: Binding, groups: Sequence[KVGroupPages], wanted: list[dict[bytes, list[int]]], lease: int,
        account: str,
    ) -> int:  # fmt: skip
        """Store ``wanted[group]``, chunk digest to block ids, under ``lease``; how many objects."""

    @abstractmethod
    def _load(self, bound: Binding, groups: Sequence[KVGroupPages], item: LoadItem) -> None:
        """Fill the pages of one item."""

    @abstractmethod
    def _announce(self, client: CacheClient, namespaces: list[Namespace]) -> None:
        """Register with the server of a new session."""

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
        self._announce(client, [group.namespace for group in groups])
        self._bound = Binding(client.session, welcome.epoch, groups, pool, client.attachment)

    def _let_go(self) -> None:
        """The server has ended, or we have. A copy under way has the pool for itself until it is done."""
        self._bound = self._bound._replace(pool=None)


def check_chunks(group: KVGroupPages, blocks: Sequence[int], slots: Sequence[int]) -> int:
    """The number of chunks that ``slots`` (offset and generation each) name, whose blocks ``blocks`` must be.

    Raises:
        LMCacheError: if they are not.
    """
    per_chunk = group.namespace.blocks_per_chunk
    if len(blocks) * 2 != len(slots) * per_chunk:
        raise LMCacheError(
            f"{len(slots) // 2} chunks of {per_chunk} blocks for {len(blocks)} blocks of the engine"
        )
    return len(slots) // 2


def wanted_chunks(groups: Sequence[KVGroupPages], items: Sequence[StoreItem]) -> list[dict[bytes, list[int]]]:
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


def placed(groups: Sequence[KVGroupPages], pages: Sequence[KVGroupPages] | None) -> Sequence[KVGroupPages]:
    """The groups where ``pages`` says that they are; as registered if it says nothing."""
    if pages is None:
        return groups
    if [p.namespace for p in pages] != [g.namespace for g in groups]:
        raise LMCacheError("the server came back with another chunk size while the pages were laid out")
    return pages
