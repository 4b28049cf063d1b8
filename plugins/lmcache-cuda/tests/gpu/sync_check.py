"""No call of a transfer may wait for the whole device: looked for with torch's profiler.

    python sync_check.py [--backend cuda]

Under the profiler run the block transfers both ways, an async copy, a completion, and a store and a load through a
server in each mode. A wait on purpose beside them proves that the profiler sees such waits at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WAITS = {
    "cudaDeviceSynchronize",
    "hipDeviceSynchronize",
    "cuCtxSynchronize",
    "Context Sync",
    "Context Synchronize",
}
CONTROL, PREFIX = "control: a wait on purpose", "watched: "


def waits(events: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Per marked stretch of a trace the device-wide waits that began in it."""
    events = [event for event in events if "ts" in event and event.get("ph") == "X"]
    marks = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith((PREFIX, CONTROL))
    ]
    found: dict[str, list[str]] = {str(mark["name"]): [] for mark in marks}
    for event in events:
        if event["name"] in WAITS:
            for mark in marks:
                if mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"]:
                    found[str(mark["name"])].append(str(event["name"]))
    return found


def verdict(found: Mapping[str, list[str]]) -> list[str]:
    """What is wrong."""
    faults = [f"{name}: {sorted(set(seen))}" for name, seen in found.items() if seen and name != CONTROL]
    if not found.get(CONTROL):
        faults.append("the profiler did not see the wait that was there on purpose, so it shows nothing")
    if not any(name.startswith(PREFIX) for name in found):
        faults.append("nothing was watched")
    return faults


def watch(torch: Any, path: Path) -> None:
    """Run what is to be watched, and write the trace."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    from lmcache.testing.engine import Engine, running_server

    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        engines = {}
        for mode in ("engine_driven", "lmcache_driven"):
            server = stack.enter_context(running_server())
            engines[mode] = Engine(server, device, mode, f"sync-{mode}")
            stack.callback(engines[mode].close)
            engines[mode].wait_up()
            engines[mode].fill(1)
        works = {f"{PREFIX}ops": lambda: _ops(torch, device)}
        for mode, engine in engines.items():
            works[f"{PREFIX}{mode}"] = lambda engine=engine: _through(engine)
        for work in works.values():  # whatever is made once is made now
            work()
        torch.cuda.synchronize()
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
        ) as profiler:
            for name, work in works.items():
                with record_function(name):
                    work()
            with record_function(CONTROL):
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))


def _ops(torch: Any, device: Any) -> None:
    """The ops that a server's transfers are made of, by tensors."""
    import lmcache

    ops = lmcache.device_ops
    paged = [torch.ones(8, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(4)]
    objects = [torch.zeros(1, 4, 32, 128, dtype=torch.bfloat16, device=device)]
    desc = ops.PageBufferShapeDesc(1, 4, 8, 16, 2, 64, 2, 0)
    ids = torch.tensor([3, 5])
    for way in (1, 0):
        ops.multi_layer_block_kv_transfer(paged, objects, ids, device, way, desc, 32, 13, 0)
    host = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    ops.lmcache_memcpy_async(host, there, 1 << 20, 1, 0, 1 << 26)
    ops.record_completion_on_stream(torch.cuda.current_stream(device).cuda_stream, "sync-check", b"")
    torch.cuda.current_stream(device).synchronize()
    ops.drain_recorded_completions()


def _through(engine: Any) -> None:
    tokens = list(range(os.getpid() << 8, (os.getpid() << 8) + 64))
    assert engine.store(tokens, [1, 2, 3, 4]) >= 0
    assert engine.load("sync", tokens, [5, 6, 7, 8], wait_for=2) == 2


def main(arguments: list[str]) -> int:
    """Exit code 1 if something waited for the whole device, or if that could not be seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda", help="the backend's name (cuda)")
    parser.add_argument("--trace", default="", metavar="FILE", help="judge this trace instead of making one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(given.trace or Path(scratch, "trace.json"))
        if not given.trace:
            os.environ["LMCACHE_DEVICE_BACKEND"] = given.backend
            import torch

            watch(torch, path)
        found = waits(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    faults = verdict(found)
    for line in faults or [f"no wait for the whole device in {len(found) - 1} stretches of work"]:
        print(line)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
