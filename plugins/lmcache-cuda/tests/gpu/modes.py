"""Store and load through a real server, in both transfer modes: are the bytes right, and how fast is it.

    python modes.py [--backend cuda] [--mib 512] [--layers 32] [--json FILE]

The ceiling is one copy by torch of as many bytes between the device and pinned memory, in the same run. There are no
goals: a store hashes, asks the server, and counts as done once a lookup finds it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rig import MIB, Row, report

from lmcache.testing.engine import BLOCK, CHUNK, Engine, running_server
from lmcache.v1.protocol import messages as m

HEADS = 2  # of lmcache.testing.engine
ROUNDS = 3


@dataclass
class Clock:
    """Times work on one device, to its end."""

    wait: Callable[[], object]

    def best(self, work: Callable[[], object]) -> float:
        """The best of some rounds, in seconds."""
        times = []
        for _ in range(ROUNDS):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return min(times)


def pinned(torch: Any, device: Any, clock: Clock, nbytes: int) -> dict[str, float]:
    """Bytes a second between pinned memory and the device. The CPU's memory is nobody's to pin."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return {
        "store": nbytes / clock.best(lambda: host.copy_(there, non_blocking=True)),
        "load": nbytes / clock.best(lambda: there.copy_(host, non_blocking=True)),
    }


@dataclass
class Prompts:
    """Prompts of `blocks` blocks that no round before has stored."""

    engine: Engine
    blocks: int
    mode: str
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    tokens: list[int] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks of one prompt."""
        return self.blocks * BLOCK // CHUNK

    def store(self) -> None:
        """Store a new one, and wait until the server has it."""
        base = next(self._numbers) << 20
        self.tokens = [base + i for i in range(self.blocks * BLOCK)]
        stored = self.engine.store(self.tokens, list(range(1, self.blocks + 1)))
        assert stored == self.chunks, f"{self.mode}: {stored} chunks stored: expected {self.chunks}"
        lease, found = self.engine.find(f"s{base}", self.tokens, self.chunks)
        assert found.chunks == self.chunks, f"{self.mode}: {found.chunks} found: expected {self.chunks}"
        scheduler = self.engine.scheduler
        scheduler.post(m.Release(session=scheduler.session, leases=[lease]))

    def load(self) -> None:
        """Load the last one into other blocks."""
        target = list(range(self.blocks + 1, 2 * self.blocks + 1))
        loaded = self.engine.load(f"l{time.monotonic_ns()}", self.tokens, target, wait_for=self.chunks)
        assert loaded == self.chunks, f"{self.mode}: {loaded} chunks loaded: expected {self.chunks}"


def one_mode(
    torch: Any, device: Any, clock: Clock, mode: str, given: argparse.Namespace, most: dict[str, float]
) -> list[Row]:
    """Rows of one mode, after its bytes were found to be right."""
    page = given.mib * MIB // given.layers // given.blocks
    nbytes = page * given.layers * given.blocks
    with running_server("--l1-size-gb", str(max(0.25, nbytes * (ROUNDS + 1) / 1e9))) as server:
        engine = Engine(
            server, device, mode, f"gpu-{mode}", layers=given.layers, num_blocks=2 * given.blocks + 1,
            width=page // BLOCK // HEADS, control_timeout=300.0,
        )  # fmt: skip
        try:
            engine.wait_up()
            assert engine.context.mode.value == mode, (
                f"{mode} was asked for, and {engine.context.mode.value} runs"
            )
            held, prompts = engine.fill(1), Prompts(engine, given.blocks, mode)
            seconds = {"store": clock.best(prompts.store), "load": clock.best(prompts.load)}
            for layer, was in zip(engine.tensors, held, strict=True):
                back = layer[given.blocks + 1 :].cpu()
                assert torch.equal(back, was[1 : given.blocks + 1]), (
                    f"{mode}: other bytes came back than were stored"
                )
            rows = []
            for what, took in seconds.items():
                rate, told = nbytes / took, f"{what}, {mode}, {prompts.chunks} chunks"
                rows.append(Row(told, rate / 1e9, "GB/s", f"a pinned {what}", rate / most[what]))
            return rows
        finally:
            engine.close()


def main(arguments: list[str]) -> int:
    """0; wrong bytes end it with an AssertionError that says where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda", help="the backend's name (cuda)")
    parser.add_argument("--mib", type=int, default=512, help="MiB of KV per prompt (512)")
    parser.add_argument("--layers", type=int, default=32, help="layers (32)")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 16 tokens per prompt (256)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows to this file")
    given = parser.parse_args(arguments)
    os.environ["LMCACHE_DEVICE_BACKEND"] = given.backend
    import torch

    import lmcache

    kind = lmcache.torch_device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    clock = Clock(lmcache.torch_dev.synchronize)
    most = pinned(torch, device, clock, given.mib * MIB)
    rows = [Row(f"ceiling: a pinned {what}", rate / 1e9, "GB/s") for what, rate in most.items()]
    for mode in ("engine_driven", "lmcache_driven"):
        rows += one_mode(torch, device, clock, mode, given, most)
    return report(rows, given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
