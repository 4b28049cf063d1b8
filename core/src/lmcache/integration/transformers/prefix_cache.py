"""A prompt's KV from the server into a ``DynamicCache``, and back: scheduler and worker in one process."""

from __future__ import annotations

import itertools
import secrets
import time
from types import TracebackType
from typing import Any

from transformers import DynamicCache

from lmcache.errors import LMCacheError
from lmcache.integration.transformers import identity, tensors
from lmcache.integration.transformers.guards import ModelWatch, check_generate
from lmcache.logging import init_logger
from lmcache.v1.keys import Scope, account_id, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    LoadItem,
    StoreItem,
)
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect
from lmcache.v1.protocol.endpoint import endpoint

logger = init_logger(__name__)

_WAIT_SECONDS = 0.5
"""What one lookup waits at the server: so much longer it takes to find out that the server is gone."""


class PrefixCache:
    """Loads and saves the KV of prompts of one model. A context manager, to be entered once: outside it
    all is a miss.

    Without a server, or when it goes away, everything is a miss: nothing the server does raises here, and it
    is found again by itself. Weights that change after construction make everything a miss as well. One
    sequence at a time, at positions from 0 on, without padding.

    Args:
        address: ``HOST:PORT`` or ``tcp://HOST:PORT`` of ``lmcache server``.
        model: a causal language model that keeps full attention in every layer, ready to run (``eval`` mode).
        salt: what else separates equal prompts, such as a tenant.
        tags: more of the same, by name.
        revision: identity of the weights, if the caller vouches for one; else their content is hashed here.
        options: time limits and the use of shared memory.
        prefetch_timeout: seconds that :meth:`load` waits at most for what the server fetches from tiers below L1.

    Raises:
        ConfigError, LayoutError: for an address that is none, or a model that cannot be cached; the text says
            why.
    """

    def __init__(
        self,
        address: str,
        model: Any,
        *,
        salt: str = "",
        tags: dict[str, str] | None = None,
        revision: str = "",
        options: ClientOptions | None = None,
        prefetch_timeout: float = 2.0,
    ) -> None:
        address = endpoint(address)
        identity.check_supported(model)
        self._model = model
        self._shape = identity.kv_shape(model)
        self._watch = ModelWatch(model, not revision, "make a new PrefixCache")
        self._salt, self._tags = salt, tags or {}
        self._prefetch_timeout = prefetch_timeout
        self._requests = itertools.count()
        self._wait = (options or ClientOptions()).control_timeout
        engine = f"transformers-{secrets.token_hex(8)}"
        pages = KVGroupPages(identity.namespace(model, self._shape, revision), 0, [], [])
        self._transfer = EngineDrivenTransferContext(address, engine, [pages], options=options)
        self._lookups = CacheClient(address, "scheduler", engine, options=options)

    def __enter__(self) -> PrefixCache:
        deadline = time.monotonic() + self._wait
        self._lookups.start()
        self._transfer.start(self._wait)
        self._lookups.wait(deadline - time.monotonic())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transfer.close()
        self._lookups.close()

    @property
    def path(self) -> str:
        """How bytes travel: "shared_memory", "frames", or "down" while there is no session."""
        return self._transfer.path if self._lookups.up else "down"

    def load(self, input_ids: Any) -> tuple[DynamicCache | None, int]:
        """The longest known prefix of a prompt, short of its last token, which is left to compute.

        Args:
            input_ids: int64 tensor ``[1, T]`` or ``[T]``, or a list of integers.

        Returns:
            The cache, of per layer K and V ``[1, kv_heads, tokens, head_size]``, and its number of tokens;
            ``(None, 0)`` if nothing is known.

        Raises:
            ConfigError: for several sequences at once. Nothing because of the server.
        """
        ids = tensors.token_ids(input_ids)
        group = self._group()
        if group is None or len(ids) < 2:
            return None, 0
        request = str(next(self._requests))
        try:
            return self._load(group, ids, request)
        except LMCacheError as exc:
            logger.debug("request %s: runs uncached: %s", request, exc)
            return None, 0
        finally:
            self._lookups.post(m.EndRequest(session=self._lookups.session, requests=[request]))

    def save(self, input_ids: Any, past_key_values: DynamicCache) -> int:
        """Store the KV of a sequence's complete chunks, as far as the server does not hold them.

        Args:
            input_ids: the tokens, as for :meth:`load`; may be more or fewer than ``past_key_values`` has.
            past_key_values: what the model made of them, per layer K and V ``[1, kv_heads, T, head_size]``.

        Returns:
            Number of tokens stored; 0 if the server holds all, has no room, or is away.

        Raises:
            ConfigError: for several sequences. LayoutError: for a cache that is not this model's. Nothing
            because of the server.
        """
        ids = tensors.token_ids(input_ids)
        layers = tensors.layers_of(past_key_values, self._shape, len(ids))
        group = self._group()
        if group is None or not layers:
            return 0
        size = group.namespace.chunk_size
        known = layers[0][0].shape[2]
        chunks = known // size
        hashes = chunk_hashes(ids[: chunks * size], self._scope(size))
        blocks = list(range(chunks * size // identity.BLOCK))
        item = StoreItem(size, hashes, [blocks], account_id(self._salt))
        stored = self._transfer.store([item], [tensors.planes(group, layers)])
        return stored * size

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """``model.generate`` on what :meth:`load` knows of the prompt; the prompt's KV is saved afterwards.

        Args:
            input_ids: int64 tensor ``[1, T]``. ``options`` go to ``generate``, whose answer is returned.

        Raises:
            ConfigError: for several sequences or beams, other input than tokens at positions from 0 on, or a
                mask that hides tokens.
        """
        check_generate(self._model, options)
        past, _ = self.load(input_ids)
        if past is None:
            past = DynamicCache(config=self._model.config)
        answer = self._model.generate(input_ids, past_key_values=past, **options)
        self.save(input_ids, past)
        return answer

    def _load(self, group: KVGroupPages, ids: list[int], request: str) -> tuple[DynamicCache | None, int]:
        size = group.namespace.chunk_size
        hashes = chunk_hashes(ids, self._scope(size))
        if not hashes:
            return None, 0
        found, lease = self._lookup(hashes, request)
        if not found.chunks:
            return None, 0
        stored = found.chunks * size
        layers = tensors.empty(self._shape, stored)
        blocks = list(range(stored // identity.BLOCK))
        item = LoadItem(request, lease, found.epoch, found.slots[0], [blocks], [0])
        if self._transfer.load([item], [tensors.planes(group, layers)]):
            return None, 0
        tokens = min(stored, len(ids) - 1)
        return tensors.as_cache(self._model, self._shape, layers, tokens), tokens

    def _lookup(self, hashes: list[bytes], request: str) -> tuple[m.Found, int]:
        lease = self._lookups.new_lease()
        message = m.Lookup(
            session=self._lookups.session, request=request, lease=lease, hashes=b"".join(hashes),
            wait=min(self._prefetch_timeout, _WAIT_SECONDS), account=account_id(self._salt),
        )  # fmt: skip
        until = time.monotonic() + self._prefetch_timeout
        while (found := expect(m.Found, self._lookups.call(message)[0])).pending:
            left = until - time.monotonic()  # none: whatever L1 holds by now
            message.hashes, message.known = b"", len(hashes)
            message.wait = min(left, _WAIT_SECONDS) if left > 0 else -1.0
        if not 0 <= found.chunks <= len(hashes):
            raise LMCacheError(
                f"lookup of {len(hashes)} chunks: the server answers that {found.chunks} are held"
            )
        if found.chunks and [[len(slots) for slots in rank] for rank in found.slots] != [[2 * found.chunks]]:
            raise LMCacheError(
                f"lookup: expected the slots of {found.chunks} chunks, the server answers {found.slots}"
            )
        return found, lease

    def _group(self) -> KVGroupPages | None:
        """The pages' description in the current session; None while nothing may be loaded or saved."""
        if not self._transfer.client.up or not self._lookups.up or not self._watch.ok():
            return None
        return self._transfer.groups[0]

    def _scope(self, chunk_size: int) -> Scope:
        return Scope(chunk_size=chunk_size, salt=self._salt, tags=self._tags)
