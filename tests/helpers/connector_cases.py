"""Connectors over caches of every layout: what a store and a load must have done, read off the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from helpers.slot_cases import SERVED, Case, Form, build, content, each, raw, zeroed
from lmcache.v1.gpu_connector import gpu_connectors as connectors
from lmcache.v1.kv_layer_groups import EngineGroupInfo, KVLayerGroupsManager
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryObj

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


@dataclass(frozen=True)
class Model:
    """Sizes as an engine's metadata has them."""

    fmt: int
    case: Case

    @property
    def mla(self) -> bool:
        return kv_format(self.fmt).is_mla

    @property
    def layers(self) -> int:
        return self.case.nl // 2 if kv_format(self.fmt).is_single_kv else self.case.nl

    @property
    def hidden(self) -> int:
        return Form.of(self.fmt).width(self.case) // (2 if kv_format(self.fmt).is_packed else 1)

    @property
    def metadata(self) -> Any:
        shape = (self.layers, 1 if self.mla else 2, 5040, 1, self.hidden)  # whole blocks of 1 to 10 slots
        return SimpleNamespace(
            kv_shape=shape, kv_dtype=self.case.dtype, use_mla=self.mla, kv_layer_groups_manager=None,
            local_worker_id=0, chunk_size=shape[2],
        )  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """Chunks of a sequence, and where its tokens are."""

    slots: list[int]
    starts: list[int]
    ends: list[int]
    cached: int
    """Tokens at the beginning that a load leaves alone."""

    @property
    def stored(self) -> list[tuple[int, int]]:
        """(token, slot) of all that a store moves."""
        spans = zip(self.starts, self.ends, strict=True)
        return [(t, self.slots[t]) for a, b in spans for t in range(a, b) if self.slots[t] >= 0]

    @property
    def loaded(self) -> list[tuple[int, int]]:
        return [(token, slot) for token, slot in self.stored if token >= self.cached]


@st.composite
def transfers(draw: st.DrawFn, num_slots: int) -> Transfer:
    """Distinct slots in runs or not, some negative; chunks with gaps between them, on no block's edge."""
    if draw(st.booleans()):
        start = draw(st.integers(0, num_slots - 1))
        slots = [*range(start, num_slots), *range(start)]
    else:
        slots = list(draw(st.permutations(range(num_slots))))
    if draw(st.booleans()):
        drop = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        slots = [-1 - slot if gone else slot for slot, gone in zip(slots, drop, strict=True)]
    edges = sorted(draw(st.sets(st.integers(0, len(slots)), min_size=2, max_size=5)))
    spans = [(a, b) for a, b in pairwise(edges) if draw(st.integers(0, 3))]
    cached = draw(st.one_of(st.just(0), st.integers(0, len(slots))))
    return Transfer(slots, [a for a, _ in spans], [b for _, b in spans], cached)


@st.composite
def sizes(draw: st.DrawFn, fmt: int) -> Case:
    """Small caches; of one whose tensors are K or V alone an even number of these."""
    case = Case(
        nl=draw(st.integers(1, 3)),
        nb=draw(st.integers(1, 4)),
        bs=draw(st.integers(1, 4)),
        nh=draw(st.integers(1, 3)),
        hs=draw(st.sampled_from([2, 4, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return replace(case, nl=case.nl * 2) if kv_format(fmt).is_single_kv else case


def whole(kind: type[Any], model: Model, use_gpu: bool) -> Any:
    return kind.from_metadata(
        model.metadata, use_gpu=use_gpu, device=None, layout_hints={"engine_kv_format": model.fmt}
    )


WHOLE = {
    kind.__name__: kind
    for kind in (
        connectors.VLLMPagedMemGPUConnectorV2,
        connectors.VLLMPagedMemGPUConnectorV3,
        connectors.SGLangGPUConnector,
    )
}
LAYERWISE = {
    kind.__name__: kind
    for kind in (
        connectors.VLLMPagedMemLayerwiseGPUConnector,
        connectors.SGLangLayerwiseGPUConnector,
        connectors.VLLMBufferLayerwiseGPUConnector,
    )
}
ALL = {**WHOLE, **LAYERWISE}
PAIRS = [
    (name, fmt)
    for name in ALL
    for fmt in SERVED
    if not (kv_format(fmt).is_single_kv and (name in LAYERWISE or "V3" in name))
    and not (kv_format(fmt).is_pbs_fused and "V3" in name)  # groups are of blocks
]
"""Each connector with each layout that it serves."""


class Store:
    """Objects for chunks, full of noise, from an allocator that knows what was not given back."""

    def __init__(self) -> None:
        self.allocator = AdHocMemoryAllocator()
        self.given: list[MemoryObj] = []

    def make(self, connector: Any, model: Model, tokens: int) -> MemoryObj:
        shapes = (
            connector.get_shapes(tokens)
            if hasattr(connector, "get_shapes")
            else [connector.get_shape(tokens)]
        )
        obj = self.allocator.allocate([tuple(shape) for shape in shapes], model.case.dtype)
        assert obj is not None
        obj.raw_tensor.random_(0, 256)
        self.given.append(obj)
        return obj

    def give_back(self) -> None:
        for obj in self.given:
            assert (obj.get_ref_count(), obj.get_pin_count()) == (1, 0), "held by somebody else"
            obj.ref_count_down()
        self.given.clear()


def objects_for(connector: Any, model: Model, transfer: Transfer, store: Store) -> Any:
    lengths = [end - start for start, end in zip(transfer.starts, transfer.ends, strict=True)]
    if connector.is_layerwise:
        return [[store.make(connector, model, n) for n in lengths] for _ in range(model.layers)]
    return [store.make(connector, model, n) for n in lengths]


def save(connector: Any, objects: Any, transfer: Transfer, **kwargs: Any) -> None:
    """A store, driven to its end; of a layerwise one every step is counted."""
    running = connector.batched_from_gpu(objects, transfer.starts, transfer.ends, **kwargs)
    if connector.is_layerwise:
        for _ in range(connector.num_layers + 1):
            next(running)


def load(connector: Any, objects: Any, transfer: Transfer, **kwargs: Any) -> None:
    kwargs["vllm_cached_tokens"] = transfer.cached
    if not connector.is_layerwise:
        connector.batched_to_gpu(objects, transfer.starts, transfer.ends, **kwargs)
        return
    running = connector.batched_to_gpu(transfer.starts, transfer.ends, **kwargs)
    next(running)
    for layer in objects:
        running.send(layer)
    next(running)


def on(device: str, paged: Any) -> Any:
    return each(paged, lambda tensor: tensor.to(device)) if device != "cpu" else paged


def check_round_trip(
    kind: type[Any], model: Model, transfer: Transfer, device: str = "cpu", use_gpu: bool = False,
    slots_on_device: bool = False, settle: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Store from noise, load into zeros: exactly the slots named hold what they held; nothing else changed."""
    use_gpu = use_gpu or kind is connectors.VLLMBufferLayerwiseGPUConnector
    connector, store = whole(kind, model, use_gpu), Store()
    source = build(model.fmt, model.case)
    held = content(model.fmt, source)
    pages = on(device, source)
    slots = torch.tensor(transfer.slots, dtype=torch.int64)
    kwargs: dict[str, Any] = {"slot_mapping": slots.to(device) if slots_on_device else slots, "sync": True}
    if kind is connectors.VLLMPagedMemGPUConnectorV3:
        connector.initialize_kvcaches_ptr(kvcaches=pages)
    objects = objects_for(connector, model, transfer, store)
    noise = [[raw(tensor).copy() for tensor in obj.tensors] for obj in store.given]

    save(connector, objects, transfer, kvcaches=pages, **kwargs)
    settle()
    assert (content(model.fmt, on("cpu", pages)) == held).all(), "a store changed pages"
    check_padding(connector, transfer, store.given, noise)

    target = on(device, zeroed(source))
    expected = np.zeros_like(held)
    for _, slot in transfer.loaded:
        expected[:, :, slot] = held[:, :, slot]
    load(connector, objects, transfer, kvcaches=target, **kwargs)
    settle()
    found = content(model.fmt, on("cpu", target))
    assert (found == expected).all(), f"slots {sorted(set(np.argwhere(found != expected)[:, 2]))}"
    store.give_back()
    assert store.allocator.live == 0


def check_padding(
    connector: Any, transfer: Transfer, objects: Sequence[MemoryObj], noise: list[list[np.ndarray]]
) -> None:
    """Rows of tokens without a slot are what they were."""
    spans = list(zip(transfer.starts, transfer.ends, strict=True))
    for at, (obj, before) in enumerate(zip(objects, noise, strict=True)):
        start, end = spans[at % len(spans)]
        padded = [token - start for token in range(start, end) if transfer.slots[token] < 0]
        for tensor, old in zip(obj.tensors, before, strict=True):
            axis = 0 if obj.metadata.fmt.axes == "T2D" else tensor.dim() - 2
            assert (raw(tensor).take(padded, axis) == old.take(padded, axis)).all()


def check_mixed(
    data: st.DataObject, device: str = "cpu", use_gpu: bool = False, settle: Callable[[], None] = lambda: None
) -> None:
    """V3 over layers of two kinds, blocks of two sizes; a slot mapping for all or one per engine group."""
    sizes_of = [(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))) for _ in range(2)]
    kinds = [
        Case(nl=2, nb=nb, bs=bs, nh=at + 1, hs=4 << at, dtype=(torch.bfloat16, torch.float32)[at])
        for at, (nb, bs) in enumerate(sizes_of)
    ]
    apart = data.draw(st.booleans())
    limit = min(case.slots for case in kinds)
    transfer = data.draw(transfers(limit))
    built = [build(1, case) for case in kinds]
    source = [built[layer % 2][layer // 2] for layer in range(4)]
    held = [content(1, [tensor]) for tensor in source]
    infos = [EngineGroupInfo(at, (at, at + 2)) for at in range(2)] if apart else ()
    meta = SimpleNamespace(
        kv_shape=(4, 2, 5040, 1, 4), use_mla=False, kv_dtype=torch.bfloat16,
        kv_layer_groups_manager=KVLayerGroupsManager(source, [1] * 4, infos, 5040),
    )  # fmt: skip
    hints = {"engine_kv_format": 1}
    connector = connectors.VLLMPagedMemGPUConnectorV3(meta, None, use_gpu, hints)
    slots = torch.tensor(transfer.slots, dtype=torch.int64)
    other = torch.where(slots < 0, slots, limit - 1 - slots)  # the same tokens elsewhere
    mapping = [slots, other] if apart else slots
    pages, target = on(device, source), on(device, zeroed(source))
    objects = [
        AdHocMemoryAllocator().allocate(
            [tuple(s) for s in connector.get_shapes(end - start)], connector.get_dtypes()
        )
        for start, end in zip(transfer.starts, transfer.ends, strict=True)
    ]
    save(connector, objects, transfer, kvcaches=pages, slot_mapping=mapping)
    load(connector, objects, transfer, kvcaches=target, slot_mapping=mapping)
    settle()
    for layer, (old, new) in enumerate(zip(held, on("cpu", target), strict=True)):
        expected = np.zeros_like(old)
        for token, _ in transfer.loaded:
            slot = int((other if apart and layer % 2 else slots)[token])
            expected[:, :, slot] = old[:, :, slot]
        assert (content(1, [new]) == expected).all(), f"layer {layer}"
