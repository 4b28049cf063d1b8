"""An engine's KV in plain tensors, and the smallest connectors to it: what the cache engine needs of one, no more."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE = 2, 2, 4
HIDDEN = HEADS * HEAD_SIZE


def metadata(chunk_size: int, **changes: Any) -> LMCacheMetadata:
    """Of an engine of one rank with :data:`LAYERS` layers."""
    fields: dict[str, Any] = {
        "model_name": "tests/model",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.float32,
        "kv_shape": (LAYERS, 2, chunk_size, HEADS, HEAD_SIZE),
        "chunk_size": chunk_size,
        "model_revision": "r1",
        "engine": "tests",
    }
    return LMCacheMetadata(**{**fields, **changes})


def pages(slots: int, seed: int | None = None, planes: int = 2) -> list[torch.Tensor]:
    """Per layer ``[2, slots, hidden]``: zeros, or random."""
    if seed is None:
        return [torch.zeros(planes, slots, HIDDEN) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(planes, slots, HIDDEN, generator=generator) for _ in range(LAYERS)]


class Broken(Exception):
    """What a connector raises when told to."""


class HostConnector:
    """Whole chunks: ``[planes, layers, tokens, hidden]``."""

    def __init__(self, about: LMCacheMetadata) -> None:
        self.about = about
        self.fail = False
        self.moved: list[tuple[int, int]] = []
        self.kept: list[Any] = []

    def get_shape(self, tokens: int) -> torch.Size:
        return torch.Size(self.about.get_shapes(tokens)[0])

    def batched_from_gpu(self, objs: Sequence[Any], starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self._check()
            slots = kwargs["slot_mapping"][start:end]
            tensor = obj.tensor
            for layer, pages in enumerate(kwargs["kvcaches"]):
                tensor[:, layer] = pages[:, slots]
            self.moved.append((start, end))

    def batched_to_gpu(self, objs: Sequence[Any], starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self._check()
            slots = kwargs["slot_mapping"][start:end]
            tensor = obj.tensor
            for layer, pages in enumerate(kwargs["kvcaches"]):
                pages[:, slots] = tensor[:, layer]

    def _check(self) -> None:
        if self.fail:
            raise Broken


class HostLayers(HostConnector):
    """Layer by layer: ``[tokens, 2, hidden]``. ``open`` counts generators that were not closed."""

    is_layerwise = True
    open = 0

    def get_shape(self, tokens: int) -> torch.Size:
        return torch.Size([tokens, 2, HIDDEN])

    def batched_from_gpu(  # type: ignore[override]
        self, objs: Any, starts: Any, ends: Any, **kwargs: Any
    ) -> Generator[None, None, None]:
        self.open += 1
        try:
            for layer, mine in enumerate(objs):
                yield
                self._check()
                for obj, start, end in zip(mine, starts, ends, strict=True):
                    slots = kwargs["slot_mapping"][start:end]
                    obj.tensor.copy_(kwargs["kvcaches"][layer][:, slots].transpose(0, 1))
            yield
        finally:
            self.open -= 1

    def batched_to_gpu(  # type: ignore[override]
        self, starts: Any, ends: Any, **kwargs: Any
    ) -> Generator[None, Any, None]:
        self.open += 1
        try:
            for layer in range(LAYERS):
                objs = yield
                self._check()
                for obj, start, end in zip(objs, starts, ends, strict=True):
                    slots = kwargs["slot_mapping"][start:end]
                    kwargs["kvcaches"][layer][:, slots] = obj.tensor.transpose(0, 1)
            yield
            yield
        finally:
            self.open -= 1
