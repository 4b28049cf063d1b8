"""A real cache server, and a small paged engine with its KV on the device under test."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmcache.v1.keys import Namespace, Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    LoadItem,
    StoreItem,
    TransferContext,
    create_transfer_context,
)
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import expect

__all__ = ["BLOCK", "CHUNK", "Engine", "Server", "running_server"]

BLOCK = 16
CHUNK = 32
NULL_BLOCK = 0
_START_SECONDS = 60.0
_FORMATS = {1: "NL_X_NB_BS_NH_CS", 2: "NL_X_TWO_X_NB_BS_NH_HS"}


@dataclass
class Server:
    """A server of its own process."""

    address: str
    process: subprocess.Popen[str]


@contextmanager
def running_server(*flags: str) -> Iterator[Server]:
    """Start ``lmcache server`` on free ports, with the backend of this process's environment."""
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--port", "0", "--http-port", "0"]
    command += ["--l1-size-gb", "0.125", "--chunk-size", str(CHUNK), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        line = process.stdout.readline() if ready else ""
        assert line.startswith("lmcache server ready:"), f"the server did not start: {line!r}"
        yield Server(line.split()[3], process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


class Engine:
    """One worker with one KV group of ``layers`` layers, and its scheduler.

    Pages are ``[num_blocks, BLOCK, heads, width]`` bytes per layer, or, with two ``planes``, for K and for V of each:
    two tensors. They hold whatever a test puts there; the cache must give it back.
    """

    def __init__(
        self, server: Server, device: Any, mode: str, name: str, *, rank: int = 0, ranks: int = 1,
        layers: int = 3, num_blocks: int = 32, width: int = 64, control_timeout: float = 10.0, planes: int = 1,
    ) -> None:  # fmt: skip
        import torch

        self.device = device
        self.num_blocks = num_blocks
        shape = (num_blocks, BLOCK, 2, width)
        self.tensors = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layers * planes)]
        pages = self.pages(rank, ranks, planes)
        options = ClientOptions(control_timeout=control_timeout, heartbeat_interval=0.5, retry_interval=0.1)
        self.rank = rank
        self.context: TransferContext = create_transfer_context(
            mode, server.address, name, [pages], rank, ranks, options
        )
        self.scheduler = CacheClient(server.address, "scheduler", name, 0, ranks, options)
        self.context.start()
        self.scheduler.start()

    def pages(self, rank: int, ranks: int, planes: int) -> KVGroupPages:
        """What the cache is told of ``tensors``."""
        _, _, heads, width = self.tensors[0].shape
        page = BLOCK * heads * width
        return KVGroupPages(
            namespace=Namespace(
                model="verify", revision="1", engine="verify", format=_FORMATS[planes], dtype="uint8",
                block_size=BLOCK, chunk_size=CHUNK, kv_heads=heads, head_size=width,
                page_bytes=(page,) * len(self.tensors), tp_rank=rank, tp_size=ranks,
            ),
            num_blocks=self.num_blocks,
            addresses=[tensor.data_ptr() for tensor in self.tensors],
            strides=[page] * len(self.tensors),
            null_block=NULL_BLOCK,
            device=str(self.device),
            tensors=self.tensors,
        )  # fmt: skip

    def wait_up(self, seconds: float = 120.0) -> None:
        """Until both sessions are open."""
        deadline = time.monotonic() + seconds
        while not (self.context.client.up and self.scheduler.up):
            reasons = [self.context.client.reason, self.scheduler.reason]
            assert time.monotonic() < deadline, f"no session with the server: {reasons}"
            time.sleep(0.05)

    def close(self) -> None:
        """End both sessions."""
        self.context.close()
        self.scheduler.close()

    def fill(self, seed: int) -> list[Any]:
        """Random bytes into every page; a copy on the host."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        held = []
        for tensor in self.tensors:
            host = torch.randint(0, 256, tuple(tensor.shape), dtype=torch.uint8, generator=generator)
            tensor.copy_(host)
            held.append(host)
        return held

    def store(self, tokens: list[int], blocks: list[int]) -> int:
        """Store the chunks of ``tokens``, whose KV lies in ``blocks``; objects published."""
        hashes = chunk_hashes(tokens, Scope(chunk_size=CHUNK))
        return self.context.store([StoreItem(CHUNK, hashes, [blocks])])

    def find(
        self, request: str, tokens: list[int], wait_for: int = 0, seconds: float = 30.0
    ) -> tuple[int, m.Found]:
        """Look up a prompt: lease and answer. Waits for ``wait_for`` chunks, which may be on their way."""
        hashes = b"".join(chunk_hashes(tokens, Scope(chunk_size=CHUNK)))
        deadline = time.monotonic() + seconds
        while True:
            lease = self.scheduler.new_lease()
            asked = m.Lookup(session=self.scheduler.session, request=request, lease=lease, hashes=hashes)
            found = expect(m.Found, self.scheduler.call(asked)[0])
            if found.chunks >= wait_for or time.monotonic() > deadline:
                return lease, found
            self.scheduler.post(m.Release(session=self.scheduler.session, leases=[lease]))
            time.sleep(0.01)

    def load(
        self, request: str, tokens: list[int], blocks: list[int], skip: int = 0, wait_for: int = 0
    ) -> int:
        """Load what is stored of a prompt into ``blocks``; chunks loaded, or -1 if the load failed."""
        lease, found = self.find(request, tokens, wait_for)
        if not found.chunks:
            return 0
        mine = blocks[: found.chunks * CHUNK // BLOCK]
        item = LoadItem(request, lease, found.epoch, found.slots[self.rank], [mine], [skip])
        return -1 if self.context.load([item]) else found.chunks
