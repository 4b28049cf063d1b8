"""A worker whose caches are what a vLLM engine registers: tensors, or tuples of them. vLLM itself is not needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import torch

from lmcache.integration.vllm.identity import describe_groups
from lmcache.testing.engine import BLOCK, CHUNK, Engine
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages

__all__ = [
    "FORMS",
    "MOVED",
    "NAMES",
    "SOURCE",
    "TARGET",
    "TUPLES",
    "Make",
    "VllmEngine",
    "check_comes_back",
    "check_no_crossing",
    "described",
    "kv_config",
    "making",
    "vllm_config",
]

BLOCKS, HEADS, SIZE = 32, 2, 8
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def _new(*shape: int, device: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _pair(device: Any) -> Any:
    return tuple(_new(BLOCKS, BLOCK, HEADS, SIZE, device=device) for _ in "kv")


def _slots(device: Any) -> Any:
    """As on Gaudi: slots in one axis, a block to spare, and places for scales."""
    return (*(_new((BLOCKS + 1) * BLOCK, HEADS, SIZE, device=device) for _ in "kv"), None, None)


def _beside(device: Any) -> Any:
    return list(_new(BLOCKS, 2, BLOCK, HEADS, SIZE, device=device).unbind(1))


def _one(device: Any) -> Any:
    return _new(BLOCKS, HEADS, BLOCK, 2 * SIZE, device=device)


def _latents(device: Any) -> Any:
    return tuple(_new(BLOCKS, BLOCK, 1, width, device=device) for width in (24, 8))


FORMS: dict[str, Callable[[Any], Any]] = {
    "pairs": _pair,
    "slots": _slots,
    "beside": _beside,
    "latents": _latents,
    "one tensor": _one,
}
"""A layer's cache on a device, by name. All but latents hold as many bytes per block."""
TUPLES = [form for form in FORMS if form != "one tensor"]
SOURCE, TARGET = [5, 2, 9, 7, 3, 12], [20, 31, 18, 25, 29, 22]
MOVED = dict(zip(TARGET, SOURCE, strict=True))


class MLAAttentionSpec(SimpleNamespace):
    """Told by its name."""


class FullAttentionSpec(SimpleNamespace):
    """Told by its name."""


def vllm_config() -> Any:
    """As much of vLLM's as tells its KV from others'."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="tuples", dtype="bfloat16", quantization=None, max_model_len=4096,
            hf_config=SimpleNamespace(), multimodal_config=None,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


def kv_config(form: str = "pairs") -> Any:
    """One group of all layers."""
    spec = (MLAAttentionSpec if form == "latents" else FullAttentionSpec)(block_size=BLOCK)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(NAMES))
    return SimpleNamespace(
        kv_cache_groups=[group], num_blocks=BLOCKS, kv_cache_layout="LBHNC", kv_tp_replicas=1
    )


def described(form: str, caches: dict[str, Any]) -> KVGroupPages:
    """What the connector makes of them."""
    with mock.patch.dict(sys.modules, {"vllm": SimpleNamespace(__version__="0")}):
        (group,) = describe_groups(vllm_config(), kv_config(form), caches, "r1", 0)
    return group


class VllmEngine(Engine):
    """An engine with two layers of a form of :data:`FORMS`."""

    def __init__(self, server: Any, device: Any, mode: str, name: str, form: str) -> None:
        self.form = form
        self.caches = {layer: FORMS[form](device) for layer in NAMES}
        super().__init__(server, device, mode, name, num_blocks=BLOCKS)

    def pages(self, rank: int, ranks: int, planes: int) -> KVGroupPages:
        group = described(self.form, self.caches)
        self.tensors = group.tensors
        return group

    def randomize(self, seed: int) -> None:
        """Values of their own into all there is, spare blocks and padding too."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.randn(tuple(tensor.shape), generator=generator).to(tensor.dtype))

    def blocks(self) -> list[torch.Tensor]:
        """Each tensor's values on the host, by block."""
        return [
            held.view(-1, BLOCK, *held.shape[1:]) if held.dim() == 3 else held
            for held in (tensor.cpu().clone() for tensor in self.tensors)
        ]

    def differences(
        self, before: list[torch.Tensor], source: list[torch.Tensor], moved: dict[int, int]
    ) -> list[str]:
        """Blocks that are not what they were, or, for those ``moved`` there, what they are in ``source``."""
        return [
            f"tensor {at} block {block}"
            for at, (now, was, other) in enumerate(zip(self.blocks(), before, source, strict=True))
            for block in range(len(now))
            if not torch.equal(now[block], other[moved[block]] if block in moved else was[block])
        ]


Make: TypeAlias = "Callable[[str, str], VllmEngine]"
"""An engine that is up, by form and name."""


@contextmanager
def making(server: Any, device: str, mode: str) -> Iterator[Make]:
    """What makes engines in a transfer mode; they are closed at the end."""
    with ExitStack() as stack:

        def make(form: str, name: str) -> VllmEngine:
            engine = VllmEngine(server, torch.device(device), mode, f"{mode} {form} {name}", form)
            stack.enter_context(closing(engine)).wait_up()
            return engine

        yield make


def check_comes_back(make: Make, form: str, prompt: int) -> None:
    """What one engine stored fills the zeroed pages of another, and nothing else of it changes."""
    tokens = [prompt, *range(1, 3 * CHUNK)]
    one, other = make(form, "one"), make(form, "other")
    one.randomize(1)
    held, zeros = one.blocks(), other.blocks()
    assert one.store(tokens, SOURCE) == 3
    assert one.differences(held, held, {}) == []
    assert other.load("r", tokens, TARGET, wait_for=3) == 3
    assert other.differences(zeros, held, MOVED) == []
    assert len(other.differences(zeros, held, {})) == len(TARGET) * len(zeros), "the comparison sees nothing"


def check_no_crossing(make: Make, prompt: int) -> None:
    """Of one prompt each layout has its own KV; those that differ in where blocks lie alone share theirs."""
    tokens = [prompt, *range(1, 3 * CHUNK)]
    shared = {"slots": "pairs", "beside": "pairs"}
    made = {form: make(form, "among others") for form in FORMS}
    for seed, (form, engine) in enumerate(made.items()):
        engine.randomize(10 + seed)
        found = engine.find("before", tokens)[1].chunks
        assert found == (3 if form in shared else 0), form
        assert engine.store(tokens, SOURCE) == (0 if form in shared else 3), form
    held = {form: engine.blocks() for form, engine in made.items()}
    for form, engine in made.items():
        assert engine.load(form, tokens, TARGET, wait_for=3) == 3
        assert engine.differences(held[form], held[shared.get(form, form)], MOVED) == [], form
