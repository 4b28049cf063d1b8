"""lmcache-driven transfer: the server moves the pages, through its own mapping of the engine's memory.

A store is one round trip that ends when the server has queued its copy, then a commit once the device has done
it; a load is one round trip that ends when the device has done it. Events keep the order: the server's stream
waits for what the engine has queued. The engine's stream never waits for the server's: if the server died, the
event would not come, and the engine's work would fail or hang with it. So the engine's thread waits for the
event of a copy, as long as the server lives. Nothing waits for a whole device.

A server that was asked to load and does not answer might write into pages that are somebody else's by then.
So a load that fails without an answer is fenced: either the server says that nothing of ours is under way, or
it is dead. Failing both, the engine must stop (:class:`PagesUnsafe`); a wrong token would be worse.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.base import (
    Binding,
    LoadItem,
    PagesUnsafe,
    TransferContext,
    check_chunks,
)
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages, byte_pages
from lmcache.v1.platform import get_device_spec, get_event_ipc_backend
from lmcache.v1.platform.base.device_spec import DeviceSpec, MPTransferMode
from lmcache.v1.platform.kv_wire import ExportedCaches, export_kv_caches
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, NotSent, RequestFailed, Unavailable, expect

logger = init_logger(__name__)

_MAP_SECONDS = 120.0
"""For the server to import torch and its device plugins, and to map the memory."""
_FENCE_TRY_SECONDS = 1.0
_STORE_SECONDS = 30.0
"""For the device to do a store's copy, and what the engine has queued before it."""
_LONGEST_NAP = 0.001
_FENCE_PAUSE_SECONDS = 0.05


class LMCacheDrivenTransferContext(TransferContext):
    """Stores and loads pages of one worker, which the server copies.

    Raises:
        ValueError: if the device lacks what this mode needs; it lists what is missing.
    """

    mode: ClassVar[MPTransferMode] = MPTransferMode.LMCACHE_DRIVEN
    maps_pool: ClassVar[bool] = False

    def __init__(
        self, address: str, engine: str, groups: Sequence[KVGroupPages], *args: Any, **kwargs: Any
    ) -> None:
        self._device = _one_device(groups)
        self._spec = _capable_spec(self._device)
        self._events = get_event_ipc_backend(self._device)
        self._events.check_event_support(self._device)
        self._export: ExportedCaches = export_kv_caches(
            [page for group in groups for page in byte_pages(group)]
        )
        super().__init__(address, engine, groups, *args, **kwargs)

    def close(self) -> None:
        """Close the session, wait until the server moves nothing of ours. The tensors may go away afterwards."""
        bound, was_up = self._bound, self.client.up
        super().close()
        if was_up and not self._fenced(bound, 0, self.client.options.control_timeout):
            logger.warning(
                "cache server %s: no word that it reads this engine's KV no more", self.client.address
            )
        self._export.close()

    @property
    def path(self) -> str:
        """ "device", or "down" while there is no session."""
        return "device" if self.client.up else "down"

    def _announce(self, client: CacheClient, namespaces: list[Namespace]) -> None:
        modes = client.welcome.modes if client.welcome is not None else ()
        if self.mode.value not in modes:
            raise LMCacheError(
                f"transfer mode {self.mode.value}: the server serves {', '.join(modes)} only; start it with"
                " --supported-transfer-mode auto, or use engine_driven"
            )
        if client.attachment is None or not client.attachment.watched:
            raise LMCacheError(
                f"transfer mode {self.mode.value}: the server must be on this host and hand out its socket"
                " (no --shm off), so that each side learns of the other's death; use engine_driven"
            )
        at = 0
        exported = []
        for namespace in namespaces:
            layers = len(namespace.page_bytes)
            exported.append(self._export[at : at + layers])
            at += layers
        client.register(
            m.Register(
                session=client.session,
                namespaces=namespaces,
                mapped=False,
                device=m.DeviceExport(groups=exported),
            ),
            _MAP_SECONDS,
        )

    # ---- store

    def _store(
        self, bound: Binding, groups: Sequence[KVGroupPages], wanted: list[dict[bytes, list[int]]], lease: int,
        account: str,
    ) -> int:  # fmt: skip
        self._check_place(bound, groups)
        nbytes = sum(len(w) * g.namespace.object_bytes for w, g in zip(wanted, groups, strict=True))
        request = m.DeviceStore(
            session=bound.session,
            lease=lease,
            hashes=[b"".join(mine) for mine in wanted],
            blocks=[[block for blocks in mine.values() for block in blocks] for mine in wanted],
            event=self._recorded(),
            account=account,
        )
        moved = expect(m.Moved, self.client.call(request, nbytes)[0])
        if not moved.count:
            return 0
        self._wait(moved.event)  # from here on the pages may be written again
        commit = m.Commit(session=bound.session, lease=lease, indexes=[])
        done = expect(m.Ok, self.client.call(commit)[0])
        self.counters.stored_chunks += done.count
        self.counters.stored_bytes += nbytes
        return done.count

    # ---- load

    def _load(self, bound: Binding, groups: Sequence[KVGroupPages], item: LoadItem) -> None:
        self._check_place(bound, groups)
        chunks = nbytes = 0
        skips = []
        for group, blocks, slots, skip in zip(groups, item.blocks, item.slots, item.skip_blocks, strict=True):
            count = check_chunks(group, blocks, slots)
            skips.append(_first_written(group, blocks, skip))
            chunks += count
            nbytes += count * group.namespace.object_bytes
        request = m.DeviceLoad(
            session=bound.session, lease=item.lease, blocks=item.blocks, skip=skips, event=self._recorded()
        )
        try:
            expect(m.Moved, self.client.call(request, nbytes)[0])
        except NotSent:
            raise
        except Unavailable:
            self._fence(bound, item)
            raise
        self.counters.loaded_chunks += chunks
        self.counters.loaded_bytes += nbytes

    def _fence(self, bound: Binding, item: LoadItem) -> None:
        """Return once the server cannot write into our pages any more.

        Raises:
            PagesUnsafe: if that cannot be told in time.
        """
        seconds = self.client.options.fence_timeout
        if not self._fenced(bound, item.lease, seconds):
            raise PagesUnsafe(
                f"cache server {self.client.address}: for {seconds:g} s it does not answer and is not dead, so it"
                f" may still write into KV pages of request {item.request}; restart this engine, or use"
                " engine_driven"
            )

    def _fenced(self, bound: Binding, lease: int, seconds: float) -> bool:
        """Wait until nothing moves for the session, or its server has ended; False if that is not known in time."""
        deadline = time.monotonic() + seconds
        channel = Channel(self.client.address)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if bound.attachment is None or bound.attachment.ended:
                    return True
                try:
                    fence = m.DeviceFence(session=bound.session, lease=lease)
                    expect(m.Ok, channel.call(fence, min(left, _FENCE_TRY_SECONDS))[0])
                    return True
                except (Unavailable, RequestFailed) as exc:
                    logger.debug("fence: %s", exc)
                    channel.reset()
                    time.sleep(min(left, _FENCE_PAUSE_SECONDS))
        finally:
            channel.close()
        return False

    # ---- events

    def _recorded(self) -> bytes:
        """The exported event of what is queued on the engine's stream now."""
        event = self._events.create_event(self._device)
        self._events.record_event(event, self._spec.current_stream(self._device))
        return self._events.export_event(event, self._device)

    def _wait(self, handle: bytes) -> None:
        """Until the server's stream has reached an event.

        Raises:
            LMCacheError: It will not, or not in time. Then the store is dropped: what the server may still read
                of pages that are written again is never published.
        """
        attachment = self.client.attachment
        deadline, nap = time.monotonic() + _STORE_SECONDS, 0.00002
        try:
            event = self._events.import_event(handle, self._device)
            while not self._events.query_event(event):
                if attachment is None or attachment.ended or not self.client.up:
                    raise LMCacheError("the server does not answer any more")
                if time.monotonic() > deadline:
                    raise LMCacheError(f"the server's copy is not done after {_STORE_SECONDS:g} s")
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        except (RuntimeError, TimeoutError) as exc:
            raise LMCacheError(f"event of the server: {exc}") from exc

    def _check_place(self, bound: Binding, groups: Sequence[KVGroupPages]) -> None:
        if groups is not bound.groups:
            raise LMCacheError("an engine whose pages move cannot be lmcache-driven; use engine_driven")


def _one_device(groups: Sequence[KVGroupPages]) -> str:
    devices = sorted({group.device for group in groups})
    if len(devices) != 1:
        raise ValueError(f"transfer mode lmcache_driven: KV groups on {devices}: expected one device")
    return devices[0]


def _capable_spec(device: str) -> DeviceSpec:
    kind = device.partition(":")[0]
    spec = get_device_spec(kind)
    if spec is None:
        raise ValueError(
            f"transfer mode lmcache_driven: no single backend serves device type {kind!r}: no KV-cache wrapper"
            " factory is registered; lmcache device list shows why, or use engine_driven"
        )
    missing = spec.missing_for_lmcache_driven()
    if missing or not spec.is_lmcache_driven_available():
        what = ", ".join(missing) or "is_lmcache_driven_available() is False"
        raise ValueError(
            f"transfer mode lmcache_driven: required platform capability checks failed for {spec.backend_name}:"
            f" {what}; use engine_driven or auto"
        )
    return spec


def _first_written(group: KVGroupPages, blocks: Sequence[int], skip: int) -> int:
    """Blocks to leave out at the beginning: those that the engine has, and those that hold nothing.

    Raises:
        LMCacheError: for a block outside the cache, or one that holds nothing among those that do.
    """
    first = skip
    while first < len(blocks) and blocks[first] == group.null_block:
        first += 1
    for block in blocks[first:]:
        if block == group.null_block or not 0 <= block < group.num_blocks:
            raise LMCacheError(
                f"block id {block}: expected 0..{group.num_blocks - 1}, and not the null block"
            )
    return first
