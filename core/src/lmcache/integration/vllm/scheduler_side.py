"""Scheduler side: which tokens are cached, what to load, what to store. Knows no tensors.

One :class:`Tracked` per request lives from the first lookup until the request is finished. A lookup pins what
it finds; the pins end when the load is done (the worker releases them), when the load is not wanted after
all, or with the request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.keys import MediaItem, Scope, account_id, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed, expect

logger = init_logger(__name__)

TAG_PREFIX = "lmcache.tag."
SKIP_SAVE = "lmcache.skip_save"
MAX_OFFLOAD = "lmcache.max_offload_tokens"
_NAP_SECONDS = 0.005
"""What a lookup may take in a step that has nothing else to do, and the least time between two asked for nothing."""
_PATIENCE = 8
"""A fetch that took a while already may go on for another eighth of that before it is asked for again."""


@dataclass(slots=True)
class Hit:
    """What a lookup found: ``chunks`` from chunk ``start`` on, pinned under ``lease``."""

    computed: int
    start: int
    chunks: int
    lease: int
    found: m.Found


@dataclass(slots=True)
class Fetch:
    """A lookup for which the server fetches from below L1: asked for again under ``lease``.

    ``again``: not before, unless the engine is idle. Times are ``time.monotonic``'s.
    """

    computed: int
    lease: int
    began: float
    again: float = 0.0


@dataclass(slots=True)
class Tracked:
    """One request."""

    request: Any
    chunk_size: int
    scope: Scope
    cacheable: bool
    account: str
    store_limit: int | None
    """Store no token from this index on; None: no limit of the user's."""
    hashes: list[bytes] = field(default_factory=list)
    session: str = ""
    sent: int = 0
    """Digests that the server holds for this request in session ``session``."""
    hit: Hit | None = None
    fetch: Fetch | None = None
    waits_until: float | None = None
    """Until when it may be put off, from its first lookup on, however many fetches that takes."""
    stored: int = 0
    """Chunks that need no store: found on the server, or stored by us."""
    bypass: bool = False
    """A load of this request failed: it is not looked up again."""


@dataclass(slots=True)
class StepPlan:
    """What the workers shall do in one step, number ``step``.

    ``loads`` come with the slots of all ranks. A worker whose load failed in step ``clean_from`` or later
    stores nothing: the plan was made before the scheduler knew, and may name blocks computed from what was
    not loaded.
    """

    step: int
    clean_from: int
    loads: list[tuple[LoadItem, list[list[list[int]]]]] = field(default_factory=list)
    stores: list[StoreItem] = field(default_factory=list)


class SchedulerSide:
    """Plans loads and stores for one engine.

    Args:
        client: a session of role "scheduler".
        block_sizes: tokens per block of each KV group.
        ranks: number of workers. With several, a load may fail on one and succeed on the others, so nothing is
            stored until all have confirmed the loads that went before.
        loads, stores: whether this engine may do either (vLLM's kv_role).
        save_decode: whether chunks that hold generated tokens are stored too.
        lora_identity: maps a request's adapter to text that changes with it.
        prefetch_timeout: seconds that a request may wait for what the server fetches from below L1.
        min_tokens: a hit of fewer tokens is not worth its load, and counts as none.
        media_by_content: whether an item's identifier tells its content. If not, it is one of this engine's only.
        windows: tokens of the windows of attention behind which the engine frees pages.
    """

    def __init__(
        self,
        client: CacheClient,
        block_sizes: Sequence[int],
        *,
        ranks: int = 1,
        loads: bool = True,
        stores: bool = True,
        save_decode: bool = False,
        lora_identity: Any = lambda lora: "" if lora is None else str(lora),
        prefetch_timeout: float = 2.0,
        min_tokens: int = 0,
        media_by_content: bool = True,
        windows: Sequence[int] = (),
    ) -> None:
        self.client = client
        self._block_sizes = list(block_sizes)
        self._loads = loads
        self._stores = stores
        self._save_decode = save_decode
        self._lora_identity = lora_identity
        self._prefetch_timeout = prefetch_timeout
        self._min_tokens = min_tokens
        self._shortest_window = min(windows, default=0)
        self._media_prefix = "" if media_by_content else f"{secrets.token_hex(16)}:"
        self._scheduling = False
        self._busy = False
        """The last step ran something. A lookup that waits would then keep it waiting, too."""
        self._napped = False
        """A lookup of this step has waited."""
        self._tracked: dict[str, Tracked] = {}
        self._ranks = ranks
        self._era: dict[str, str] = {}
        """Part of every scope: what was stored before the last :meth:`forget` is not found any more."""
        self._plan = StepPlan(step=1, clean_from=0)
        self._unconfirmed = 0
        """Last step that loads and that not all ranks have confirmed; 0: none."""

    # ---- lookup

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Tokens beyond the first ``computed`` whose KV the cache holds; None: not known yet, ask again.

        Safe to ask any number of times.
        """
        try:
            return self._matched_tokens(request, computed)
        except Exception:  # a fault of ours costs this request its hit, not the engine its life
            logger.exception("request %s: lookup", request.request_id)
            tracked = self._tracked.get(request.request_id)
            if tracked is not None:
                tracked.cacheable = False
            return 0

    def _matched_tokens(self, request: Any, computed: int) -> int | None:
        tracked = self._track(request)
        if tracked is None or not tracked.cacheable or tracked.bypass or not self.client.up:
            return 0
        if not self._loads or request.skip_reading_prefix_cache:
            return 0
        if tracked.hit is None or tracked.hit.computed != computed or tracked.session != self.client.session:
            self._drop_hit(tracked, keep_fetch=computed)
            self._lookup(tracked, computed)
        if tracked.fetch is not None:
            return None
        hit = tracked.hit
        if hit is None:
            return 0
        # At least one token has to be computed, or there is nothing to sample from.
        end = min((hit.start + hit.chunks) * tracked.chunk_size, int(request.num_tokens) - 1)
        tokens = max(0, end - computed)
        return tokens if tokens >= self._min_tokens else 0

    def _lookup(self, tracked: Tracked, computed: int) -> None:
        self._hash(tracked, tracked.request.num_tokens)
        start = computed // tracked.chunk_size
        tracked.stored = start
        if len(tracked.hashes) <= start:
            return
        now = time.monotonic()
        if tracked.waits_until is None:
            tracked.waits_until = now + self._prefetch_timeout
        fetch = tracked.fetch or Fetch(computed, self.client.new_lease(), now)
        wait = self._patience(fetch, now, tracked.waits_until)
        if wait is None:
            return
        tracked.fetch = None
        try:
            found = self._ask(tracked, start, fetch.lease, wait)
        except LMCacheError as exc:
            logger.debug("request %s: lookup failed: %s", tracked.request.request_id, exc)
            return
        if found.pending:
            tracked.fetch = fetch
        elif found.chunks:
            tracked.hit = Hit(computed, start, found.chunks, fetch.lease, found)
            tracked.stored = start + found.chunks

    def _patience(self, fetch: Fetch, now: float, until: float) -> float | None:
        """How long the server may take to answer, negative for what it has now; None: not to be asked yet.

        An idle engine asks without a pause, but lets the server wait: neither spins, and what was fetched is used
        at once. A busy one must not be kept waiting, and asks now and then.
        """
        if now >= until:
            return -1.0
        if not self._busy and not self._napped:
            self._napped = True
            return min(_NAP_SECONDS, until - now)
        if now < fetch.again:
            return None
        fetch.again = now + max(_NAP_SECONDS, (now - fetch.began) / _PATIENCE)
        return 0.0

    def _ask(self, tracked: Tracked, start: int, lease: int, wait: float) -> m.Found:
        if tracked.session != self.client.session:
            tracked.session, tracked.sent = self.client.session, 0
        message = m.Lookup(
            session=tracked.session,
            request=tracked.request.request_id,
            lease=lease,
            hashes=b"".join(tracked.hashes[tracked.sent :]),
            known=tracked.sent,
            start=start,
            wait=wait,
            account=tracked.account,
        )
        try:
            found = expect(m.Found, self.client.call(message)[0])
        except RequestFailed as exc:
            if exc.code == "unknown_request":
                tracked.sent = 0
            raise
        tracked.sent = len(tracked.hashes)
        return found

    def _drop_hit(self, tracked: Tracked, keep_fetch: int | None = None) -> None:
        """Give back what was found, and what is being fetched but for a fetch that began at ``keep_fetch``."""
        fetch = tracked.fetch
        if fetch is not None and (fetch.computed != keep_fetch or tracked.session != self.client.session):
            tracked.fetch = None
            self.client.post(m.Release(session=tracked.session, leases=[fetch.lease]))
        if tracked.hit is not None:
            self.client.post(m.Release(session=tracked.session, leases=[tracked.hit.lease]))
            tracked.hit = None

    # ---- plan

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        """vLLM allocated ``blocks`` (per group) for a request that takes ``external`` tokens from here."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            tracked.waits_until = None  # preempted, it may wait again
        if external <= 0:
            if tracked is not None:
                self._drop_hit(tracked)
            return
        if tracked is None or tracked.hit is None:
            self._plan_failure(request, blocks)
            return
        hit, tracked.hit = tracked.hit, None
        first, last = hit.start * tracked.chunk_size, (hit.start + hit.chunks) * tracked.chunk_size
        item = LoadItem(
            request=request.request_id,
            lease=hit.lease,
            epoch=hit.found.epoch,
            slots=[],
            blocks=[
                list(ids[first // bs : last // bs]) for ids, bs in zip(blocks, self._block_sizes, strict=True)
            ],
            skip_blocks=[(hit.computed - first) // bs for bs in self._block_sizes],
        )
        self._plan.loads.append((item, hit.found.slots))

    def _plan_failure(self, request: Any, blocks: tuple[list[int], ...]) -> None:
        """vLLM counts on tokens that we know nothing of: let that load fail, so that they are recomputed."""
        logger.error("request %s: vLLM expects a load that was never promised", request.request_id)
        item = LoadItem(request.request_id, 0, "", [], [list(ids) for ids in blocks], [0] * len(blocks))
        self._plan.loads.append((item, [[[] for _ in blocks] for _ in range(self._ranks)]))

    def scheduled(
        self, request_id: str, computed: int, new_tokens: int, blocks: tuple[list[int], ...]
    ) -> None:
        """In this step a request runs ``new_tokens`` after its first ``computed``: plan what to store."""
        self._scheduling = True
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        try:
            self._plan_stores(tracked, computed, new_tokens, blocks)
        except Exception:  # as in a lookup
            logger.exception("request %s: stores", request_id)
            tracked.cacheable = False

    def _plan_stores(
        self, tracked: Tracked, computed: int, new_tokens: int, blocks: tuple[list[int], ...]
    ) -> None:
        size = tracked.chunk_size
        if computed + 1 < tracked.stored * size:
            # After a failed load vLLM goes back; what was counted as stored from there on may not have been.
            # (One token less is no failure but a full hit, whose last token is computed again.)
            tracked.stored = computed // size
        if not tracked.cacheable or not self._stores or not self.client.up:
            return
        if self._ranks > 1 and (self._unconfirmed or self._plan.loads):
            return
        request = tracked.request
        # Scheduled tokens may be guesses of a draft model; only those of the prompt, and those computed in
        # earlier steps, are sure.
        sure = min(computed + new_tokens, request.num_prompt_tokens)
        if self._save_decode:
            sure = max(sure, computed)
        if tracked.store_limit is not None:
            sure = min(sure, tracked.store_limit)
        end = sure // size
        if end <= tracked.stored:
            return
        self._hash(tracked, sure)
        end = min(end, len(tracked.hashes))  # of what runs ahead of its tokens, the digests are not known yet
        if end <= tracked.stored:
            return
        begin, tracked.stored = tracked.stored, end
        self._plan.stores.append(
            StoreItem(
                chunk_size=size,
                hashes=tracked.hashes[begin:end],
                blocks=[
                    list(ids[begin * size // bs : end * size // bs])
                    for ids, bs in zip(blocks, self._block_sizes, strict=True)
                ],
                account=tracked.account,
            )
        )

    def take_plan(self) -> StepPlan:
        """The step's plan; a new one begins."""
        plan = self._plan
        self._plan = StepPlan(step=plan.step + 1, clean_from=plan.clean_from)
        self._busy, self._scheduling, self._napped = self._scheduling, False, False
        if plan.loads:
            self._unconfirmed = plan.step
        return plan

    def confirmed(self, step: int) -> None:
        """All ranks have done the loads of ``step``."""
        if step >= self._unconfirmed:
            self._unconfirmed = 0

    # ---- ends

    def failed(self, request_ids: Iterable[str]) -> None:
        """Loads failed, those of ``request_ids`` as a whole: these are recomputed and not looked up again."""
        self._plan.clean_from = self._plan.step
        for ident in request_ids:
            tracked = self._tracked.get(ident)
            if tracked is not None:
                tracked.bypass = True
                tracked.stored = 0

    def finished(self, request_id: str) -> None:
        """A request ended, in whatever way: give back all it holds."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.session and tracked.session == self.client.session:
            self.client.post(m.EndRequest(session=tracked.session, requests=[request_id]))

    def forget(self) -> None:
        """Use nothing that was stored until now: the engine's weights may be others. Requests under way, whose
        digests are of before, run uncached."""
        self._era = {"lmcache.reset": secrets.token_hex(16)}
        for tracked in self._tracked.values():
            self._drop_hit(tracked)
            tracked.cacheable = False

    # ---- helpers

    def _track(self, request: Any) -> Tracked | None:
        known = self._tracked.get(request.request_id)
        chunk_size = self.client.welcome.chunk_size if self.client.welcome is not None else 0
        if known is not None and known.chunk_size == chunk_size:
            return known
        if not chunk_size:
            return None  # the server was never seen: its chunk size is not known
        if 0 < self._shortest_window < chunk_size:
            _warn_of_window(chunk_size, self._shortest_window)
        params = request.kv_transfer_params or {}
        cacheable = request.prompt_token_ids is not None and request.prompt_embeds is None
        lora = ""
        try:
            lora = self._lora_identity(request.lora_request)
        except (OSError, LMCacheError) as exc:
            warn_once(
                logger, f"lora:{exc}", "requests with adapter %s run uncached: %s", request.lora_request, exc
            )
            cacheable = False
        tracked = Tracked(
            request=request,
            chunk_size=chunk_size,
            scope=Scope(
                chunk_size=chunk_size,
                lora=lora,
                salt=request.cache_salt or "",
                tags=_tags(params) | self._era,
            ),
            cacheable=cacheable,
            account=account_id(request.cache_salt or ""),
            store_limit=_store_limit(params),
        )
        self._tracked[request.request_id] = tracked
        return tracked

    def _hash(self, tracked: Tracked, tokens: int) -> None:
        size = tracked.chunk_size
        if tokens // size > len(tracked.hashes):
            ids = tracked.request.all_token_ids[: tokens - tokens % size]
            # Asked for each time: a session's list grows with its prompt.
            media = _media(tracked.request.mm_features, self._media_prefix)
            tracked.hashes = chunk_hashes(ids, tracked.scope, media=media, known=tracked.hashes)

    @property
    def tracked_requests(self) -> int:
        """Number of requests that are being followed."""
        return len(self._tracked)


def _warn_of_window(chunk_size: int, window: int) -> None:
    """vLLM frees pages that the window has left: a chunk that is computed in two steps may be without its first ones
    when it is complete, and is not stored then."""
    warn_once(
        logger,
        f"window:{chunk_size}:{window}",
        "chunk_size %d is longer than this model's window of %d tokens: a chunk that is computed in several steps may"
        " not be stored, and nothing after it is found; set chunk_size to at most %d",
        chunk_size, window, window,
    )  # fmt: skip


def _tags(params: Mapping[str, Any]) -> dict[str, str]:
    return {k.removeprefix(TAG_PREFIX): str(v) for k, v in params.items() if k.startswith(TAG_PREFIX)}


def _store_limit(params: Mapping[str, Any]) -> int | None:
    limit = 0 if params.get(SKIP_SAVE) else params.get(MAX_OFFLOAD)
    if limit is None or (isinstance(limit, int) and limit >= 0):
        return limit
    warn_once(
        logger,
        MAX_OFFLOAD,
        "%s=%r: expected a number of tokens; nothing of such requests is stored",
        MAX_OFFLOAD,
        limit,
    )
    return 0  # whoever sets a limit wants no more than that stored


def _media(features: Sequence[Any] | None, prefix: str) -> tuple[MediaItem, ...]:
    return tuple(
        MediaItem(f.mm_position.offset, f.mm_position.length, prefix + f.identifier) for f in features or ()
    )
