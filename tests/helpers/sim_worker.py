"""One rank of a small paged engine whose KV lies on the simulated accelerator, in a process of its own.

``python -m helpers.sim_worker`` has torch and the device loaded and forks a worker per line that it reads, so that
starting one takes milliseconds; the device is first used behind the fork. A worker connects to a socket and does
what it is told, JSON lines both ways. Nothing here waits for the device but ``holds`` and ``counts``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from helpers.pages import GARBAGE, kv, layout
from lmcache.v1.multiprocess.client import ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    LoadItem,
    StoreItem,
    create_transfer_context,
)

BLOCK = 16
NULL_BLOCK = 0
GROUPS = ((1024, 1024, 1024), (1536, 1536))
"""Bytes of a page, per group and layer."""


class SimWorker:
    """See the module."""

    def __init__(
        self, address: str, engine: str, rank: int, ranks: int, mode: str, num_blocks: int = 64
    ) -> None:
        import torch

        self.device = torch.device("sim", rank)
        torch.sim.set_device(self.device)
        self.rank = rank
        self.groups = []
        for group, pages in enumerate(GROUPS):
            namespace = layout(
                "sim", BLOCK, pages, group=group, groups=len(GROUPS), tp_rank=rank, tp_size=ranks
            )
            tensors = [
                torch.full((num_blocks, page), GARBAGE, dtype=torch.uint8, device=self.device)
                for page in pages
            ]
            addresses = [tensor.data_ptr() for tensor in tensors]
            self.groups.append(
                KVGroupPages(
                    namespace, num_blocks, addresses, list(pages), NULL_BLOCK, str(self.device), tensors
                )
            )
        options = ClientOptions(control_timeout=5.0, heartbeat_interval=0.2, retry_interval=0.05)
        self.context = create_transfer_context(mode, address, engine, self.groups, rank, ranks, options)
        self.context.start()

    def state(self) -> dict[str, Any]:
        welcome = self.context.client.welcome
        up = self.context.client.up
        return {"up": up, "epoch": welcome.epoch if up and welcome else "", "reason": self.context.client.reason,
                "mode": self.context.mode.value}  # fmt: skip

    def step(
        self, loads: list[list[Any]], computes: list[list[Any]], stores: list[list[Any]], spoils: list[int]
    ) -> dict[str, Any]:
        """What an engine's step is to a worker. All of it is queued; ``spoils`` are blocks that are somebody
        else's from here on, and are written at once."""
        items = [LoadItem(*item) for item in loads]
        failed = [item.request for item in self.context.load(items)] if items else []
        for blocks, first, tokens in computes:
            self.compute(blocks, first, tokens)
        stored = self.context.store(
            [StoreItem(size, [bytes.fromhex(h) for h in hashes], blocks) for size, hashes, blocks in stores]
        )
        for block in spoils:
            for group in self.groups:
                for tensor in group.tensors:
                    tensor[block].fill_(GARBAGE)
        return {"failed": failed, "stored": stored}

    def expected(self, group: int, layer: int, tokens: list[int]) -> bytes:
        return kv(GROUPS[group][layer], "sim", group, self.rank, layer, tokens)

    def compute(self, blocks: list[int], first: int, tokens: list[int]) -> None:
        """Queue the KV of ``tokens`` from block ``first`` of ``blocks`` on."""
        import torch

        for index in range(first, len(blocks)):
            prefix = tokens[: (index + 1) * BLOCK]
            for number, group in enumerate(self.groups):
                for layer, tensor in enumerate(group.tensors):
                    data = torch.frombuffer(
                        bytearray(self.expected(number, layer, prefix)), dtype=torch.uint8
                    )
                    tensor[blocks[index]].copy_(data, non_blocking=True)

    def holds(self, blocks: list[int], tokens: list[int]) -> list[str]:
        """What is not the KV of ``tokens``."""
        wrong = []
        for index, block in enumerate(blocks):
            prefix = tokens[: (index + 1) * BLOCK]
            for number, group in enumerate(self.groups):
                for layer, tensor in enumerate(group.tensors):
                    if bytes(tensor[block].cpu().tolist()) != self.expected(number, layer, prefix):
                        wrong.append(f"rank {self.rank} group {number} layer {layer} block {block} ({index})")
        return wrong

    def counts(self) -> dict[str, int]:
        """What may leak."""
        import torch

        torch.sim.synchronize(self.device)
        torch.sim.check_guards(self.device)
        info = torch.sim.memory_info(self.device)
        return {"allocations": info["allocations"], "imported": info["imported"],
                "descriptors": len(os.listdir("/proc/self/fd"))}  # fmt: skip

    def close(self) -> None:
        self.context.close()


def serve(path: str, settings: list[Any]) -> None:
    """The worker's process, until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        file = connection.makefile("rw")

        def reply(**answer: Any) -> None:
            file.write(json.dumps(answer) + "\n")
            file.flush()

        reply(result=os.getpid())
        worker = SimWorker(*settings)
        for line in file:
            asked = json.loads(line)
            try:
                result = getattr(worker, asked["call"])(*asked["arguments"])
            except Exception as exc:
                reply(error=f"{asked['call']}: {type(exc).__name__}: {exc}")
            else:
                reply(result=result)
        worker.close()


def main() -> None:
    """Fork workers as told; children are reaped by the system."""
    import lmcache_sim  # noqa: F401

    from lmcache.v1.platform import device_records

    assert device_records()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        path, settings = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(0)
        assert Path(path).exists()
        code = 1
        try:
            serve(path, settings)
            code = 0
        except BaseException:
            traceback.print_exc()  # os._exit tells nobody
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
