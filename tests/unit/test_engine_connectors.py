"""The engine with the connectors that engines get: KV that went through the cache is back in its slots, bit by bit."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from helpers.connector_cases import ALL, LAYERWISE, Model  # noqa: E402
from helpers.slot_cases import Case, build, content, zeroed  # noqa: E402
from lmcache.errors import ConfigError  # noqa: E402
from lmcache.v1.cache_engine import LMCacheEngine  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector import gpu_connectors as connectors  # noqa: E402
from lmcache.v1.kv_layout import kv_format  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402

pytestmark = pytest.mark.torch

CHUNK = 8
CASE = Case(nl=4, nb=10, bs=4, nh=2, hs=8, dtype=torch.bfloat16)
FORMATS = [1, 2, 3, 6]
PAIRS = [
    (name, fmt)
    for name in ALL
    for fmt in FORMATS
    if not (kv_format(fmt).is_single_kv and (name in LAYERWISE or "V3" in name))
    and not (kv_format(fmt).is_pbs_fused and "V3" in name)
]


def about(model: Model, **changes: Any) -> LMCacheMetadata:
    planes = 1 if model.mla else 2
    fields: dict[str, Any] = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": model.case.dtype,
        "kv_shape": (model.layers, planes, CHUNK, 1, model.hidden),
        "use_mla": model.mla,
        "chunk_size": CHUNK,
        "model_revision": "r",
        "engine": "vllm 1",
    }
    return LMCacheMetadata(**{**fields, **changes})


@contextmanager
def engine_of(connector: Any, meta: LMCacheMetadata, folder: Path, **changes: Any) -> Any:
    config = LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "max_local_cpu_size": 1 / 1024,
            "local_disk": str(folder),
            "max_local_disk_size": 1,
            "use_layerwise": connector.is_layerwise,
            **changes,
        }
    )
    engine = LMCacheEngine(config, meta, connector)
    try:
        yield engine
        assert engine.status()["live_objects"] == 0
    finally:
        engine.close()


def run(engine: LMCacheEngine, what: str, tokens: list[int], **kwargs: Any) -> Any:
    if engine.config.use_layerwise:
        return list(getattr(engine, f"{what}_layer")(tokens, **kwargs))[-1]
    return getattr(engine, what)(tokens, **kwargs)


def expected(held: np.ndarray, slots: torch.Tensor, tokens: int) -> np.ndarray:
    found = np.zeros_like(held)
    own = slots[:tokens].numpy()
    found[:, :, own] = held[:, :, own]
    return found


@pytest.mark.parametrize("unfull", [False, True])
@pytest.mark.parametrize(("name", "fmt"), PAIRS)
def test_kv_comes_back_through_memory_and_through_disk(
    tmp_path: Path, name: str, fmt: int, unfull: bool
) -> None:
    model = Model(fmt, CASE)
    tokens = list(range(2 * CHUNK + 3))
    slots = torch.randperm(CASE.slots, generator=torch.Generator().manual_seed(1))[: len(tokens)]
    source = build(fmt, CASE)
    held = content(fmt, source)
    kept = len(tokens) if unfull else 2 * CHUNK
    hints = {"engine_kv_format": fmt}
    for restart in (False, True):
        meta = about(model)
        use_gpu = "Buffer" in name
        connector = ALL[name].from_metadata(meta, use_gpu=use_gpu, layout_hints=hints)
        with engine_of(connector, meta, tmp_path, save_unfull_chunk=unfull) as engine:
            if restart:
                engine.post_init(kvcaches=source)
            else:
                run(engine, "store", tokens, kvcaches=source, slot_mapping=slots)
            assert engine.lookup(tokens) == kept
            target = zeroed(source)
            mask = run(engine, "retrieve", tokens, kvcaches=target, slot_mapping=slots)
            assert int(mask.sum()) == kept
            assert (content(fmt, target) == expected(held, slots, kept)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float32])
@pytest.mark.parametrize("chunk", [3, 10])
@pytest.mark.parametrize("name", [name for name in ALL if "SGLang" not in name])
def test_chunks_that_are_no_power_of_two_over_odd_blocks_come_back(
    tmp_path: Path, name: str, chunk: int, dtype: Any
) -> None:
    """Some of the prefix is cached already, and the rest ends within a block and within a chunk."""
    case = Case(nl=2, nb=7, bs=1 if "V3" in name and chunk == 3 else 5, nh=3, hs=6, dtype=dtype)
    for fmt in (1, 3):
        model = Model(fmt, case)
        tokens, cached = list(range(fmt, fmt + case.slots - 2)), case.slots // 2
        slots = torch.randperm(case.slots, generator=torch.Generator().manual_seed(chunk))[: len(tokens)]
        source = build(fmt, case)
        planes = 1 if model.mla else 2
        meta = about(model, kv_shape=(model.layers, planes, chunk, 1, model.hidden), chunk_size=chunk)
        connector = ALL[name].from_metadata(
            meta, use_gpu="Buffer" in name, layout_hints={"engine_kv_format": fmt}
        )
        folder = tmp_path / str(fmt)
        with engine_of(connector, meta, folder, chunk_size=chunk, save_unfull_chunk=True) as engine:
            run(engine, "store", tokens, kvcaches=source, slot_mapping=slots)
            target = zeroed(source)
            mask = run(
                engine, "retrieve", tokens, kvcaches=target, slot_mapping=slots, vllm_cached_tokens=cached
            )
            assert mask.all()
            held = content(fmt, source)
            named = slots[cached:].numpy()
            wanted = np.zeros_like(held)
            wanted[:, :, named] = held[:, :, named]
            assert (content(fmt, target) == wanted).all()


def test_layers_that_differ_share_one_object(tmp_path: Path) -> None:
    fmt = 1
    forms = [CASE, Case(nl=4, nb=10, bs=4, nh=1, hs=8, dtype=torch.float32)]
    source = [build(fmt, form)[layer] for layer, form in enumerate(forms)]
    meta = about(Model(fmt, CASE), kv_shape=(2, 2, CHUNK, 2, 8))
    connector = connectors.VLLMPagedMemGPUConnectorV3.from_metadata(
        meta, layout_hints={"engine_kv_format": fmt}
    )
    tokens, slots = list(range(2 * CHUNK)), torch.arange(2 * CHUNK).flip(0)
    with engine_of(connector, meta, tmp_path) as engine:
        assert engine.lookup(tokens) == 0  # nothing is known of the layers yet
        engine.store(tokens, kvcaches=source, slot_mapping=slots)
        layout = engine.chunk_store.shapes.layout(CHUNK)
        assert layout.shapes == ((2, 1, CHUNK, 16), (2, 1, CHUNK, 8))
        assert engine.lookup(tokens) == len(tokens)
        target = [torch.zeros_like(layer) for layer in source]
        assert engine.retrieve(tokens, kvcaches=target, slot_mapping=slots).all()
        for layer, found in zip(source, target, strict=True):
            held = expected(content(fmt, [layer]), slots, len(tokens))
            assert (content(fmt, [found]) == held).all()


def opaque(meta: LMCacheMetadata) -> Any:
    return connectors.VLLMOpaquePagesConnector.from_metadata(meta, layout_hints={"engine_kv_format": 2})


def test_opaque_pages_come_back_as_whole_blocks(tmp_path: Path) -> None:
    model = Model(2, CASE)
    source = build(2, CASE)
    blocks = [7, 2, 9, 0]
    slots = torch.tensor([block * CASE.bs + i for block in blocks for i in range(CASE.bs)])
    tokens = list(range(len(slots)))
    for restart in (False, True):
        meta = about(model)
        with engine_of(opaque(meta), meta, tmp_path) as engine:
            if not restart:
                engine.store(tokens, kvcaches=source, slot_mapping=slots)
            target = zeroed(source)
            assert engine.retrieve(tokens, kvcaches=target, slot_mapping=slots).all()
            assert (content(2, target) == expected(content(2, source), slots, len(tokens))).all()


def test_opaque_pages_want_the_engine_and_its_version_in_their_keys(tmp_path: Path) -> None:
    meta = about(Model(2, CASE), engine="")
    with engine_of(opaque(meta), meta, tmp_path) as engine:
        with pytest.raises(ConfigError, match=r"metadata\.engine"):
            engine.post_init()
