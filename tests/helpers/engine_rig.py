"""A cache engine beside an engine whose KV can be told from its tokens, so that every value can be checked."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from helpers.host_connector import HIDDEN, LAYERS, HostConnector, HostLayers, metadata
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage.l2.adapter import StorageAdapter

CHUNK = 4
MIB = 1 / 1024
DEADLINE = 10.0


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """``[layers, 2, tokens, hidden]``: what a model computes, a function of all tokens up to each."""
    state, values = 0, []
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        values.append(state % 65521 * 128)
    base = torch.tensor(values, dtype=torch.float32).reshape(1, 1, -1, 1)
    layers = torch.arange(LAYERS).reshape(-1, 1, 1, 1) * 16
    planes = torch.arange(2).reshape(1, -1, 1, 1) * 8
    return base + layers + planes + torch.arange(HIDDEN).reshape(1, 1, 1, -1)


def settle(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds, but not for ever."""
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"not within {DEADLINE} s: {what}"
        time.sleep(0.002)


def engine_threads() -> list[str]:
    """Threads of engines; those that copy for everybody ("blocks", "copy") stay as long as the process."""
    names = [t.name for t in threading.enumerate() if t.is_alive()]
    return [
        n for n in names if n.startswith("lmcache") and not n.startswith(("lmcache-blocks", "lmcache-copy"))
    ]


class Rig:
    """An engine and its connector.

    Args:
        adapters: Storage engines by name; None: what the configuration says.
        changes: Settings other than the small ones of tests.
    """

    def __init__(
        self,
        adapters: Sequence[tuple[str, StorageAdapter]] | None = (),
        about: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        values = {"chunk_size": CHUNK, "max_local_cpu_size": MIB, **changes}
        self.config = LMCacheEngineConfig.from_dict(values)
        self.about = metadata(self.config.chunk_size, **(about or {}))
        self.connector = (HostLayers if self.config.use_layerwise else HostConnector)(self.about)
        self.engine = LMCacheEngine(self.config, self.about, self.connector, adapters=adapters)

    def store(self, tokens: Sequence[int], **kwargs: Any) -> None:
        """Compute the KV of ``tokens`` and store it."""
        slots = torch.arange(len(tokens)).flip(0)
        pages = [torch.zeros(2, len(tokens), HIDDEN) for _ in range(LAYERS)]
        for layer, kv in zip(pages, kv_of(tokens), strict=True):
            layer[:, slots] = kv
        kwargs = {"kvcaches": pages, "slot_mapping": slots, **kwargs}
        if self.config.use_layerwise:
            assert len(list(self.engine.store_layer(list(tokens), **kwargs))) == LAYERS + 1
        else:
            self.engine.store(list(tokens), **kwargs)

    def retrieve(self, tokens: Sequence[int], **kwargs: Any) -> int:
        """How many tokens came; that they are right, that nothing else was written, and that the mask says so."""
        slots = torch.arange(len(tokens)) * 2
        pages = [torch.full((2, 2 * len(tokens) + 1, HIDDEN), -1.0) for _ in range(LAYERS)]
        kwargs = {"kvcaches": pages, "slot_mapping": slots, **kwargs}
        if self.config.use_layerwise:
            steps = list(self.engine.retrieve_layer(list(tokens), **kwargs))
            assert len(steps) == LAYERS + 2
            mask = steps[-1]
            assert steps[0] == int(mask.sum())
        else:
            mask = self.engine.retrieve(list(tokens), **kwargs)
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"
        assert mask.shape == (len(tokens),)
        for layer, kv in zip(pages, kv_of(tokens), strict=True):
            expected = torch.full_like(layer, -1.0)
            expected[:, slots[mask]] = kv[:, mask]
            assert torch.equal(layer, expected)
        given = kwargs.get("mask")
        skipped = 0 if given is None else len(tokens) - sum(given)
        count = int(mask.sum())
        assert mask[skipped : skipped + count].all()
        return count

    def assert_nothing_is_held(self) -> None:
        """After all requests ended: no object, no pin, no reservation."""
        status = self.engine.status()
        assert status["lookups"] == 0
        assert status["live_objects"] == 0
        settle(lambda: self.engine.stack.l1.usage()["pinned_objects"] == 0, "pins of writes to end")
        settle(
            lambda: self.engine.stack.l1.usage()["reserved_bytes"] == 0,
            "what was loaded in vain to be given back",
        )


@contextmanager
def running(*arguments: Any, **changes: Any) -> Iterator[Rig]:
    """A rig that is closed, and that holds nothing by then."""
    rig = Rig(*arguments, **changes)
    try:
        yield rig
        rig.assert_nothing_is_held()
    finally:
        rig.engine.close(5.0)
