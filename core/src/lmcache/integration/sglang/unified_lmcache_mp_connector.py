"""The connector of SGLang's ``LMCacheUnifiedRadixCache`` to an ``lmcache server`` (SGLang 0.5.21 to 0.5.23).

All TP and PP ranks call every method in the same order. The leader asks the server once for all of them; each rank
copies its own pages. Nothing the server or the network does is raised into the scheduler: requests run uncached until
the server is back. Methods that say *collective* synchronise the ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lmcache.errors import ConfigError, LayoutError, LMCacheError
from lmcache.integration.sglang import identity, pools
from lmcache.integration.sglang.lmcache_mp_metadata import (
    LMCacheLoadOperation,
    LMCacheLookupOperation,
    LMCacheStoreOperation,
    Outcome,
)
from lmcache.integration.sglang.lookups import Leader, known_to_all
from lmcache.integration.sglang.mesh import Mesh
from lmcache.integration.sglang.settings import mp_settings
from lmcache.integration.sglang.stores import BackgroundStores
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.logging import init_logger, warn_once
from lmcache.v1.keys import Scope, account_id, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    LoadItem,
    StoreItem,
)

__all__ = ["UnifiedLMCacheMPConnector"]

logger = init_logger(__name__)

_UNSEEN_CHUNK = 256
"""Chunk size as long as the server was never seen; nothing is looked up or stored with it."""
_OPERATION_SECONDS = 300.0


class UnifiedLMCacheMPConnector:
    """One rank's connector.

    Args:
        config_file: see :mod:`lmcache.integration.sglang.settings`; or what was read already.
        model_config: SGLang's ``ModelConfig``.
        tp_size, tp_rank, tp_group, pp_size, pp_rank, pp_group: the ranks, and groups of theirs.
        group_device: for tensors on which device the groups are.
        page_size: token slots per page.
        token_to_kv_pool_allocator, req_to_token_pool, tree_components, mamba_component: SGLang's.
        sliding_window_size: tokens; None without sliding windows.

    Raises:
        ConfigError, LayoutError: one line: a setting that is wrong, or KV that cannot be cached.
        DeviceError: no backend serves the device that the pages are on.
    """

    def __init__(
        self,
        *,
        config_file: str | ConnectorSettings | None,
        model_config: Any,
        tp_size: int,
        tp_rank: int,
        tp_group: Any,
        pp_size: int = 1,
        pp_rank: int = 0,
        pp_group: Any = None,
        page_size: int,
        token_to_kv_pool_allocator: Any,
        req_to_token_pool: Any,
        tree_components: Sequence[Any],
        mamba_component: Any,
        sliding_window_size: int | None,
        group_device: Any = "cpu",
    ) -> None:
        settings = config_file if isinstance(config_file, ConnectorSettings) else mp_settings(config_file)
        self.page_size = int(page_size)
        self._allocator = token_to_kv_pool_allocator
        self._window = -(-(sliding_window_size or 0) // self.page_size) * self.page_size
        found = pools.components(self._allocator, tree_components, self.page_size, self._window)
        self._swa = [component.name == "swa" for component in found]
        self._mesh = Mesh(
            int(tp_size), int(tp_rank), tp_group, int(pp_size), int(pp_rank), pp_group, group_device
        )
        replicated = identity.is_mla(model_config) and all(c.form == "mla" for c in found)
        groups = pools.kv_groups(
            found,
            self.page_size,
            pools.Engine(
                model=str(model_config.model_path),
                revision=identity.revision_or_none_shared(model_config, settings.model_revision),
                extra=identity.model_extra(model_config),
                tp_rank=0 if replicated else self._mesh.tp_rank,
                tp_size=self._mesh.tp_size,
                pp_rank=self._mesh.pp_rank,
                pp_size=self._mesh.pp_size,
            ),
        )
        self._writes = not replicated or self._mesh.tp_rank == 0
        self._device = next(iter(found[0].tensors.values())).device
        self._lookups: dict[str, LMCacheLookupOperation] = {}
        self._stored: dict[str, int] = {}
        """Tokens of each request that need no store: found at the server, or submitted."""
        self._closed = False
        self.chunk_size = -(-_UNSEEN_CHUNK // self.page_size) * self.page_size
        self._connect(settings, groups)

    def _connect(self, settings: ConnectorSettings, groups: list[KVGroupPages]) -> None:
        """Open this rank's sessions, and agree on the chunk size if the server answers. Collective."""
        mesh = self._mesh
        _, name = mesh.leaders(0, f"sglang-{secrets.token_hex(8)}".encode())
        options, address, engine = settings.client, settings.address, name.decode()
        self._context = EngineDrivenTransferContext(
            address, engine, groups, mesh.rank, mesh.ranks, options, stores=self._writes
        )
        self._stores = BackgroundStores(self._context, self._device)
        self._leader: Leader | None = None
        if mesh.leads:
            client = CacheClient(address, "scheduler", engine, 0, mesh.ranks, options)
            self._leader = Leader(client, len(groups), settings.prefetch_timeout)
            client.start(wait=options.control_timeout)
        self._context.start(wait=options.control_timeout)
        size, _ = mesh.leaders(self._leader.chunk_size if self._leader else 0)
        if size and size % self.page_size:
            self.close()
            raise ConfigError(
                f"page_size={self.page_size}: expected a divisor of the server's chunk size {size}; start it with "
                "another --chunk-size"
            )
        self.chunk_size = size or self.chunk_size
        logger.info(
            "SGLang rank %d of %d: server %s, %d KV group(s), pages of %d tokens, chunks of %d",
            mesh.rank, mesh.ranks, address, len(groups), self.page_size, self.chunk_size,
        )  # fmt: skip

    # ---- facts

    @property
    def is_lookup_leader(self) -> bool:
        return self._mesh.leads

    @property
    def is_kv_writer(self) -> bool:
        """Whether this rank stores; of ranks that hold the same (MLA) one does."""
        return self._writes

    @property
    def operation_timeout(self) -> float:
        """Seconds after which a transfer has surely ended: it has deadlines of its own."""
        return _OPERATION_SECONDS

    @property
    def path(self) -> str:
        """How bytes travel: "shared_memory", "frames", or "down"."""
        return self._context.path

    build_cache_salt = staticmethod(identity.build_cache_salt)

    def aligned_swa_window_size(self) -> int:
        """Tokens of the sliding window, whole pages."""
        return self._window

    def reset_mamba_checkpoint_metadata(self, indices: torch.Tensor) -> None:
        """
        Raises:
            LayoutError: always: recurrent state is refused at construction.
        """
        raise LayoutError(f"recurrent state of {indices.numel()} slots: expected none; it is not cached")

    def device_indices_by_group(
        self,
        full_indices: torch.Tensor,
        *,
        mamba_value: torch.Tensor | None = None,
        mamba_transfer_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """The slots of each group for tokens whose slots in SGLang's tree are ``full_indices``; 0 where a sliding
        window has passed on. The Mamba arguments are SGLang's, and unused without it."""
        allocator = self._allocator
        full = getattr(allocator, "translate_kv_indices_for_transfer", lambda slots: slots)
        return [
            allocator.translate_loc_from_full_to_swa(full_indices) if swa else full(full_indices)
            for swa in self._swa
        ]

    # ---- ranks

    def parallel_all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce a tensor on the host in place over all ranks. Collective."""
        self._mesh.reduce(tensor, op)

    def ready_prefix_count(self, operations: Sequence[LMCacheLoadOperation | LMCacheStoreOperation]) -> int:
        """How many of the first operations have ended on every rank. Collective."""
        count = next((i for i, one in enumerate(operations) if not one.query()), len(operations))
        return self._mesh.least(count)

    # ---- lookup

    def submit_lookup(
        self, request_id: str, token_ids: Sequence[int], *, local_hit_tokens: int, cache_salt: str
    ) -> LMCacheLookupOperation:
        """Ask how much of ``token_ids`` the server holds; :meth:`poll_lookup` tells. Collective.

        Args:
            cache_salt: from :meth:`build_cache_salt`.
        """
        operation = LMCacheLookupOperation(request_id, list(token_ids), int(local_hit_tokens), cache_salt)
        size, _ = self._mesh.leaders(self._leader.ask(operation) if self._leader else 0)
        if size and size % self.page_size:
            warn_once(
                logger, f"chunk:{size}", "chunk size %d is no multiple of page size %d", size, self.page_size
            )
            size = 0
        if size:
            self.chunk_size = size  # here alone, so that all ranks change it together
            self._lookups[request_id] = operation
        else:
            operation.total_hit_tokens = 0
        return operation

    def poll_lookup(self, operation: LMCacheLookupOperation) -> int | None:
        """Tokens that the server holds for all ranks, pinned; None: not known yet. Collective."""
        if operation.total_hit_tokens is not None:
            return operation.total_hit_tokens
        chunks, data = self._mesh.leaders(
            *(self._leader.poll(operation, self.chunk_size) if self._leader else (0, b""))
        )
        if chunks < 0:
            return None
        operation.pinned = known_to_all(data, self._mesh.rank)
        size = operation.pinned.chunk_size if operation.pinned else 0
        operation.total_hit_tokens = total = chunks * size
        operation.locks_held = total > 0
        if total:
            stored = self._stored.get(operation.request_id, 0)
            self._stored[operation.request_id] = max(total, stored)
        return total

    def free_lookup_locks(self, request_id: str, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a hit are not wanted. Its pins end once none are."""
        operation = self._lookups.get(request_id)
        if operation is None or not operation.locks_held:
            return
        total = operation.total_hit_tokens or 0
        operation.lock_start = max(operation.lock_start, min(end, total))
        if operation.lock_start == total:
            self._unpin(operation)

    def _unpin(self, operation: LMCacheLookupOperation) -> None:
        """The lookup is over on this rank; the leader gives back the pins of all."""
        operation.locks_held = False
        if self._lookups.get(operation.request_id) is operation:
            del self._lookups[operation.request_id]
        if self._leader is not None:
            self._leader.release(operation)

    # ---- load

    def submit_load(
        self,
        operation: LMCacheLookupOperation,
        device_indices: Sequence[torch.Tensor] | torch.Tensor,
        *,
        local_hit_tokens: int,
        owned_device_indices: torch.Tensor | None = None,
        producer_stream: Any = None,
    ) -> LMCacheLoadOperation:
        """Fill slots with the tokens that a lookup found beyond the first ``local_hit_tokens``.

        Args:
            device_indices: per group, from :meth:`device_indices_by_group`.
            owned_device_indices: SGLang's slots for the same tokens; the first group's if not given.
            producer_stream: the stream that used these slots last, and will use them next.
        """
        indices = [device_indices] if torch.is_tensor(device_indices) else list(device_indices)
        size = operation.pinned.chunk_size if operation.pinned else self.chunk_size
        loaded = False
        try:
            with self._on_stream(producer_stream):
                loaded = self._load(operation, indices, local_hit_tokens)
        except Exception as exc:  # reported by the outcome, so that every rank takes part in what follows
            expected = isinstance(exc, LMCacheError)
            logger.warning("request %s: not loaded: %s", operation.request_id, exc, exc_info=not expected)
        return LMCacheLoadOperation(
            request_id=operation.request_id,
            start=local_hit_tokens // size * size,
            end=operation.total_hit_tokens or 0,
            future=Outcome(loaded),
            local_hit_tokens=local_hit_tokens,
            device_indices=indices[0] if owned_device_indices is None else owned_device_indices,
            lookup=operation,
        )

    def _load(self, operation: LMCacheLookupOperation, indices: list[torch.Tensor], local: int) -> bool:
        pinned, total = operation.pinned, operation.total_hit_tokens or 0
        if pinned is None or not operation.locks_held:
            raise LMCacheError("expected a lookup that found something and is pinned")
        first = local // pinned.chunk_size
        skipped = (local - first * pinned.chunk_size) // self.page_size
        blocks = [self._blocks(slots, total - local) for slots in self._per_group(indices)]
        item = LoadItem(
            request=operation.request_id,
            lease=pinned.lease,
            epoch=pinned.epoch,
            slots=[slots[2 * first :] for slots in pinned.slots],
            blocks=[[0] * skipped + mine for mine in blocks],
            skip_blocks=[skipped] * len(blocks),
        )
        return not self._context.load([item])

    def _per_group(self, indices: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(indices) != len(self._swa):
            raise LayoutError(f"slots of {len(indices)} groups: expected {len(self._swa)}")
        return indices

    def _blocks(self, slots: torch.Tensor, tokens: int) -> list[int]:
        if slots.numel() != tokens or tokens % self.page_size:
            raise LayoutError(f"{slots.numel()} slots: expected those of {tokens} tokens, whole pages")
        return pools.blocks_of(slots, self.page_size)

    def _on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Copies are queued after what is on ``stream``, which may still read the slots."""
        if stream is None or self._device.type == "cpu":
            return nullcontext()
        on: AbstractContextManager[Any] = torch.get_device_module(self._device).stream(stream)
        return on

    def prepare_load_on_stream(self, operation: LMCacheLoadOperation, stream: Any) -> bool:
        """Whether what ``stream`` does next may use the loaded slots. Collective.

        If not, no rank writes to them any more, and the load has failed.
        """
        if self._mesh.all(self._ended_well(operation)):
            return True
        operation.result = False
        self._unpin(operation.lookup)
        return False

    def complete_load(self, operation: LMCacheLoadOperation, *, synchronize: bool = True) -> bool:
        """Whether the load succeeded on every rank. Collective if ``synchronize``; else this rank's outcome."""
        if operation.result is None:
            success = self._ended_well(operation)
            operation.result = self._mesh.all(success) if synchronize else success
            if operation.result:  # each rank gave its own pins back
                operation.lookup.locks_held = False
                self._lookups.pop(operation.request_id, None)
            else:
                self._unpin(operation.lookup)
        return operation.result

    def _ended_well(self, operation: LMCacheLoadOperation | LMCacheStoreOperation) -> bool:
        try:
            return operation.future.result(0.0)
        except TimeoutError:
            return False

    # ---- store

    def get_store_start(self, request_id: str, end: int) -> int:
        """How many of the first ``end`` tokens need no store, whole chunks."""
        size = self.chunk_size
        return min(self._stored.get(request_id, 0), end // size * size) // size * size

    def submit_store(
        self,
        request_id: str,
        token_ids: Sequence[int],
        device_indices: Sequence[torch.Tensor] | torch.Tensor,
        *,
        device_indices_start: int,
        cache_salt: str,
    ) -> LMCacheStoreOperation | None:
        """Begin to store the complete chunks of ``token_ids``, as far as they need it. Collective.

        Args:
            device_indices: per group, the slots of the tokens from ``device_indices_start`` on.
            cache_salt: from :meth:`build_cache_salt`.

        Returns:
            None if there is nothing to store, or a rank cannot: then no rank does.
        """
        size = self.chunk_size
        end = len(token_ids) // size * size
        start = self.get_store_start(request_id, end)
        if end <= start:
            return None
        indices = [device_indices] if torch.is_tensor(device_indices) else list(device_indices)
        item: StoreItem | None = None
        try:
            item = self._item(token_ids[:end], start, indices, device_indices_start, cache_salt)
        except (LMCacheError, ValueError, OverflowError) as exc:
            logger.debug("request %s: not stored: %s", request_id, exc)
        if not self._mesh.all(item is not None and bool(item.hashes)) or item is None:
            return None
        future = self._stores.submit(item) if self._writes else Outcome(True)
        self._stored[request_id] = end
        return LMCacheStoreOperation(request_id, start, end, future)

    def _item(
        self, tokens: Sequence[int], start: int, indices: list[torch.Tensor], first: int, cache_salt: str
    ) -> StoreItem:
        """Chunks of which every group has all pages: others would be a hit that cannot be loaded."""
        if not self._context.client.up:
            raise LMCacheError(f"no session: {self._context.client.reason}")
        size, page = self.chunk_size, self.page_size
        salt, extra = identity.split_cache_salt(cache_salt)
        scope = Scope(chunk_size=size, salt=salt, lora=extra)
        hashes = chunk_hashes(tokens, scope)[start // size :]
        blocks = [
            self._blocks(slots[start - first : len(tokens) - first], len(tokens) - start)
            for slots in self._per_group(indices)
        ]
        n = size // page
        whole = [i for i in range(len(hashes)) if all(0 not in mine[i * n : (i + 1) * n] for mine in blocks)]
        return StoreItem(
            chunk_size=size,
            hashes=[hashes[i] for i in whole],
            blocks=[[block for i in whole for block in mine[i * n : (i + 1) * n]] for mine in blocks],
            account=account_id(salt),
        )

    def complete_store(self, operation: LMCacheStoreOperation, *, synchronize: bool = True) -> bool:
        """Whether the store succeeded on every rank; what failed may be submitted again. Collective if
        ``synchronize``."""
        if operation.result is None:
            success = self._ended_well(operation)
            operation.result = self._mesh.all(success) if synchronize else success
            if not operation.result and self._stored.get(operation.request_id) == operation.end:
                self._stored[operation.request_id] = operation.start
        return operation.result

    # ---- ends

    def finish_request(self, request_id: str) -> None:
        """A request ended, in whatever way: give back all that the server holds for it."""
        self.end_session(request_id)
        self._stored.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        """As :meth:`finish_request`, but what was stored for it is remembered."""
        operation = self._lookups.pop(request_id, None)
        if operation is not None:
            operation.locks_held = False
        if self._leader is not None:
            self._leader.end(request_id)

    def end_all_sessions(self) -> None:
        for request_id in {*self._lookups, *(self._leader.asked if self._leader else ())}:
            self.end_session(request_id)

    def clear(self) -> bool:
        """Drop everything that the server holds, of whichever engine; whether it did. Collective."""
        return self._mesh.all(self._leader.clear() if self._leader else True)

    def close(self) -> None:
        """End all requests, stores under way and the sessions. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self.end_all_sessions()
        self._stores.close()
        self._context.close()
        if self._leader is not None:
            self._leader.client.close()
