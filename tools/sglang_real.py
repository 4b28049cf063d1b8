"""Drive a real SGLang's ``LMCacheUnifiedRadixCache`` and its pools on the CPU, against a real server.

    python tools/sglang_real.py FOLDER        # where a wheel of SGLang 0.5.23 is unpacked

SGLang as a whole needs a GPU; its radix cache and pools do not. What they import and do not use here is replaced by
stand-ins. Needs torch, transformers and the small packages that SGLang imports (orjson, pybase64, triton, …).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path[:0] = [sys.argv[1], str(Path(__file__).parents[1] / "tests")]

STAND_INS = (
    *("torchvision", "torchaudio", "torchao", "sgl_kernel", "flashinfer", "compressed_tensors", "xgrammar"),
    *("llguidance", "outlines", "decord", "openai_harmony", "soundfile", "partial_json_parser", "av", "timm"),
)


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIn(types.ModuleType):
    """A module that has everything."""

    __path__: list[str] = []  # noqa: RUF012 -- what import asks of a package
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = (
            Anything(name, (), {"__init__": lambda *_, **__: None})
            if name[0].isupper()
            else MagicMock(name=name)
        )
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for what is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing: it has everything already."""


sys.meta_path.append(Finder())
warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.mem_cache import base_prefix_cache as api  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.storage.lmcache.lmcache_unified_radix_cache import LMCacheUnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402

from helpers.server import Server, wait_for  # noqa: E402

SLOTS, CHUNK = 512, 64
TOKENS = list(range(1, 300))
HIT = len(TOKENS) // CHUNK * CHUNK


def radix_cache(address: str, folder: Path, page: int, mla: bool) -> Any:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    file = folder / "mp.yaml"
    file.write_text(f"mp_host: {host}\nmp_port: {port}\nextra_config: {{lmcache.mp.model_revision: r1}}\n")
    sizes: Any = (SLOTS, page, torch.float32)
    pool: Any = (
        MLATokenToKVPool(*sizes, 8, 4, 2, "cpu", False)
        if mla
        else MHATokenToKVPool(*sizes, 2, 8, 2, "cpu", False, enable_alt_stream=False)
    )
    slots = (
        TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", pool, False)
        if page == 1
        else PagedTokenToKVPoolAllocator(SLOTS, page, torch.float32, "cpu", pool, False)
    )
    requests = ReqToTokenPool(8, 1024, "cpu", False)
    params = CacheInitParams(False, requests, slots, page, tree_components=(ComponentType.FULL,))
    config = SimpleNamespace(
        model_path="none", revision=None, attention_arch=AttentionArch.MLA if mla else AttentionArch.MHA,
        hf_config=None, dtype="float32", quantization=None, context_len=1024,
    )  # fmt: skip
    return LMCacheUnifiedRadixCache(
        params, model_config=config, tp_size=1, tp_rank=0, lmcache_config_file=str(file), forward_stream=None
    )


def request(rid: str) -> Any:
    zeros = dict.fromkeys(
        ("storage_hit_length", "host_hit_length", "swa_host_hit_length", "mamba_host_hit_length"), 0
    )
    return SimpleNamespace(
        rid=rid, cache_request_handle=api.CacheRequestHandle(rid, 0), extra_key=None, cache_salt=None, session=None,
        kv=SimpleNamespace(mamba_pool_idx=None, mamba_cow_src_index=None), **zeros,
    )  # fmt: skip


def tensors(cache: Any) -> list[Any]:
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)


def settle(cache: Any) -> None:
    def settled() -> bool:
        cache.check_hicache_events()
        loading = any(flow.load and not flow.load_completed for flow in cache._external_flows.values())
        return not (cache._pending_stores or loading)

    wait_for(settled, what="loads and stores")


def check(server: Server, folder: Path, page: int, mla: bool) -> None:
    make: Callable[[], Any] = lambda: radix_cache(server.running.address, folder, page, mla)  # noqa: E731
    key = RadixKey(array("q", TOKENS), None).page_aligned(page)
    first, second = make(), make()

    slots = first.token_to_kv_pool_allocator.alloc(len(key))
    for tensor in tensors(first):
        tensor[slots] = torch.rand_like(tensor[slots])
    first.insert(api.InsertParams(key=key, value=slots, inserted_len=0, priority=0))
    first._submit_store(request("stored"), array("q", TOKENS))
    settle(first)
    first._request_session_finish("stored")

    root = second.match_prefix(api.MatchPrefixParams(key=key)).last_device_node

    def found(req: Any, **salt: str) -> Any:
        second.prefetch_from_storage(req.cache_request_handle, root, TOKENS, **salt)
        wait_for(lambda: second.check_prefetch_progress(req.cache_request_handle), what="a lookup")
        return second.match_prefix(api.MatchPrefixParams(key=key, req=req))

    def loaded(req: Any) -> Any:
        match = found(req)
        assert match.host_hit_length == HIT, match
        load = api.InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
        assert second.init_load_back(load)[0] == HIT
        return second._external_flows[req.rid].load.device_indices

    req = request("loaded")
    into = loaded(req)
    settle(second)
    for here, there in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(here[slots[:HIT]], there[into])
    assert second.match_prefix(api.MatchPrefixParams(key=key, req=req)).device_prefix_len == HIT
    second.release_aborted_request(req.cache_request_handle)

    other = request("another salt")
    assert found(other, cache_salt="t").host_hit_length == 0
    second.release_aborted_request(other.cache_request_handle)
    early, late = request("dropped early"), request("dropped late")
    second.prefetch_from_storage(early.cache_request_handle, root, TOKENS)
    second.release_aborted_request(early.cache_request_handle)
    found(late)
    second.release_aborted_request(late.cache_request_handle)
    assert not second.has_pending_cache_operations()
    assert second.token_to_kv_pool_allocator.available_size() == SLOTS
    wait_for(server.idle, what="everything given back")

    loaded(request("under way"))
    second.reset()
    wait_for(server.idle, what="everything given back after a reset")
    assert second.clear_storage_backend()
    first.shutdown()
    second.shutdown()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Server("--chunk-size", str(CHUNK), l1_gb=0.05) as server:
        for page in (1, 16, 64):
            for mla in (False, True):
                check(server, Path(folder), page, mla)
                print(f"page size {page}, {'MLA' if mla else 'MHA'}: {HIT} tokens restored, nothing held")


if __name__ == "__main__":
    main()
