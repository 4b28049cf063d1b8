"""K and V tensors of one sequence as planes of pages, and as a ``DynamicCache``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmcache.errors import ConfigError, LayoutError
from lmcache.integration.transformers.identity import BLOCK, KVShape
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages

Layers: TypeAlias = "Sequence[tuple[torch.Tensor, torch.Tensor]]"
"""Per layer K and V, each ``[1, kv_heads, T, head_size]``."""


def token_ids(input_ids: Any) -> list[int]:
    """The ids of one sequence, from an integer tensor ``[1, T]`` or ``[T]``, or a list of integers.

    Raises:
        ConfigError: for a batch of several sequences, or an id that is negative.
    """
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
            raise ConfigError(
                f"input_ids of shape {list(input_ids.shape)}: expected one sequence, [1, T];"
                " call once for each"
            )
        input_ids = input_ids.reshape(-1).tolist()
    ids = [int(token) for token in input_ids]
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
        raise ConfigError(f"input_ids within {min(ids)}..{max(ids)}: expected token ids from 0 on")
    return ids


def empty(shape: KVShape, tokens: int) -> Layers:
    """Host tensors for ``tokens`` tokens of every layer, uninitialised."""
    size = (1, shape.kv_heads, tokens, shape.head_size)
    return [
        (torch.empty(size, dtype=shape.dtype), torch.empty(size, dtype=shape.dtype)) for _ in shape.devices
    ]


def layers_of(cache: Any, shape: KVShape, tokens: int) -> Layers:
    """The first ``tokens`` tokens, at most, of a cache that a model filled; on the host.

    Raises:
        LayoutError: for another class of cache or layer, several sequences, or another shape or dtype.
    """
    if not isinstance(cache, DynamicCache):
        raise LayoutError(f"past_key_values is {type(cache).__name__}, expected DynamicCache")
    if len(cache.layers) != shape.layers:
        raise LayoutError(
            f"past_key_values has {len(cache.layers)} layers, expected {shape.layers} as in the model"
        )
    length = cache.get_seq_length()
    expected = (1, shape.kv_heads, length, shape.head_size)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise LayoutError(
                f"layer {index} of past_key_values is {type(layer).__name__}, expected DynamicLayer"
            )
        for tensor in (layer.keys, layer.values):
            if length and (tuple(tensor.shape) != expected or tensor.dtype != shape.dtype):
                raise LayoutError(
                    f"layer {index} of past_key_values is {list(tensor.shape)} {tensor.dtype},"
                    f" expected {list(expected)} {shape.dtype}"
                )
    if not length:
        return []
    return [(_host(layer.keys, tokens), _host(layer.values, tokens)) for layer in cache.layers]


def _host(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """The tensor's first tokens in host memory, those of one head without gaps; a copy only where needed."""
    part = tensor.detach()[:, :, :tokens]
    if part.device.type != "cpu" or part.stride(3) != 1 or part.stride(2) != part.shape[3]:
        part = part.contiguous().cpu()
    return part


def planes(group: KVGroupPages, layers: Layers) -> KVGroupPages:
    """``group`` with its pages in ``layers``: per layer the heads of K, then those of V."""
    tensors = [tensor for pair in layers for tensor in pair]
    addresses = [
        tensor.data_ptr() + head * tensor.stride(1) * tensor.itemsize
        for tensor in tensors
        for head in range(tensor.shape[1])
    ]
    return replace(
        group,
        num_blocks=tensors[0].shape[2] // BLOCK,
        addresses=addresses,
        strides=list(group.namespace.page_bytes),
        tensors=tensors,  # so that they live as long as their addresses
    )


def as_cache(model: Any, shape: KVShape, layers: Layers, tokens: int) -> DynamicCache:
    """A ``DynamicCache`` of the first ``tokens`` tokens, each layer on its device."""
    cache = DynamicCache(config=model.config)
    for layer, (key, value), device in zip(cache.layers, layers, shape.devices, strict=True):
        key, value = (t[:, :, :tokens].to(device) for t in (key, value))
        layer.update(
            key[:, :, :0], value[:, :, :0]
        )  # initialises it; the next line saves the copy of an update
        layer.keys, layer.values = key, value
    return cache
