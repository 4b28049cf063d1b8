"""A ``DynamicCache`` whose layers keep K and V in pages that connectors know, and what drives a transfer by layer.

Pages are row ``NL_X_TWO_NB_BS_NH_HS`` of the layout table: per layer ``[2, NB, BS, kv_heads, head_size]``, token t of
the sequence in slot t. What attention gets are views of them, and new tokens are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmcache.errors import ConfigError, LayoutError
from lmcache.integration.transformers.identity import BLOCK, KVShape
from lmcache.v1.kv_layout import kv_format

__all__ = ["PAGE_FORMAT", "PagedLayer", "Request", "Steps", "new_pages", "paged_cache", "pages_of"]

PAGE_FORMAT = kv_format("NL_X_TWO_NB_BS_NH_HS").id

Pages: TypeAlias = "list[torch.Tensor]"
"""Per layer ``[2, NB, BS, kv_heads, head_size]``. Layers of one cache share the list, and put a longer one in place."""


class Steps:
    """A generator of the engine's, and how far it was driven."""

    def __init__(self, generator: Generator[Any, None, None]) -> None:
        self._generator = generator
        self.done = 0

    def to(self, step: int) -> Any:
        """Go on until so many steps are done; what the last of them gave."""
        given = None
        while self.done < step:
            given = next(self._generator)
            self.done += 1
        return given

    def close(self) -> None:
        self._generator.close()


class Request:
    """What a cache's layers tell of a sequence whose prompt has ``tokens``; drives the transfers of its layers.

    Args:
        layers: How many there are.
        tokens: Of the prompt.
        load: ``retrieve_layer``, its first step done; None: what is known is in the pages.
        store: ``store_layer``, no step done; None: the prompt is not stored by layer.
        may_store: asked when the first layer has the prompt.
    """

    def __init__(
        self,
        layers: int,
        tokens: int,
        load: Steps | None,
        store: Steps | None,
        may_store: Callable[[], bool],
    ) -> None:
        self._layers, self._tokens = layers, tokens
        self._load, self._store, self._stored = load, store, False
        self._may_store = may_store
        self.intact = True
        """Whether the pages hold the prompt, as far as they reach, and nothing else."""

    def before(self, layer: int) -> None:
        """A layer is about to be used. It is in its pages now, and the next one is on its way."""
        if self._load is not None:
            self._load.to(min(layer + 1, self._layers - 1) + 2)
            if layer == self._layers - 1:
                self._load.to(self._layers + 2)
        if layer == 0:
            self._publish()

    def after(self, layer: int, length: int) -> None:
        """A layer has got new tokens and now has ``length``. It is stored once it has the prompt's."""
        if self._store is None or self._store.done != layer or length < self._tokens:
            return
        if layer or self._may_store():
            self._store.to(layer + 1)
        else:
            self.abandon_store()

    def cut(self, length: int) -> None:
        """A layer was cut to ``length`` tokens. Others may follow them, so a prompt that was cut is not stored."""
        if length < self._tokens:
            self.intact = False
            self.abandon_store()

    def abandon_store(self) -> None:
        """Store nothing by layer that is not published yet."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def finish(self) -> bool:
        """Every layer is in its pages, and what all layers have stored is published: whether that is the prompt."""
        if self._load is not None:
            self._load.to(self._layers + 2)
        self._publish()
        return self._stored

    def _publish(self) -> None:
        """A step after the last layer's, so that its copies had time."""
        if self._store is not None and self._store.done == self._layers:
            self._store.to(self._layers + 1)
            self._stored = True

    def close(self) -> None:
        """End what is under way. Harmless after :meth:`finish`."""
        try:
            self.abandon_store()
        finally:
            if self._load is not None:
                self._load.close()


class PagedLayer(DynamicLayer):
    """A layer of one sequence. Not for gradients.

    Args:
        index: Which layer.
        pages: Those of all layers.
        tokens: So many are in them, or will be by the layer's first update.
    """

    def __init__(self, index: int, pages: Pages, tokens: int) -> None:
        super().__init__()
        self._index, self._pages = index, pages
        self.request: Request | None = None
        self._show(tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V ``[1, kv_heads, T, head_size]``; those of all tokens.

        Raises:
            LayoutError: for several sequences. ConfigError: while gradients are wanted.
        """
        if key_states.shape[0] != 1:
            raise LayoutError(
                f"K of shape {list(key_states.shape)}: expected one sequence in this cache, [1, …]"
            )
        if key_states.requires_grad:
            raise ConfigError("K needs gradients: expected none in this cache; run under torch.no_grad()")
        if self.request is not None:
            self.request.before(self._index)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > capacity_of(self._pages[self._index]):
            self._grow(start, end)
        for plane, states in zip(self._planes(), (key_states, value_states), strict=True):
            plane[:, :, start:end].copy_(states)
        self._show(end)
        if self.request is not None:
            self.request.after(self._index, end)
        return self.keys, self.values

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if self.request is not None:
            self.request.cut(self.get_seq_length())

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        if self.request is not None:
            self.request.cut(0)

    def _planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention wants them, ``[1, kv_heads, capacity, head_size]``."""
        key, value = (plane.flatten(0, 1).unsqueeze(0).transpose(1, 2) for plane in self._pages[self._index])
        return key, value

    def _show(self, tokens: int) -> None:
        key, value = self._planes()
        self.keys, self.values = key[:, :, :tokens], value[:, :, :tokens]
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True

    def _grow(self, kept: int, tokens: int) -> None:
        """Move to pages for ``tokens`` at least; twice as many as before, so that few copies do."""
        if self.request is not None:
            self.request.abandon_store()  # it reads the old pages
        old = self._pages[self._index]
        heads, head_size = old.shape[3:]
        new = _page(max(tokens, 2 * capacity_of(old)), heads, head_size, old.dtype, old.device)
        new.flatten(1, 2)[:, :kept].copy_(old.flatten(1, 2)[:, :kept])
        self._pages[self._index] = new


def new_pages(shape: KVShape, tokens: int) -> Pages:
    """Pages for ``tokens`` tokens at least, uninitialised."""
    return [_page(tokens, shape.kv_heads, shape.head_size, shape.dtype, device) for device in shape.devices]


def _page(tokens: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # tensors made in it can only be written in it
        return torch.empty((2, -(-tokens // BLOCK), BLOCK, heads, head_size), dtype=dtype, device=device)


def capacity_of(page: torch.Tensor) -> int:
    """Tokens of a layer's pages."""
    return int(page.shape[1]) * int(page.shape[2])


def paged_cache(model: Any, pages: Pages, tokens: int) -> DynamicCache:
    """A cache over ``pages``, of which ``tokens`` tokens are there or will be."""
    cache = DynamicCache(config=model.config)
    cache.layers = [PagedLayer(index, pages, tokens) for index in range(len(pages))]
    return cache


def pages_of(cache: Any) -> tuple[Pages, int]:
    """The pages of a cache that :func:`paged_cache` made, and how many tokens all its layers have.

    Raises:
        LayoutError: It is another.
    """
    layers = getattr(cache, "layers", None) or [None]
    for index, layer in enumerate(layers):
        if not isinstance(layer, PagedLayer):
            raise LayoutError(
                f"past_key_values: layer {index} of {type(cache).__name__} is {type(layer).__name__}, expected a"
                " cache that a request gave"
            )
    return layers[0]._pages, min(layer.get_seq_length() for layer in layers)
