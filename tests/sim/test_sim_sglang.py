"""SGLang's connectors on the simulated device: order against the engine's streams, with queues that are late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.server import Server, wait_for  # noqa: E402
from helpers.sglang_engine import model, names  # noqa: E402
from lmcache.integration.sglang.sglang_adapter import (  # noqa: E402
    LMCacheLayerwiseConnector,
    LoadMetadata,
    StoreMetadata,
)
from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector  # noqa: E402

LATE = 15_000  # microseconds that each piece of queued work takes longer
TOKENS = list(range(64))
SOURCE, TARGET = torch.arange(4, 68), torch.arange(68, 132)


@pytest.fixture
def pools(sim: Any) -> Any:
    """K and V of two layers on the device, zeroed, and the same on the host at random."""
    host = [torch.rand(132, 2, 8) for _ in range(4)]
    return [torch.zeros(132, 2, 8, device="sim") for _ in host], host


def assert_loaded(device: list[Any], host: list[Any]) -> None:
    for there, here in zip(device, host, strict=True):
        found = there.cpu()
        assert torch.equal(found[TARGET], here[SOURCE])
        assert not found[SOURCE].any()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("--chunk-size", "16", l1_gb=0.05) as running:
        yield running
        wait_for(running.idle, 10, "everything given back")


def test_copies_wait_for_what_the_engine_has_queued(
    server: Server, sim: Any, pools: Any, tmp_path: Path
) -> None:
    device, host = pools
    wrong = [torch.rand(132, 2, 8) for _ in host]
    address, _, port = server.running.address.removeprefix("tcp://").rpartition(":")
    file = tmp_path / "mp.yaml"
    file.write_text(f"mp_host: {address}\nmp_port: {port}\nextra_config: {{lmcache.mp.model_revision: r1}}\n")
    pool = SimpleNamespace(k_buffer=device[:2], v_buffer=device[2:], start_layer=0)
    connector = UnifiedLMCacheMPConnector(
        config_file=str(file), model_config=model(), tp_size=1, tp_rank=0, tp_group=None, page_size=4,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), req_to_token_pool=None,
        tree_components=names("FULL"), mamba_component=None, sliding_window_size=None,
    )  # fmt: skip
    try:
        forward = sim.Stream()
        computed = [here.to("sim") for here in host]
        sim.synchronize()
        step = sim.Stream()
        step.set_delay(LATE)
        with sim.stream(step):
            for there, here in zip(device, computed, strict=True):
                there.copy_(here)  # queued: the step that computes what is stored
            store = connector.submit_store("a", TOKENS, SOURCE, device_indices_start=0, cache_salt="")
        assert store is not None
        assert store.future.result(20.0)
        assert connector.complete_store(store)
        connector.finish_request("a")
        for there in device:
            there.zero_()
        sim.synchronize()

        operation = connector.submit_lookup("b", TOKENS, local_hit_tokens=0, cache_salt="")
        wait_for(lambda: connector.poll_lookup(operation), what="a hit")
        forward.set_delay(LATE)
        with sim.stream(forward):  # a forward pass under way still writes to the slots that are loaded
            for there, other in zip(device, wrong, strict=True):
                there[68:132].copy_(other[TARGET], non_blocking=True)
        load = connector.submit_load(operation, TARGET, local_hit_tokens=0, producer_stream=forward)
        assert connector.prepare_load_on_stream(load, forward)
        assert connector.complete_load(load)
        connector.finish_request("b")
        assert_loaded(device, host)
    finally:
        connector.close()


def test_a_layer_is_there_when_it_is_computed(sim: Any, pools: Any, tmp_path: Path) -> None:
    device, host = pools
    file = tmp_path / "in-process.yaml"
    file.write_text(
        "chunk_size: 16\nmax_local_cpu_size: 0.01\nuse_layerwise: true\nextra_config: {model_revision: r1}\n"
    )
    connector = LMCacheLayerwiseConnector(
        sgl_config=model(head_dim=8),
        tp_size=1,
        rank=0,
        k_pool=device[:2],
        v_pool=device[2:],
        config_file=str(file),
    )
    try:
        for there, here in zip(device, host, strict=True):
            there.copy_(here)
        connector.store_kv(StoreMetadata(None, TOKENS, SOURCE.to("sim"), 0))
        for there in device:
            there.zero_()
        sim.synchronize()
        mapping = TARGET.to("sim")
        connector.lmcache_engine.gpu_connector.lane("load").stream.set_delay(LATE)
        load_stream = sim.Stream()
        with sim.stream(load_stream):
            assert connector.start_load_kv(LoadMetadata(TOKENS, mapping, 0)) == 64
        compute = sim.Stream()
        seen = []
        for layer in range(2):
            load_stream.synchronize()
            with sim.stream(load_stream):
                connector.load_kv_layerwise(layer)
            with sim.stream(compute):  # which waits for nobody
                seen += [device[layer].cpu(), device[2 + layer].cpu()]
        for found, here in zip(seen, [host[0], host[2], host[1], host[3]], strict=True):
            assert torch.equal(found[TARGET], here[SOURCE])
        assert_loaded(device, host)
        assert connector.lmcache_engine.status()["live_objects"] == 0
    finally:
        connector.close()
