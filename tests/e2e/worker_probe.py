"""Functions that run inside vLLM's worker, beside the connector: they watch, spoil or kill."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any


def _side() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _connector(get_kv_transfer_group())._worker


def _connector(group: Any) -> Any:
    """Ours: behind vLLM's wrapper for the in-process one by its bare name."""
    engine = getattr(group, "_lmcache_engine", None)
    return group if engine is None else engine._inner


def _page_digests(context: Any, blocks: list[list[int]], chunk: int) -> list[str]:
    """Digest of each page set of one chunk: per group and block, over layers; "" for a null block.

    Reads the engine's tensors as vLLM indexes them, not through our page arithmetic.
    """
    out = []
    for group, ids in zip(context.groups, blocks, strict=True):
        per = group.namespace.blocks_per_chunk
        for block in ids[chunk * per : (chunk + 1) * per]:
            total = hashlib.sha256()
            for tensor in group.tensors:
                ratio = tensor.shape[0] // group.num_blocks
                total.update(tensor[block * ratio : (block + 1) * ratio].contiguous().numpy().tobytes())
            out.append("" if block == group.null_block else total.hexdigest())
    return out


def spy(worker: Any) -> None:
    """From now on record the pages of every chunk stored (by hash) and loaded (in order)."""
    side = _side()
    context = side.context
    context.spied = {"stored": {}, "loaded": []}
    store, load = context.store, context.load

    def spying_store(items: Any) -> int:
        for item in items:
            for i, chunk in enumerate(item.hashes):
                context.spied["stored"][chunk.hex()] = _page_digests(context, item.blocks, i)
        return int(store(items))

    def spying_load(items: Any) -> Any:
        failed = load(items)
        for item in items:
            for i in range(len(item.slots[0]) // 2):
                context.spied["loaded"].append(_page_digests(context, item.blocks, i))
        return failed

    context.store, context.load = spying_store, spying_load


def spied(worker: Any) -> Any:
    """What ``spy`` recorded; it starts anew."""
    context = _side().context
    seen, context.spied = context.spied, {"stored": {}, "loaded": []}
    return seen


def stored_pages(worker: Any, hashes: list[str]) -> list[list[str]]:
    """Digests, as ``_page_digests`` orders them, of the server's bytes of these chunks."""
    from lmcache.v1.protocol import messages as m

    context = _side().context
    client, pool = context.client, context._bound.pool
    lease = client.new_lease()
    joined = b"".join(bytes.fromhex(h) for h in hashes)
    found, _ = client.call(m.Lookup(session=client.session, request="probe", lease=lease, hashes=joined))
    out = []
    for i in range(found.chunks):
        pages = []
        for group, slots in zip(context.groups, found.slots[0], strict=True):
            data = pool.data[slots[2 * i] : slots[2 * i] + group.namespace.object_bytes]
            per = group.namespace.blocks_per_chunk
            for block in range(per):
                total, base = hashlib.sha256(), 0
                for page in group.namespace.page_bytes:
                    total.update(data[base + block * page : base + (block + 1) * page])
                    base += per * page
                pages.append(total.hexdigest())
        out.append(pages)
    client.call(m.Release(session=client.session, leases=[lease]))
    client.call(m.EndRequest(session=client.session, requests=["probe"]))
    return out


def spoil_pool(worker: Any) -> None:
    """Overwrite all bytes of the server's pool with others of the same dtype's plausible size."""
    import torch

    pool = _side().context._bound.pool
    view = torch.frombuffer(pool.data, dtype=torch.float32)
    view.copy_(torch.randn(view.shape) * 3)


def kill_before_load(worker: Any, pid: int, number: int) -> None:
    """Before the next load, send ``number`` to ``pid`` and, if it is a deadly signal, wait for its death."""
    context = _side().context
    load = context.load

    def deadly(items: Any) -> Any:
        context.load = load
        os.kill(pid, number)
        while number == signal.SIGKILL and _alive(pid):
            time.sleep(0.01)
        return load(items)

    context.load = deadly


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def fail_loads(worker: Any) -> None:
    """Every load from now on reports failure and leaves noise in the pages, as a torn copy would."""
    import torch

    context = _side().context

    def failing(items: Any) -> Any:
        from lmcache.v1.protocol import messages as m

        for item in items:
            for group, ids in zip(context.groups, item.blocks, strict=True):
                for tensor in group.tensors:
                    ratio = tensor.shape[0] // group.num_blocks
                    for block in ids:
                        if block != group.null_block:
                            page = tensor[block * ratio : (block + 1) * ratio]
                            page.copy_(torch.randn(page.shape).to(page.dtype))
            context.client.post(m.Release(session=context.client.session, leases=[item.lease]))
        return list(items)

    context.load = failing


def mend_loads(worker: Any) -> None:
    """Undo ``fail_loads``."""
    del _side().context.load


def tear_layers(worker: Any) -> None:
    """Every load of a layer from now on leaves noise in its pages and fails, as a torn copy would."""
    import torch

    from lmcache.errors import LMCacheError
    from lmcache.v1.multiprocess.transfer_context import layered, pages

    def tearing(group: Any, direction: Any, chunks: Any, layers: slice) -> None:
        if direction == "store":
            pages.copy_pages(group, direction, chunks, layers)
            return
        for tensor in group.tensors[layers]:
            for _, block, count in [span for chunk in chunks for span in chunk.spans]:
                page = tensor[block : block + count]
                page.copy_(torch.randn(page.shape).to(page.dtype))
        raise LMCacheError("torn")

    layered.copy_pages = tearing


def mend_layers(worker: Any) -> None:
    """Undo ``tear_layers``."""
    from lmcache.v1.multiprocess.transfer_context import layered, pages

    layered.copy_pages = pages.copy_pages


def layers_with_graphs(worker: Any) -> dict[str, str]:
    """What a start layer by layer says to each mode of vLLM's graphs; "" to what is served."""
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache.errors import ConfigError

    connector, said = _connector(get_kv_transfer_group()), {}
    config = connector._config
    for mode in CUDAGraphMode:
        graphs = SimpleNamespace(cudagraph_mode=mode)
        connector._config = SimpleNamespace(parallel_config=config.parallel_config, compilation_config=graphs)
        try:
            connector._check_layerwise("LMCACHE_USE_LAYERWISE")
            said[mode.name] = ""
        except ConfigError as exc:
            said[mode.name] = str(exc)
    connector._config = config
    return said


def end_server(worker: Any) -> None:
    """The server inside the engine ends, as if it had failed; its clients do not know."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    _connector(get_kv_transfer_group())._server.close()


def shut_down(worker: Any) -> dict[str, Any]:
    """End the connector as vLLM does at its end; what is left of it in this process."""
    import gc
    import logging
    import threading

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    kinds = (signal.SIGTERM, signal.SIGINT)
    get_kv_transfer_group().shutdown()
    gc.collect()
    ours = [thread.name for thread in threading.enumerate() if "lmcache" in thread.name]
    return {
        # Idle helpers of large copies are the process's, whoever copies.
        "threads": [name for name in ours if not name.startswith("lmcache-copy")],
        "handlers": [str(getattr(signal.getsignal(kind), "__module__", "")) for kind in kinds],
        "logging": [type(handler).__module__ for handler in logging.getLogger().handlers],
        "mapped": [line for line in open("/proc/self/maps") if "lmcache-l1" in line],
    }


def transfer_path(worker: Any) -> str:
    return str(_side().context.path)


def counters(worker: Any) -> dict[str, int]:
    counters = _side().context.counters
    return {name: getattr(counters, name) for name in counters.__slots__}
