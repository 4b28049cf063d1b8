"""Store and load of whole blocks through the worker's transfer context, beside a plain memcpy.

A real server process, the real context, an engine's pages in private memory. All three copies move the same
number of bytes, take turns, and each store is of new keys. Every case also checks that the right bytes came
back.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from harness import MIB, Buffer, Report, copy_seconds, median, numbers, parser, table, timed

from helpers.server import running_server
from lmcache.v1.keys import Namespace, Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
    LoadItem,
    StoreItem,
)
from lmcache.v1.protocol import messages as m

CHUNK = 256
LAYERS = 8
TOKEN_BYTES = 2048  # per layer; with it a page of 32 KiB has 16 tokens, one of 256 KiB 128
CHUNK_BYTES = CHUNK * TOKEN_BYTES * LAYERS
GOAL = 0.8


@dataclass(frozen=True)
class Case:
    """What is moved, and how it lies in the engine."""

    path: str
    mib: int
    page: int
    order: str

    @property
    def chunks(self) -> int:
        return self.mib * MIB // CHUNK_BYTES

    @property
    def blocks(self) -> int:
        return self.mib * MIB // (LAYERS * self.page)

    def block_ids(self, seed: int) -> list[int]:
        ids = list(range(self.blocks))
        if self.order == "random":
            random.Random(seed).shuffle(ids)
        return ids


class Bench:
    """One engine on a server: its pages, its worker and its scheduler."""

    def __init__(self, address: str, case: Case, memory: Buffer) -> None:
        self.case, self._memory = case, memory
        layer_bytes = case.blocks * case.page
        namespace = Namespace(
            model="bench", revision=f"{case}", engine="bench", format="opaque", dtype="bfloat16",
            block_size=case.page // TOKEN_BYTES, chunk_size=CHUNK, kv_heads=4, head_size=128,
            page_bytes=(case.page,) * LAYERS,
        )  # fmt: skip
        pages = KVGroupPages(
            namespace=namespace,
            num_blocks=case.blocks,
            addresses=[memory.address + layer * layer_bytes for layer in range(LAYERS)],
            strides=[case.page] * LAYERS,
        )
        shm = "require" if case.path == "shared_memory" else "off"
        self._context = EngineDrivenTransferContext(
            address, f"{case}", [pages], options=ClientOptions(shm=shm)
        )
        self._scheduler = CacheClient(address, "scheduler", f"{case}")
        self._turn = 0

    def open(self) -> None:
        if not self._context.start(10) or not self._scheduler.start(10):
            raise SystemExit(f"no session: {self._context.client.reason or self._scheduler.reason}")
        for thread in threading.enumerate():
            if thread.name == "lmcache-prefault":
                thread.join()
        if self._context.path != self.case.path:
            raise SystemExit(f"transfer path {self._context.path}: expected {self.case.path}")

    def close(self) -> None:
        self._context.close()
        self._scheduler.close()

    def round(self, check: bool = False) -> tuple[float, float]:
        """Seconds of a store under new keys, and of a load of the same chunks into other blocks."""
        self._turn += 1
        case = self.case
        hashes = chunk_hashes(range(case.chunks * CHUNK), Scope(chunk_size=CHUNK, salt=str(self._turn)))
        source, target = case.block_ids(2 * self._turn), case.block_ids(2 * self._turn + 1)
        if check:
            self._stamp({block: i for i, block in enumerate(source)})
        done: list[Any] = []
        store = timed(lambda: done.append(self._context.store([StoreItem(CHUNK, hashes, [source])])))
        if done != [case.chunks]:
            raise SystemExit(f"{case}: stored {done} of {case.chunks} chunks; is --l1-gb too small?")
        if check:
            self._stamp(dict.fromkeys(source, -1))
        item = self._lookup(hashes, target)
        failed: list[Any] = []
        load = timed(lambda: failed.extend(self._context.load([item])))
        if failed or (check and not self._stamped(target)):
            raise SystemExit(f"{case}: the load failed, or brought back other bytes than were stored")
        self._scheduler.post(m.EndRequest(session=self._scheduler.session, requests=[item.request]))
        return store, load

    def _lookup(self, hashes: list[bytes], blocks: list[int]) -> LoadItem:
        name, lease = f"turn-{self._turn}", self._scheduler.new_lease()
        found, _ = self._scheduler.call(
            m.Lookup(session=self._scheduler.session, request=name, lease=lease, hashes=b"".join(hashes))
        )
        if not isinstance(found, m.Found) or found.chunks != len(hashes):
            raise SystemExit(f"{self.case}: the lookup answers {found}")
        return LoadItem(name, lease, found.epoch, found.slots[0], [blocks], [0])

    def _stamp(self, values: dict[int, int]) -> None:
        """Write a value to both ends of all pages of a block."""
        for block, value in values.items():
            for end in self._ends(block):
                end.value = value

    def _stamped(self, blocks: list[int]) -> bool:
        """Whether each block's pages carry its place among ``blocks``."""
        return all(end.value == i for i, block in enumerate(blocks) for end in self._ends(block))

    def _ends(self, block: int) -> Iterator[ctypes.c_int64]:
        case = self.case
        for layer in range(LAYERS):
            at = self._memory.address + (layer * case.blocks + block) * case.page
            yield ctypes.c_int64.from_address(at)
            yield ctypes.c_int64.from_address(at + case.page - 8)


@contextmanager
def opened(address: str, case: Case, memory: Buffer) -> Iterator[Bench]:
    bench = Bench(address, case, memory)
    try:
        bench.open()
        yield bench
    finally:
        bench.close()


def measure(bench: Bench, repeats: int, dst: Buffer, src: Buffer) -> dict[str, Any]:
    """Medians of one case in GB/s, and their ratios to memcpy."""
    size = bench.case.mib * MIB
    bench.round(check=True)
    seconds: dict[str, list[float]] = {"memcpy": [], "store": [], "load": []}
    for _ in range(repeats):
        seconds["memcpy"].append(copy_seconds(dst, src, size))
        store, load = bench.round()
        seconds["store"].append(store)
        seconds["load"].append(load)
    rate = {name: size / median(values) / 1e9 for name, values in seconds.items()}
    return {
        **asdict(bench.case),
        "gb_per_s": rate,
        "store_ratio": rate["store"] / rate["memcpy"],
        "load_ratio": rate["load"] / rate["memcpy"],
        "seconds": seconds,
    }


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    rate = row["gb_per_s"]
    what = (row["path"], f"{row['mib']} MiB", f"{row['page'] >> 10} KiB", row["order"])
    figures = (rate["memcpy"], rate["store"], row["store_ratio"], rate["load"], row["load_ratio"])
    return (*what, *(f"{figure:.2f}" for figure in figures))


def cases(args: Any) -> list[Case]:
    out = [
        Case("shared_memory", mib, page * 1024, order)
        for mib in args.sizes
        for page in args.pages
        for order in ("consecutive", "random")
    ]
    if not args.no_frames:
        out += [Case("frames", mib, max(args.pages) * 1024, "consecutive") for mib in args.sizes]
    return out


def main() -> int:
    made = parser(__doc__, repeats=7)
    made.add_argument(
        "--sizes", type=numbers, default=[32, 64, 128, 256], help="MiB per transfer (32,64,128,256)"
    )
    made.add_argument("--pages", type=numbers, default=[32, 128, 256], help="KiB per page (32,128,256)")
    made.add_argument("--l1-gb", type=float, help="pool of the server (as large as needed)")
    made.add_argument(
        "--no-frames", action="store_true", help="leave out the in-frame path, which has no goal"
    )
    args = made.parse_args()
    report = Report(args)
    largest = max(args.sizes) * MIB
    # Nothing may be evicted meanwhile: eviction costs time, and a load needs what was stored.
    l1_gb = args.l1_gb or (args.repeats + 1) * largest / (1 << 30) / 0.9
    src, dst, memory = Buffer(largest), Buffer(largest), Buffer(largest)
    rows: list[dict[str, Any]] = []
    with running_server(l1_gb=round(l1_gb, 3)) as server:
        tool = CacheClient(server.address, "tool")
        tool.start(10)
        for case in cases(args):
            with opened(server.address, case, memory) as bench:
                row = measure(bench, args.repeats if case.path == "shared_memory" else 3, dst, src)
            tool.call(m.Clear())
            rows.append(row)
        tool.close()
    head = ("path", "size", "page", "block ids", "memcpy GB/s", "store GB/s", "ratio", "load GB/s", "ratio")
    table(head, map(line, rows))
    report.data["cases"] = rows
    for what in ("store", "load"):
        ratios = [row[f"{what}_ratio"] for row in rows if row["path"] == "shared_memory"]
        enough = sum(ratio >= GOAL for ratio in ratios)
        report.goal(
            f"{what} / memcpy, worst of {len(ratios)} cases ({enough} reach it)", min(ratios), ">=", GOAL
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
