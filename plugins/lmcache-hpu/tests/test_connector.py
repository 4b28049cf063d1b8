"""The in-process connector on the simulated accelerator: whole chunks, by the hook that engines ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_hpu._native")

from hpu_on_sim import HpuOnSimSpec, distribution
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_shapes import Shapes

from lmcache.errors import ConfigError, LayoutError
from lmcache.utils import EngineType
from lmcache.v1.memory.allocators import AdHocMemoryAllocator
from lmcache_hpu import connectors

pytestmark = [pytest.mark.torch, pytest.mark.sim]

LAYERS, BLOCKS, SIZE, HEADS, WIDTH = 3, 6, 4, 2, 8
TOTAL, HIDDEN = BLOCKS * SIZE, HEADS * WIDTH
PLAIN = {"use_layerwise": False, "enable_blending": False, "enable_pd": False, "extra_config": None}


def metadata(mla: bool = False) -> Any:
    return SimpleNamespace(
        kv_shape=(LAYERS, 1, 16, 1, WIDTH) if mla else (LAYERS, 2, 16, HEADS, WIDTH),
        kv_dtype=torch.bfloat16, use_mla=mla, local_worker_id=0,
    )  # fmt: skip


@pytest.fixture
def made(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Connectors by the hook of the wheel's spec, where it serves the simulated device."""
    from lmcache.v1.gpu_connector import lanes, pages

    spec = HpuOnSimSpec()
    monkeypatch.setattr(pages, "resolve_device_ops", lambda kind: spec.get_ops())
    monkeypatch.setattr(lanes, "spec_of", lambda device: spec)
    monkeypatch.setattr(spec, "_get_torch_module", lambda: sim)

    def make(mla: bool = False, engine: Any = EngineType.VLLM, **config: Any) -> Any:
        return spec.create_gpu_connector(SimpleNamespace(**{**PLAIN, **config}), metadata(mla), engine)

    return make


def tensor(*shape: int) -> Any:
    return torch.randn(shape).to(torch.bfloat16).to("sim")


def pairs(*shape: int) -> Any:
    return [(tensor(*shape), tensor(*shape)) for _ in range(LAYERS)]


FORMS = {
    "K and V as tuples": lambda: pairs(BLOCKS, SIZE, HEADS, WIDTH),
    "tuples of slots": lambda: pairs(TOTAL, HEADS, WIDTH),
    "tuples with places for scales": lambda: [
        (*layer, None, None) for layer in pairs(BLOCKS, SIZE, HEADS, WIDTH)
    ],
    "K and V in one tensor": lambda: [tensor(2, BLOCKS, SIZE, HEADS, WIDTH) for _ in range(LAYERS)],
    "one latent": lambda: [tensor(BLOCKS, SIZE, WIDTH) for _ in range(LAYERS)],
    "tuples of a latent": lambda: [(tensor(BLOCKS, SIZE, WIDTH), None) for _ in range(LAYERS)],
    "tuples of a latent's slots": lambda: [(tensor(TOTAL, WIDTH), None, None, None) for _ in range(LAYERS)],
}


def by_slot(cache: Any) -> Any:
    """``[layers, planes, slots, elements]`` on the host, read without anything of what is tested."""
    rows = []
    for layer in cache:
        parts = [one for one in layer if one is not None] if isinstance(layer, tuple) else [layer]
        planes = [part for one in parts for part in (one.unbind(0) if one.dim() == 5 else [one])]
        rows.append(torch.stack([plane.cpu().reshape(TOTAL, -1) for plane in planes]))
    return torch.stack(rows)


def zeroed(cache: Any) -> Any:
    return [
        tuple(one if one is None else torch.zeros_like(one) for one in layer)
        if isinstance(layer, tuple)
        else torch.zeros_like(layer)
        for layer in cache
    ]


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)  # fmt: skip
@given(data=st.data())
def test_a_store_and_a_load_into_zeros_restore_exactly_the_named_slots(
    made: Any, form: str, data: st.DataObject
) -> None:
    mla = "latent" in form
    slots = [
        slot if data.draw(st.integers(0, 4)) else -1 for slot in data.draw(st.permutations(range(TOTAL)))
    ]
    edges = sorted(data.draw(st.sets(st.integers(0, TOTAL), min_size=2, max_size=4)))
    starts, ends = edges[:-1], edges[1:]
    cached = data.draw(st.integers(0, TOTAL))
    mapping = torch.tensor(slots)
    if data.draw(st.booleans()):
        mapping = mapping.to("sim")
    cache, allocator, connector = FORMS[form](), AdHocMemoryAllocator(), made(mla)
    shapes = [connector.get_shape(end - start) for start, end in zip(starts, ends, strict=True)]
    objects = [allocator.allocate(tuple(shape), torch.bfloat16) for shape in shapes]
    connector.batched_from_gpu(objects, starts, ends, kvcaches=cache, slot_mapping=mapping)
    target = zeroed(cache)
    connector.batched_to_gpu(
        objects, starts, ends, kvcaches=target, slot_mapping=mapping, vllm_cached_tokens=cached
    )
    named = [slots[token] for token in range(max(starts[0], cached), ends[-1]) if slots[token] >= 0]
    expected = torch.zeros_like(by_slot(cache))
    expected[:, :, named] = by_slot(cache)[:, :, named]
    assert torch.equal(by_slot(target), expected)
    for one in objects:
        assert one.get_ref_count() == 1
        one.ref_count_down()


def test_chunks_of_any_length_make_no_more_shapes_than_one_of_each_size(made: Any) -> None:
    from lmcache.v1.platform.fixed_shapes import DEFAULT_SIZES

    connector, allocator = made(), AdHocMemoryAllocator()
    cache = [tuple(torch.zeros(100, SIZE, HEADS, WIDTH, device="sim") for _ in "kv") for _ in range(LAYERS)]
    connector.dtype = torch.float32

    def seen(lengths: Any) -> set[Any]:
        mapping = torch.arange(400).to("sim")
        with Shapes() as shapes:
            for length in lengths:
                obj = allocator.allocate(tuple(connector.get_shape(length)), torch.float32)
                start = 400 - length
                connector.from_gpu(obj, start, 400, kvcaches=cache, slot_mapping=mapping)
                connector.to_gpu(
                    obj, start, 400, kvcaches=cache, slot_mapping=mapping, vllm_cached_tokens=length // 3
                )
                obj.ref_count_down()
        return {entry for entry in shapes.seen if "index" in entry[0]}

    few = seen(DEFAULT_SIZES)
    assert len(few) == 2 * len(DEFAULT_SIZES)
    assert seen((1, 2, 3, 5, 7, 13, 31, 33, 100, 129, 300)) == few


def test_a_new_cache_is_noticed_though_the_device_tells_no_addresses(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.Tensor.data_ptr
    monkeypatch.setattr(
        torch.Tensor, "data_ptr", lambda self: 0 if self.device.type == "sim" else whole(self)
    )
    connector, (old, new) = made(), [FORMS["K and V as tuples"]() for _ in range(2)]
    obj = AdHocMemoryAllocator().allocate(tuple(connector.get_shape(TOTAL)), torch.bfloat16)
    for cache in (old, new, [(*layer, None) for layer in old]):
        connector.from_gpu(obj, 0, TOTAL, kvcaches=cache, slot_mapping=torch.arange(TOTAL))
        planes = by_slot([layer[:2] for layer in cache]).transpose(0, 1)
        assert torch.equal(obj.tensor.reshape(planes.shape), planes)


def test_one_tensor_of_all_layers_is_taken_as_such(made: Any) -> None:
    cache, connector = tensor(BLOCKS, LAYERS, 2, SIZE, HEADS, WIDTH), made()
    obj = AdHocMemoryAllocator().allocate(tuple(connector.get_shape(TOTAL)), torch.bfloat16)
    connector.from_gpu(obj, 0, TOTAL, kvcaches=cache, slot_mapping=torch.arange(TOTAL))
    expected = cache.cpu().permute(2, 1, 0, 3, 4, 5).reshape(2, LAYERS, TOTAL, HIDDEN)
    assert torch.equal(obj.tensor, expected)


def test_steps_are_marked_and_the_engine_s_queue_is_not_left(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_hpu import runtime

    marks: list[int] = []
    monkeypatch.setattr(runtime, "end_step", lambda: marks.append(1))
    runtime.mover.cache_clear()
    connector = made()
    obj = AdHocMemoryAllocator().allocate(tuple(connector.get_shape(5)), torch.bfloat16)
    connector.from_gpu(obj, 0, 5, kvcaches=FORMS["K and V as tuples"](), slot_mapping=torch.arange(5))
    assert marks
    assert connector.store_stream is None


def test_what_was_queued_before_a_store_is_in_what_is_stored(made: Any, sim: Any) -> None:
    connector = made()
    cache = FORMS["K and V as tuples"]()
    obj = AdHocMemoryAllocator().allocate(tuple(connector.get_shape(TOTAL)), torch.bfloat16)
    ones = torch.ones(BLOCKS, SIZE, HEADS, WIDTH, dtype=torch.bfloat16)
    sim.set_delay(2000)
    try:
        for layer in cache:
            for part in layer:
                part.copy_(ones, non_blocking=True)
        connector.from_gpu(obj, 0, TOTAL, kvcaches=cache, slot_mapping=torch.arange(TOTAL))
    finally:
        sim.set_delay(0)
    assert bool((obj.tensor == 1).all())


@pytest.mark.parametrize(
    ("layer", "mla", "said"),
    [
        (
            lambda: (*pairs(BLOCKS, SIZE, HEADS, WIDTH)[0], tensor(1), tensor(1)),
            False,
            "4 tensors in 4 places",
        ),
        (
            lambda: (tensor(BLOCKS, SIZE, HEADS, WIDTH), None),
            False,
            "1 tensors in 2 places: expected K and V",
        ),
        (
            lambda: (None, tensor(BLOCKS, SIZE, HEADS, WIDTH)),
            False,
            "1 tensors in 2 places: expected K and V",
        ),
        (lambda: (tensor(BLOCKS, SIZE, HEADS, WIDTH),), False, "1 tensors in 1 places"),
        (lambda: (), False, "0 tensors in 0 places"),
        (lambda: (), True, "0 tensors in 0 places: expected a latent"),
        (lambda: (tensor(BLOCKS, SIZE, WIDTH), None, tensor(1), None), True, "2 tensors in 4 places"),
    ],
    ids=["scales", "K", "V", "one", "none", "no latent", "a latent's scales"],
)
def test_what_is_neither_k_and_v_nor_a_latent_is_refused_by_its_layer(
    made: Any, layer: Any, mla: bool, said: str
) -> None:
    cache = FORMS["tuples of a latent" if mla else "K and V as tuples"]()
    cache[1] = layer()
    with pytest.raises(LayoutError, match=f"layer 1 has {said}"):
        made(mla).initialize_kvcaches_ptr(kvcaches=cache)


@pytest.mark.parametrize(
    "other",
    [
        {"use_layerwise": True},
        {"use_layerwise": True, "enable_blending": True},
        {"extra_config": {"use_gpu_connector_v3": True}},
        {"engine": EngineType.SGLANG},
    ],
)
def test_what_is_not_served_on_this_device_is_refused_in_one_line(made: Any, other: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="in its process on sim: expected vllm, with use_layerwise"
    ) as caught:
        made(**other)
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("lmcache_sim", reason="needs the simulated accelerator: ./dev hpu")
    return {**os.environ, **distribution(tmp_path)}


ROUTED = """
from types import SimpleNamespace as S
import torch
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector import CreateGPUConnector
config = S(use_layerwise=False, enable_blending=False, enable_pd=False, extra_config=None)
metadata = S(kv_shape=(3, 2, 16, 2, 8), kv_dtype=torch.bfloat16, use_mla=False, local_worker_id=0)
print(type(CreateGPUConnector(config, metadata, EngineType.VLLM)).__name__)
"""


def test_an_engine_gets_it_from_the_core_s_routing(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUTED], env=installed, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "VLLMPagedMemHPUConnectorV2", done.stderr


def test_the_older_name_is_the_same_class() -> None:
    assert connectors.VLLMPagedMemHPUConnector is connectors.VLLMPagedMemHPUConnectorV2
