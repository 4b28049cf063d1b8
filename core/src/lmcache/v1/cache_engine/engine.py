"""The cache engine of a process that computes KV: store, look up, retrieve. ``docs/engine.md`` says how to use it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.cache_engine import layerwise
from lmcache.v1.cache_engine.chunks import Held, give_back
from lmcache.v1.cache_engine.core import EngineCore
from lmcache.v1.cache_engine.lookups import prefix_tokens
from lmcache.v1.cache_engine.requests import Plan, columns, mask_of, padded
from lmcache.v1.cache_engine.token_database import Chunk
from lmcache.v1.config import L1_NAME, places

__all__ = ["LMCacheEngine"]


class LMCacheEngine(EngineCore):
    """KV of token prefixes, kept in host memory and in tiers below it.

    Thread-safe. Every wait has a deadline. Lack of room and faults of tiers cost hits, never an error; an error of the
    connector is raised after all memory is given back. Arguments are those of :class:`EngineCore`.
    """

    # --- store --------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Any = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Any = None,
        **kwargs: Any,
    ) -> None:
        """Keep the KV of ``tokens``: as many leading chunks as there is room for.

        Args:
            tokens: Token ids; or
            hashes, offsets: Digests of chunks and tokens of each, as ``token_database.chunks`` makes them.
            mask: False for a number of leading tokens, whole chunks, that are kept already. Not with hashes.
            kwargs: ``request_configs``, and what the connector takes (``kvcaches``, ``slot_mapping``, …).

        Raises:
            ValueError: The mask is none.
        """
        plan = self._plan(tokens, hashes, offsets, mask, kwargs.get("request_configs"))
        held = self._reserve(plan, kwargs)
        try:
            if held:
                objs, starts, ends = columns(held)
                self.gpu_connector.batched_from_gpu(objs, starts, ends, **kwargs)
                self._commit(plan, held)
        finally:
            give_back(held)

    def store_layer(self, tokens: Any, mask: Any = None, **kwargs: Any) -> Generator[None, None, None]:
        """As :meth:`store`, layer by layer: a generator of ``layers + 1`` steps (``docs/engine.md``)."""
        plan = self._plan(tokens, None, None, mask, kwargs.get("request_configs"))
        return layerwise.store_steps(
            self.gpu_connector,
            lambda: self._reserve(plan, kwargs),
            self._layers(),
            kwargs,
            lambda held: self._commit(plan, held),
        )

    def _reserve(self, plan: Plan, kwargs: Mapping[str, Any]) -> list[Held]:
        """Memory for what is to be stored now."""
        if self._frozen or not self.ranks.stores or plan.request.skip_save or not self._ready(kwargs):
            return []
        with self.stack.lock:
            self.lookups.sweep()
        left_out = {*range(plan.skipped), *padded(plan.chain, kwargs.get("slot_mapping"))}
        return self.chunk_store.reserve(plan.chain, plan.account, left_out)

    def _layers(self) -> int:
        return int(self.metadata.kv_shape[0])

    def _commit(self, plan: Plan, held: Sequence[Held]) -> None:
        new = self.chunk_store.commit(held)
        if self.events is not None and plan.tokens is not None:
            self.events.stored(plan.tokens, plan.chain, new)

    # --- retrieve -----------------------------------------------------------------------------------------

    def retrieve(self, tokens: Any, mask: Any = None, **kwargs: Any) -> Any:
        """Write kept KV of ``tokens`` to the engine's pages, as far as the prefix goes.

        Args:
            tokens: Token ids.
            mask: False for a number of leading tokens, whole chunks, that the engine has already.
            kwargs: ``request_configs``; ``req_id``, the id of a lookup whose loads are waited for; and what the
                connector takes.

        Returns:
            A tensor of bool on the host, one per token: true where KV was written.

        Raises:
            ValueError: The mask is none.
        """
        plan = self._plan(tokens, None, None, mask, kwargs.get("request_configs"))
        held = self._held(plan, kwargs)
        try:
            if held:
                objs, starts, ends = columns(held)
                self.gpu_connector.batched_to_gpu(objs, starts, ends, **kwargs)
            return mask_of(plan, held)
        finally:
            give_back(held)

    def retrieve_layer(self, tokens: Any, mask: Any = None, **kwargs: Any) -> Generator[Any, None, None]:
        """As :meth:`retrieve`, layer by layer: a generator of ``layers + 2`` steps (``docs/engine.md``). The first
        gives how many tokens will come, the last the mask."""
        plan = self._plan(tokens, None, None, mask, kwargs.get("request_configs"))
        return layerwise.retrieve_steps(
            self.gpu_connector,
            lambda: self._held(plan, kwargs),
            self._layers(),
            kwargs,
            lambda held: mask_of(plan, held),
        )

    def _held(self, plan: Plan, kwargs: Mapping[str, Any]) -> list[Held]:
        """The chunks that can be given out now, held."""
        if not self._ready(kwargs):
            return []
        store, seconds = self.chunk_store, self.config.blocking_timeout_secs
        until = time.monotonic() + seconds
        with self.stack.lock:
            self.lookups.sweep()
            lookup = self.lookups.get(kwargs.get("req_id"))
        if lookup is not None and lookup.fetch is not None:
            lookup.fetch.wait(seconds)

        def read() -> list[Held]:
            if self._frozen:
                return store.read(plan.wanted)
            return store.read_through(plan.wanted, plan.account, until - time.monotonic())

        held = self.ranks.shared(read, plan.wanted, store.shapes)
        found = plan.skipped + len(held)
        if held and not prefix_tokens(plan.chain, found, self.config.min_retrieve_tokens):
            give_back(held)
            return []
        return held

    # --- lookup -------------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Any = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        search_range: Sequence[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: Mapping[str, Any] | None = None,
    ) -> int:
        """How many leading tokens are kept, in any of the places asked for.

        Args:
            search_range: Names of places (``docs/configuration.md``); None: all that are read from.
            pin: Keep what is in L1 there, and begin to load what is below, until :meth:`lookup_unpin`.
            lookup_id: The request; wanted with ``pin``.

        Raises:
            ConfigError: A place is unknown, or ``pin`` comes without an id.
        """
        if pin:
            _check_id(lookup_id)
        plan, where = self._asked(tokens, hashes, offsets, search_range, request_configs)
        if not plan.chain or not self._ready({}):
            return 0
        least = self.config.min_retrieve_tokens
        found = self.chunk_store.found(plan.chain, self.config.lookup_timeout_ms / 1000, where)
        tokens_found = prefix_tokens(plan.chain, found, least)
        if pin and lookup_id and tokens_found:  # some may have gone since they were found
            tokens_found = self._pin(lookup_id, plan, plan.chain[:found], where)
            if not tokens_found:
                self.lookup_unpin(lookup_id)
        return tokens_found

    def async_lookup_and_prefetch(
        self,
        lookup_id: str,
        tokens: Any = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        search_range: Sequence[str] | None = None,
        pin: bool = True,
        request_configs: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to bring the prefix to L1 and keep it there; :meth:`lookup_result` tells how far that goes.

        Args:
            pin: Taken for compatibility: what was loaded for a request stays until :meth:`lookup_unpin`.
        """
        _check_id(lookup_id)
        plan, where = self._asked(tokens, hashes, offsets, search_range, request_configs)
        if self._ready({}):
            self._pin(lookup_id, plan, plan.chain, where)

    def lookup_result(self, lookup_id: str, seconds: float = 0.0) -> int | None:
        """Prefix tokens that are in L1 for a lookup; None: it is still loading after ``seconds``. 0 for an id that is
        unknown or was given back."""
        if not self._ready({}):
            return 0
        with self.stack.lock:
            lookup = self.lookups.get(lookup_id)
        if lookup is None:
            return 0
        if lookup.fetch is not None and not lookup.fetch.wait(seconds):
            return None
        return lookup.tokens()

    def lookup_unpin(self, lookup_id: str | Iterable[str]) -> None:
        """End lookups: pins go, loads under way stop. Harmless for an id that is unknown."""
        if self._store is None or not self.is_here:
            return
        ids = [lookup_id] if isinstance(lookup_id, str) else list(lookup_id)
        with self.stack.lock:
            for one in ids:
                self.lookups.release(one)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        """Older name of :meth:`lookup_unpin`, for a request that was aborted."""
        self.lookup_unpin(lookup_id)

    def _asked(
        self, tokens: Any, hashes: Any, offsets: Any, search_range: Sequence[str] | None, configs: Any
    ) -> tuple[Plan, set[str] | None]:
        plan = self._plan(tokens, hashes, offsets, None, configs)
        where = places(search_range, self.stack.specs, "search_range")
        if where is not None and self._reads_from is not None:
            where &= self._reads_from
        if self._frozen:  # nothing below will be loaded, so nothing there is promised
            return plan, {L1_NAME} if where is None else where & {L1_NAME}
        return plan, self._reads_from if where is None else where

    def _pin(self, lookup_id: str, plan: Plan, chunks: list[Chunk], where: set[str] | None) -> int:
        """Pin and load; the tokens that this can come to."""
        below = not self._frozen and where != {L1_NAME}
        seconds = self.config.blocking_timeout_secs if below else None
        with self.stack.lock:
            lookup = self.lookups.begin(
                lookup_id, chunks, plan.account, self.config.min_retrieve_tokens, seconds, where
            )
            return lookup.promised()


def _check_id(lookup_id: object) -> None:
    """What is kept under another kind of id would not be found to be given back."""
    if not isinstance(lookup_id, str) or not lookup_id:
        raise ConfigError(bad_value("lookup_id", lookup_id, "the request's id, a text"))
