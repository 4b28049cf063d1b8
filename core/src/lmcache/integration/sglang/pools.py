"""SGLang's KV pools as pages, and its slots as block ids.

A pool keeps one tensor per layer (and per K and V) with a row per token slot; a page is ``page_size`` rows, or one row
of a tensor that has a row per page. Slot and page 0 are SGLang's padding: nothing is ever read from there or written
there. Pools are told by their attributes, so this module imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache.errors import LayoutError
from lmcache.v1.keys import Namespace
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages

__all__ = ["Component", "Engine", "blocks_of", "components", "kv_groups"]

_FORMATS = {"kv": kv_format(9).name, "mla": kv_format(3).name}
_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer")
_NULL_BLOCK = 0


@dataclass(frozen=True)
class Component:
    """Tensors that share one space of slots.

    ``tensors`` are named; ``rows`` says how many rows of each make one page. ``window``: tokens of a sliding window,
    whole pages; 0: full attention.
    """

    name: str
    form: str
    tensors: dict[str, torch.Tensor]
    rows: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True)
class Engine:
    """What all groups of an engine's rank have in common in their namespaces."""

    model: str
    revision: str
    extra: dict[str, str]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int


def components(
    allocator: Any, tree_components: Sequence[Any], page_size: int, window: int
) -> list[Component]:
    """The components of SGLang's radix tree whose KV can be cached, in its order.

    Args:
        allocator: SGLang's ``token_to_kv_pool_allocator``.
        tree_components: its ``ComponentType`` members.
        window: tokens of the sliding window, whole pages.

    Raises:
        LayoutError: one line for a component or a pool whose pages cannot be told, or hold only part of what a token
            needs.
    """
    names = [component.name for component in tree_components]
    if names not in (["FULL"], ["FULL", "SWA"]):
        raise LayoutError(
            f"SGLang's tree of {', '.join(names) or 'nothing'}: only FULL, and FULL with SWA, are cached; "
            "run this model without --enable-lmcache"
        )
    pool = allocator.get_kvcache()
    if hasattr(pool, "index_pools") or hasattr(pool, "compress_state_pools"):
        raise LayoutError(
            f"{type(pool).__name__}: KV in compressed pools of several ratios is not cached; "
            "run this model without --enable-lmcache"
        )
    found = [_component("full", getattr(pool, "full_kv_pool", pool), page_size, 0)]
    if "SWA" in names:
        inner = getattr(pool, "swa_kv_pool", None)
        if inner is None:
            raise LayoutError(
                f"{type(pool).__name__}: expected swa_kv_pool for SGLang's tree of FULL and SWA"
            )
        found.append(_component("swa", inner, page_size, window))
    return found


def _component(name: str, pool: Any, page_size: int, window: int) -> Component:
    _check_pool(pool)
    first = int(getattr(pool, "start_layer", 0) or 0)
    k, v, latent = (getattr(pool, attr, None) for attr in _BUFFERS[:3])
    if latent:
        form, planes = "mla", {"kv": latent}
    elif k and v and len(k) == len(v):
        form, planes = "kv", {"k": k, "v": v}
    else:
        raise LayoutError(
            f"{type(pool).__name__}: expected kv_buffer, or k_buffer and v_buffer of as many layers; "
            "run this model without --enable-lmcache"
        )
    tensors = {
        f"{plane}.{first + layer}": tensor
        for plane, layers in planes.items()
        for layer, tensor in enumerate(layers)
        if tensor.numel()
    }
    rows = [page_size] * len(tensors)
    for layer, tensor in enumerate(getattr(pool, _BUFFERS[3], None) or ()):
        if tensor.numel():
            tensors[f"index.{first + layer}"] = tensor
            rows.append(1)
    _check_tensors(type(pool).__name__, tensors)
    return Component(name, form, tensors, tuple(rows), window)


def _check_pool(pool: Any) -> None:
    """Refuse layouts in which a page is not one run, and buffers besides K and V that a token needs too."""
    name = type(pool).__name__
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order != "nhd":
        raise LayoutError(f"{name}: kv_cache_layout={order!r}: expected 'nhd'; another layout is not cached")
    for attr, value in vars(pool).items():
        tensors = value if isinstance(value, (list, tuple)) else [value]
        if attr.endswith("_buffer") and attr not in _BUFFERS and any(map(torch.is_tensor, tensors)):
            raise LayoutError(
                f"{name}: tokens have data in {attr}, too, which is not cached; run with another --kv-cache-dtype"
            )


def _check_tensors(name: str, tensors: dict[str, torch.Tensor]) -> None:
    if not tensors:
        raise LayoutError(f"{name}: no KV of this rank's own; expected at least one layer")
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise LayoutError(f"{name}: KV on {', '.join(sorted(devices))}: expected one device")
    for what, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor.is_contiguous():
            raise LayoutError(
                f"{name}: {what} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected a contiguous "
                "tensor with slots along its first axis"
            )


def kv_groups(found: Sequence[Component], page_size: int, engine: Engine) -> list[KVGroupPages]:
    """The components as KV groups; the chunk size in their namespaces is the server's to say."""
    return [_group(component, page_size, engine, index, len(found)) for index, component in enumerate(found)]


def _group(component: Component, page_size: int, engine: Engine, index: int, count: int) -> KVGroupPages:
    tensors = list(component.tensors.values())
    sizes = [
        rows * tensor.stride(0) * tensor.element_size()
        for tensor, rows in zip(tensors, component.rows, strict=True)
    ]
    first = tensors[0]
    heads, width = (first.shape[1], first.shape[2]) if first.dim() == 3 else (1, first[0].numel())
    namespace = Namespace(
        model=engine.model,
        revision=engine.revision,
        engine="sglang",
        format=_FORMATS[component.form],
        dtype=str(first.dtype).rpartition(".")[2],
        block_size=page_size,
        chunk_size=page_size,  # the server's to say: see TransferContext
        kv_heads=heads,
        head_size=width,
        page_bytes=tuple(sizes),
        layers=tuple(component.tensors),
        group=index,
        groups=count,
        tp_rank=engine.tp_rank,
        tp_size=engine.tp_size,
        pp_rank=engine.pp_rank,
        pp_size=engine.pp_size,
        extra=engine.extra
        | {
            "window": str(component.window),
            "dtypes": " ".join(sorted({str(tensor.dtype) for tensor in tensors})),
        },
    )
    return KVGroupPages(
        namespace=namespace,
        num_blocks=min(t.shape[0] // rows for t, rows in zip(tensors, component.rows, strict=True)),
        addresses=[tensor.data_ptr() for tensor in tensors],
        strides=sizes,
        null_block=_NULL_BLOCK,
        device=first.device.type,
        tensors=tensors,
    )


def blocks_of(slots: torch.Tensor, page_size: int) -> list[int]:
    """The pages that a sequence's slots are, in order; 0 for a page of which every slot is 0.

    Raises:
        LayoutError: they are not whole pages, each from its first slot on.
    """
    if slots.numel() % page_size:
        raise LayoutError(f"{slots.numel()} slots: expected whole pages of {page_size}")
    pages = slots.detach().to(device="cpu", dtype=torch.int64).reshape(-1, page_size)
    starts = pages[:, 0]
    in_order = (pages == starts[:, None] + torch.arange(page_size)).all(1) & (starts % page_size == 0)
    if not bool((in_order | (pages == 0).all(1)).all()):
        raise LayoutError(
            f"slots of a page are not in order: expected pages of {page_size} slots, one by one"
        )
    found: list[int] = (starts // page_size).tolist()
    return found
