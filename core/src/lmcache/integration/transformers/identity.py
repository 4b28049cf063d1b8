"""What a transformers model's KV is: its shape, and whose weights made it. Refuses what cannot be cached."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmcache.errors import ConfigError, LayoutError
from lmcache.v1.keys import Namespace, canonical, digest
from lmcache.v1.kv_layout import kv_format

FORMAT = kv_format("NL_X_TWO_X_ONE_NH_T_HS").name
BLOCK = 16
"""Tokens per block. The tensors have none; every chunk size that a server accepts is a multiple of this."""

_PIECE = 64 << 20
# Their angles change with the length of the whole prompt, so a prefix has no KV of its own.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Where a configuration came from does not change what it says.
_NOT_CONTENT = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of every layer are ``[1, kv_heads, T, head_size]`` of ``dtype``, on ``devices`` by layer."""

    kv_heads: int
    head_size: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def layers(self) -> int:
        return len(self.devices)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one block of K or V of one head."""
        return BLOCK * self.head_size * int(self.dtype.itemsize)


def check_supported(model: Any) -> None:
    """Refuse models of whose KV a prefix cannot be reused, or whose identity cannot be told.

    Raises:
        ConfigError: for an encoder-decoder or multimodal model, an adapter, or rotary angles that depend on
            the prompt's length.
        LayoutError: for a layer that does not keep K and V of every token (sliding window, linear attention).
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise ConfigError(f"{name}: encodes and decodes, expected a decoder; run it without the prefix cache")
    if config.get_text_config(decoder=True) is not config:
        raise ConfigError(
            f"{name}: reads more than tokens (a {config.model_type}), expected a text model, for equal tokens"
            " may stand for different images or sounds; run it without the prefix cache"
        )
    if getattr(model, "_hf_peft_config_loaded", False) or type(model).__module__.startswith("peft."):
        raise ConfigError(
            f"{name}: has an adapter, expected plain weights; merge it first (merge_and_unload)"
        )
    for kind in _rope_types(config):
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"{name}: rope type {kind} makes K depend on the prompt's length, expected one that does not;"
                " run it without the prefix cache"
            )
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            raise LayoutError(
                f"{name}: layer {index} caches in {type(layer).__name__}, expected DynamicLayer in every"
                " layer; run it without the prefix cache"
            )


def _rope_types(config: Any) -> Iterator[str]:
    for field in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, field, None)
        if isinstance(rope, Mapping):
            for entry in (rope, *rope.values()):  # one for all layers, or one per type of layer
                if isinstance(entry, Mapping):
                    yield str(entry.get("rope_type") or entry.get("type") or "default")


def kv_shape(model: Any) -> KVShape:
    """The shape of ``model``'s KV, seen by running one token.

    Raises:
        LayoutError: if the model fills no ``DynamicCache``, or its layers' K and V differ in shape or dtype.
    """
    device = model.get_input_embeddings().weight.device
    token = torch.zeros((1, 1), dtype=torch.long, device="cpu" if device.type == "meta" else device)
    with torch.no_grad():
        cache = model(
            input_ids=token, past_key_values=DynamicCache(config=model.config), use_cache=True
        ).past_key_values
    name = type(model).__name__
    if not isinstance(cache, DynamicCache) or not cache.layers:
        raise LayoutError(f"{name}: returns its KV as {type(cache).__name__}, expected a filled DynamicCache")
    first = cache.layers[0].keys
    for index, layer in enumerate(cache.layers):
        for what, tensor in (("K", layer.keys), ("V", layer.values)):
            if tensor is None or tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise LayoutError(
                    f"{name}: {what} of layer {index} is {_form(tensor)}, expected {_form(first)} as in"
                    " layer 0; run it without the prefix cache"
                )
    _, kv_heads, _, head_size = first.shape
    return KVShape(kv_heads, head_size, first.dtype, tuple(layer.keys.device for layer in cache.layers))


def _form(tensor: Any) -> str:
    return "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"


def namespace(model: Any, shape: KVShape, revision: str) -> Namespace:
    """Everything that must agree before KV of one process means the same in another.

    Args:
        revision: what the caller vouches for as the identity of the weights; empty: their content counts.

    Raises:
        ConfigError: if the content of the weights cannot be read here.
    """
    return Namespace(
        model=type(model).__name__,
        revision=revision_of(model, revision),
        engine="transformers",
        format=FORMAT,
        dtype=str(shape.dtype).rpartition(".")[2],
        block_size=BLOCK,
        chunk_size=BLOCK,  # the server's to say: see EngineDrivenTransferContext
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        # A page is one block of K or V of one head. In such a plane a sequence's blocks touch, so a chunk's
        # are copied as one run, and what is stored is the row's own order with T = chunk size.
        page_bytes=(shape.plane_bytes,) * (shape.layers * 2 * shape.kv_heads),
        layers=tuple(f"layer.{i}" for i in range(shape.layers)),
        extra=settings_of(model),
    )


def revision_of(model: Any, revision: str) -> str:
    """Identity of the weights: what the caller vouches for, else their content.

    Raises:
        ConfigError: if the content cannot be read here.
    """
    return f"given:{revision}" if revision else f"content:{content_fingerprint(model)}"


def settings_of(model: Any) -> dict[str, str]:
    """What changes the values of KV and is neither weights nor shape."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_CONTENT}
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": digest("hf_config", json.dumps(config, sort_keys=True, default=str)).hex(),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
    }


def content_fingerprint(model: Any) -> str:
    """Hex digest of all parameters and buffers: names, dtypes, shapes, bytes. Reads about 2 GB/s per core.

    Raises:
        ConfigError: for weights that are not here as plain tensors (offloaded, sharded or quantised).
    """
    hasher = blake3(max_threads=blake3.AUTO)
    quantised = getattr(model, "hf_quantizer", None) is not None
    for name, tensor in _tensors(model):
        if quantised or tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            what = (
                "quantised"
                if quantised
                else "on the meta device"
                if tensor.is_meta
                else f"a {type(tensor).__name__}"
            )
            raise ConfigError(
                f"{type(model).__name__}: {name} is {what}, expected a plain tensor to fingerprint;"
                " pass revision= with text that changes whenever the weights do"
            )
        hasher.update(
            canonical([name, str(tensor.dtype), list(tensor.shape), tensor.numel() * tensor.itemsize])
        )
        flat = tensor.detach().contiguous().reshape(-1)
        step = max(1, _PIECE // tensor.itemsize)
        for at in range(0, flat.numel(), step):
            piece = flat[at : at + step].cpu()
            raw = (ctypes.c_ubyte * (piece.numel() * piece.itemsize)).from_address(piece.data_ptr())
            hasher.update(memoryview(raw).cast("B"))
    return str(hasher.hexdigest())


def weights_state(model: Any) -> tuple[tuple[str, int, int], ...]:
    """Changes when a weight is replaced or written in place, but not through ``.data``. Quick."""
    return tuple((n, t.data_ptr(), 0 if t.is_inference() else t._version) for n, t in _tensors(model))


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
