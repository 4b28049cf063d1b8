"""Stores in the background: a thread that copies pages to the server while SGLang computes."""

from __future__ import annotations

import queue
import threading
from typing import Any

from lmcache.integration.sglang.lmcache_mp_metadata import Outcome
from lmcache.logging import init_logger
from lmcache.v1.gpu_connector.lanes import Lane
from lmcache.v1.multiprocess.transfer_context.base import StoreItem, TransferContext

__all__ = ["BackgroundStores"]

logger = init_logger(__name__)

_JOIN_SECONDS = 30.0


class BackgroundStores:
    """Stores in the order in which they were submitted. SGLang keeps the pages as they are until a store has ended.

    Args:
        context: which stores.
        device: on which the pages are.
    """

    def __init__(self, context: TransferContext, device: Any) -> None:
        self._context = context
        self._lane = Lane(device)
        self._waiting: queue.SimpleQueue[tuple[StoreItem, Outcome, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lmcache-store", daemon=True)
        self._thread.start()

    def submit(self, item: StoreItem) -> Outcome:
        """Store once the device has done what its current stream has by now.

        Returns:
            True once every chunk is at the server, or it had no room; False if some were dropped.
        """
        outcome = Outcome()
        self._waiting.put((item, outcome, self._lane.mark(engine=True)))
        return outcome

    def close(self) -> None:
        """Let what was submitted end, and the thread."""
        self._waiting.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            item, outcome, computed = entry
            stored = False
            try:
                with self._lane.queued():
                    self._lane.after(computed)
                    dropped = self._context.counters.dropped_stores
                    up = self._context.client.up
                    self._context.store([item])
                    stored = up and self._context.counters.dropped_stores == dropped
            except Exception:  # a fault of ours costs what was to be stored, not the engine
                logger.exception("store")
            finally:
                outcome.end(stored)
