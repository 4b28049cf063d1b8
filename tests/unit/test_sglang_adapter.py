"""LMCache inside SGLang's process: slots restored exactly, salts apart, nothing left behind by what is dropped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.errors import ConfigError

torch = pytest.importorskip("torch")

from helpers.sglang_engine import HEADS, LAYERS, WIDTH, model  # noqa: E402 -- needs torch
from lmcache.integration.sglang.sglang_adapter import (  # noqa: E402
    LMCacheConnector,
    LMCacheLayerwiseConnector,
    LoadMetadata,
    StoreMetadata,
)

pytestmark = pytest.mark.torch

CHUNK, SLOTS = 16, 192


class Rig:
    """A connector and SGLang's pools."""

    def __init__(self, folder: Path, layerwise: bool, mla: bool = False, **extra: Any) -> None:
        file = folder / "in-process.yaml"
        lines = [
            f"chunk_size: {CHUNK}",
            "max_local_cpu_size: 0.01",
            f"use_layerwise: {str(layerwise).lower()}",
        ]
        given = {"cpu_connector": "true", "model_revision": "r1", **extra}
        file.write_text("\n".join([*lines, "extra_config:", *(f"  {k}: {v}" for k, v in given.items())]))
        shape = (SLOTS, 1 if mla else HEADS, WIDTH)
        self.mla = mla
        self.k = [torch.rand(shape) for _ in range(LAYERS)]
        self.v = [] if mla else [torch.rand(shape) for _ in range(LAYERS)]
        cls = LMCacheLayerwiseConnector if layerwise else LMCacheConnector
        self.layerwise = layerwise
        self.connector: Any = cls(
            sgl_config=model(mla), tp_size=1, rank=0, k_pool=self.k, v_pool=self.v, config_file=str(file)
        )

    @property
    def pages(self) -> list[torch.Tensor]:
        return [*self.k, *self.v]

    def store(self, tokens: list[int], slots: list[int], node: Any = None, **key: Any) -> None:
        indices = torch.tensor(slots, dtype=torch.int32)
        self.connector.store_kv(StoreMetadata(node, tokens, indices, 0, **key))

    def load(self, tokens: list[int], slots: list[int], offset: int = 0, **key: Any) -> int:
        meta = LoadMetadata(tokens, torch.tensor(slots, dtype=torch.int64), offset, **key)
        if not self.layerwise:
            return int(self.connector.load_kv(meta))
        count = int(self.connector.start_load_kv(meta))
        for layer in range(LAYERS):
            for _ in range(2):  # SGLang's pool asks for K and for V
                self.connector.load_kv_layerwise(layer)
        return count

    def idle(self) -> bool:
        status = self.connector.lmcache_engine.status()
        return not (status["lookups"] or status["live_objects"] or status["l1"]["pinned_objects"])


@contextmanager
def a_rig(*args: Any, **kwargs: Any) -> Iterator[Rig]:
    """A rig that holds nothing at its end."""
    rig = Rig(*args, **kwargs)
    try:
        yield rig
        assert rig.idle()
    finally:
        rig.connector.close()


BOTH = pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])


@BOTH
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_load_restores_the_named_slots_and_no_other(
    tmp_path: Path, layerwise: bool, mla: bool, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(SLOTS)), "slots")
    count = data.draw(st.integers(0, 90), "tokens")
    local = data.draw(st.integers(0, count), "tokens that SGLang has")
    from_offset = data.draw(st.booleans(), "slots begin at the offset")
    tokens = list(range(1, count + 1))
    offset = local // CHUNK * CHUNK
    with a_rig(tmp_path, layerwise, mla) as rig:
        rig.store(tokens, order[:count])
        reference = [page.clone() for page in rig.pages]
        target = order[count : 2 * count]
        for page in rig.pages:
            page.fill_(-1)
        slots = [*[-1] * local, *target[local:]]
        got = rig.load(tokens, slots[offset:] if from_offset else slots, offset)
        end = count // CHUNK * CHUNK
        assert got == max(0, end - offset)
        for page, was in zip(rig.pages, reference, strict=True):
            expected = torch.full_like(page, -1)
            if got:
                expected[target[local:end]] = was[order[local:end]]
            assert torch.equal(page, expected)


@BOTH
def test_nothing_found_is_zero_and_touches_nothing(tmp_path: Path, layerwise: bool) -> None:
    with a_rig(tmp_path, layerwise) as rig:
        before = [page.clone() for page in rig.pages]
        assert rig.load(list(range(40)), list(range(40))) == 0
        assert rig.load([], []) == 0
        assert all(map(torch.equal, before, rig.pages))


@BOTH
def test_salts_and_adapters_keep_equal_tokens_apart(tmp_path: Path, layerwise: bool) -> None:
    tokens, slots = list(range(32)), list(range(32))
    keys = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}]
    with a_rig(tmp_path, layerwise) as rig:
        for key in keys:
            assert rig.load(tokens, slots, **key) == 0
            rig.store(tokens, slots, **key)
            assert rig.load(tokens, slots, **key) == 32
        node = SimpleNamespace(key=SimpleNamespace(extra_key="of the node", cache_salt=None))
        assert rig.load(tokens, slots, extra_key="of the node") == 0
        rig.store(tokens, slots, node)  # what SGLang does not say itself is in its tree
        assert rig.load(tokens, slots, extra_key="of the node") == 32


@BOTH
def test_reset_forgets_and_close_lets_go(tmp_path: Path, layerwise: bool) -> None:
    with a_rig(tmp_path, layerwise) as rig:
        rig.store(list(range(32)), list(range(32)))
        rig.connector.reset()
        assert rig.load(list(range(32)), list(range(32))) == 0
        assert rig.connector.chunk_size() == CHUNK
        rig.connector.close()
        rig.connector.close()


@pytest.mark.parametrize("layers_run", range(LAYERS))
def test_a_forward_pass_that_stops_half_way_leaves_nothing_held(tmp_path: Path, layers_run: int) -> None:
    tokens = list(range(48))
    with a_rig(tmp_path, True) as rig:
        rig.store(tokens, tokens)
        for _ in range(3):
            assert rig.connector.start_load_kv(LoadMetadata(tokens, torch.arange(48), 0)) == 48
        for layer in range(layers_run):
            rig.connector.load_kv_layerwise(layer)
        rig.connector.reset()
        assert rig.idle()
        rig.store(tokens, tokens)
        assert rig.load(tokens, tokens) == 48


def test_layer_by_layer_each_layer_is_there_when_it_is_computed(tmp_path: Path) -> None:
    tokens = list(range(32))
    with a_rig(tmp_path, True) as rig:
        rig.store(tokens, tokens)
        reference = [page.clone() for page in rig.pages]
        for page in rig.pages:
            page.fill_(-1)
        rig.connector.start_load_kv(LoadMetadata(tokens, torch.arange(32) + 64, 0))
        for layer in range(LAYERS):
            rig.connector.load_kv_layerwise(layer)
            for page, was in ((rig.k, reference[:LAYERS]), (rig.v, reference[LAYERS:])):
                assert torch.equal(page[layer][64:96], was[layer][:32])


def test_a_rank_that_finds_less_sets_what_all_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(64))
    with a_rig(tmp_path, True) as rig:
        rig.store(tokens, tokens)
        for page in rig.pages:
            page.fill_(-1)
        answers = iter([64, 32, 32])  # of the other ranks: lookup, what came, and once more
        monkeypatch.setattr(rig.connector, "_least", lambda mine: min(mine, next(answers)))
        assert rig.load(tokens, list(range(64, 128))) == 32
        for page in rig.pages:
            assert bool((page[96:] == -1).all())  # SGLang took these slots back


@BOTH
def test_what_a_fault_interrupts_is_given_back(
    tmp_path: Path, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(48))
    with a_rig(tmp_path, layerwise) as rig:
        rig.store(tokens[:32], tokens[:32])
        engine = rig.connector.lmcache_engine

        def fault(*_: Any, **__: Any) -> None:
            raise RuntimeError("a fault of the device")

        with monkeypatch.context() as patch:
            patch.setattr(type(engine.gpu_connector.pages), "move_layer" if layerwise else "move", fault)
            with pytest.raises(RuntimeError, match="a fault of the device"):
                rig.load(tokens, tokens)
            rig.store(tokens, tokens)  # costs the store, not the engine
        assert rig.idle()
        assert rig.load(tokens, tokens) == 32


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_rig(tmp_path, False) as rig:
        with pytest.raises(ValueError, match="slot_mapping of 3 slots"):
            rig.load(list(range(32)), [1, 2, 3])
        with pytest.raises(ValueError, match="kv_indices of 3 slots"):
            rig.store(list(range(32)), [1, 2, 3])
    with pytest.raises(ConfigError, match="k_pool"):
        LMCacheConnector(model(), 1, 0, [], [])
    args = SimpleNamespace(enable_lora=True)
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.server_args",
        SimpleNamespace(get_global_server_args=lambda: args),
    )
    with pytest.raises(ConfigError, match="LoRA"):
        Rig(tmp_path, True)


def test_a_class_without_its_mode_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, True)
    rig.connector.close()
    with pytest.raises(ConfigError, match="use_layerwise"):
        LMCacheConnector(model(), 1, 0, rig.k, rig.v, str(tmp_path / "in-process.yaml"))
