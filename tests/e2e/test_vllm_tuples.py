"""The connector in vLLM's own hands, but for the engine: this vLLM's CPU backend has no caches that are tuples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.server import Server, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect

# Importing vLLM, which other tests have in another process, warns of what torch deprecates.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default::DeprecationWarning")]

CHUNK, BLOCK = 256, 16
TOKENS = list(range(2 * CHUNK))
SOURCE = list(range(1, 33))


@contextmanager
def worker(port: int, name: str, caches: dict[str, Any], layerwise: bool) -> Iterator[Any]:
    """A worker's connector that was shown ``caches``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from helpers.vllm_caches import kv_config, vllm_config
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.v1.multiprocess.transfer_context.layered import LayeredTransfers

    config, kv = vllm_config(), kv_config()
    kv.num_blocks = 64
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config={"lmcache.mp.port": port, "lmcache.mp.model_revision": "r1"}, engine_id=name
    )
    vars(config.parallel_config).update(rank=0, world_size=1)
    connector = LMCacheMPConnector(config, KVConnectorRole.WORKER, kv)
    connector.register_kv_caches(caches)
    assert connector._worker is not None
    if layerwise:  # what an engine in whose process the server is may ask for
        connector._worker._layers = LayeredTransfers(connector._worker.context)
    wait_for(lambda: connector._worker.context.client.up, 20, "the worker's session")
    try:
        yield connector
    finally:
        connector.shutdown()


def step(connector: Any, caches: dict[str, Any], loads: list[Any], stores: list[Any]) -> set[str]:
    """As vLLM drives a worker through a step; the requests whose load failed."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnectorMetadata
    from lmcache.integration.vllm.scheduler_side import StepPlan

    connector.bind_connector_metadata(LMCacheMPConnectorMetadata(StepPlan(1, 0, loads, stores)))
    connector.start_load_kv(None)
    for name, cache in caches.items():
        connector.wait_for_layer_load(name)
        connector.save_kv_layer(name, cache, None)
    connector.wait_for_save()
    connector.get_transfer_results(set())
    connector.clear_connector_metadata()
    failed: set[str] = connector._result.failed
    return failed


@pytest.mark.parametrize("layerwise", [False, True], ids=["in one go", "layer by layer"])
def test_a_step_stores_k_and_v_and_another_engine_s_step_loads_them(layerwise: bool) -> None:
    import torch

    from helpers.vllm_caches import NAMES

    def caches(fill: Any) -> dict[str, Any]:
        return {name: tuple(fill(64, BLOCK, 2, 8, dtype=torch.bfloat16) for _ in "kv") for name in NAMES}

    with Server() as server:
        source, target = caches(torch.randn), caches(torch.zeros)
        with worker(server.port, "one", source, layerwise) as one:
            item = StoreItem(CHUNK, chunk_hashes(TOKENS, Scope(chunk_size=CHUNK)), [SOURCE])
            assert step(one, source, [], [item]) == set()
            assert one._worker.context.counters.stored_chunks == 2
        with worker(server.port, "other", target, layerwise) as other:
            blocks = [block + 30 for block in reversed(SOURCE)]
            scheduler = CacheClient(f"tcp://127.0.0.1:{server.port}", "scheduler", "other", 0, 1)
            assert scheduler.start(20)
            hashes = b"".join(chunk_hashes(TOKENS, Scope(chunk_size=CHUNK)))
            asked = m.Lookup(session=scheduler.session, request="r", lease=7, hashes=hashes)
            hit = expect(m.Found, scheduler.call(asked)[0])
            assert hit.chunks == 2
            load = (LoadItem("r", 7, hit.epoch, [], [blocks], [3]), hit.slots)
            assert step(other, target, [load], []) == set()
            scheduler.close()
        for name in NAMES:
            for stored, loaded in zip(source[name], target[name], strict=True):
                assert torch.equal(loaded[blocks[3:]], stored[SOURCE[3:]])
                rest = sorted(set(range(64)) - set(blocks[3:]))
                assert not loaded[rest].any()


def test_a_layer_without_v_is_refused_at_start() -> None:
    import torch

    from helpers.vllm_caches import NAMES
    from lmcache.errors import LayoutError

    half = {name: (torch.zeros(64, BLOCK, 2, 8, dtype=torch.bfloat16), None) for name in NAMES}
    with pytest.raises(LayoutError, match=f"{NAMES[0]}: 1 tensor in a tuple: expected K and V"):
        with worker(1, "half", half, layerwise=False):
            pass
