"""A chunk between an engine's pages and a memory object by the in-process connector V2, beside one memcpy.

Pages, object and the memcpy's buffers are in host memory. `from_gpu` and `to_gpu` are whole calls, with slot mapping
and all. With `--original`, LMCache 0.5.6 does the same in a process of its own, in turns. Its connector class refuses
anything but CUDA tensors, so its torch operation is called the way that class calls it: object, table of pointers,
slots, sizes. A ratio to memcpy is that of a call to the memcpy just before it, the median of all rounds: of the time
that passes, and ("work", with the spread without the tenths at either end) of the processor time of the whole process,
which other work on the machine leaves alone but for its use of the caches. The memcpy has one thread; from 8 MB on
small pieces are moved by up to four. Ratios to 0.5.6 are of elapsed time. Both sides must gather the same bytes.
The original refuses layouts with heads outside slots, and for packed K and V it has no check and moves something else:
these are left out on its side.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_block_transfer import Remote, noise, serve

LAYERS, BLOCK, HEADS, HEAD = 32, 16, 8, 128
CHUNK = 256
KINDS = ("from_gpu", "to_gpu")
GOAL = 0.7
ITS_FORMATS = (1, 2, 3)
ORDERS = ("consecutive", "blocks", "slots")
SHAPES = {
    1: lambda nb: (2, nb, BLOCK, HEADS, HEAD),
    2: lambda nb: (nb, 2, BLOCK, HEADS, HEAD),
    3: lambda nb: (nb, BLOCK, 576),
    6: lambda nb: (2, nb, HEADS, BLOCK, HEAD),
    7: lambda nb: (nb, 2, HEADS, BLOCK, HEAD),
    12: lambda nb: (nb, HEADS, BLOCK, 2 * HEAD),
    13: lambda nb: (nb, BLOCK, HEADS, 2 * HEAD),
}

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def slots_of(order: str, blocks: int) -> torch.Tensor:
    """Slots of CHUNK tokens: in a row, in whole blocks at random, or each at random."""
    rng = random.Random(7)
    ids = list(range(blocks))
    if order == "blocks":
        rng.shuffle(ids)
    slots = [block * BLOCK + at for block in ids for at in range(BLOCK)]
    if order == "slots":
        rng.shuffle(slots)
    return torch.tensor(slots[:CHUNK])


class Side:
    """One implementation on tensors of its own."""

    def prepare(self, fmt: int, order: str) -> None:
        blocks = 4 * CHUNK // BLOCK
        shape = SHAPES[fmt](blocks)
        self._pages = [noise(shape, torch.bfloat16, layer) for layer in range(LAYERS)]
        self._slots = slots_of(order, blocks)
        self._planes, self._hidden = (1, shape[-1]) if fmt == 3 else (2, HEADS * HEAD)
        self.nbytes = self._planes * LAYERS * CHUNK * self._hidden * 2
        self._source = torch.zeros(self.nbytes, dtype=torch.uint8) + 1
        self._target = torch.zeros(self.nbytes, dtype=torch.uint8) + 2
        self.begin(fmt, blocks)

    def memcpy(self) -> None:
        _memcpy(self._target.data_ptr(), self._source.data_ptr(), self.nbytes)

    def begin(self, fmt: int, blocks: int) -> None:
        raise NotImplementedError

    @property
    def tensor(self) -> torch.Tensor:
        raise NotImplementedError

    def digest(self) -> str:
        return hashlib.sha256(self.tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


class Ours(Side):
    """The connector."""

    def begin(self, fmt: int, blocks: int) -> None:
        from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemGPUConnectorV2
        from lmcache.v1.memory_management import HostMemoryAllocator, MemoryFormat

        self._connector = VLLMPagedMemGPUConnectorV2(
            self._hidden, LAYERS, use_mla=fmt == 3, layout_hints={"engine_kv_format": fmt}
        )
        kind = MemoryFormat.KV_MLA_FMT if fmt == 3 else MemoryFormat.KV_2LTD
        self._allocator = HostMemoryAllocator(self.nbytes + (1 << 16))
        obj = self._allocator.allocate(tuple(self._connector.get_shape(CHUNK)), torch.bfloat16, kind)
        assert obj is not None
        obj.raw_tensor.zero_()
        self._object = obj

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self._object.tensor
        return found

    def from_gpu(self) -> None:
        self._connector.from_gpu(self._object, 0, CHUNK, kvcaches=self._pages, slot_mapping=self._slots)

    def to_gpu(self) -> None:
        self._connector.to_gpu(self._object, 0, CHUNK, kvcaches=self._pages, slot_mapping=self._slots)

    def end(self) -> None:
        self._object.ref_count_down()


class Its(Side):
    """The operation of 0.5.6, called as its V2 calls it."""

    def begin(self, fmt: int, blocks: int) -> None:
        from lmcache import lmcache_native as native

        self._format, self._ways = native.EngineKVFormat(fmt), native.TransferDirection
        self._pointers = torch.tensor([tensor.data_ptr() for tensor in self._pages], dtype=torch.int64)
        self._object = torch.zeros(self._planes, LAYERS, CHUNK, self._hidden, dtype=torch.bfloat16)
        self._sizes = (blocks * BLOCK, HEAD if fmt != 3 else self._hidden)

    @property
    def tensor(self) -> torch.Tensor:
        return self._object

    def _run(self, way: Any, **more: int) -> None:
        from lmcache.v1.platform.torch_ops import multi_layer_kv_transfer

        slots, head = self._sizes
        multi_layer_kv_transfer(
            self._object, self._pointers, self._slots[0:CHUNK], torch.device("cpu"), slots, way, self._format,
            block_size=BLOCK, head_size=head, block_stride_elems=0, **more,
        )  # fmt: skip

    def from_gpu(self) -> None:
        self._run(self._ways.D2H)

    def to_gpu(self) -> None:
        self._run(self._ways.H2D, skip_prefix_n_tokens=0)


def measure(original: Remote | None, fmt: int, order: str, repeats: int) -> dict[str, Any]:
    """Seconds of each kind of call, in turns, and the ratios of the quickest."""
    from harness import timed

    def used(call: Any) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    ours = Ours()
    ours.prepare(fmt, order)
    theirs = original if fmt in ITS_FORMATS else None
    if theirs is not None:
        theirs.call("prepare", fmt, order)
    sides: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for kind in ("memcpy", *KINDS):
            processor.setdefault(kind, []).append(used(getattr(ours, kind)))
            sides.setdefault(kind, []).append(timed(getattr(ours, kind)))
            if theirs is not None and kind != "memcpy":
                seconds, fault = theirs.call(kind)
                if fault:
                    raise SystemExit(f"the original, format {fmt}, {kind}: {fault}")
                sides.setdefault(f"original {kind}", []).append(seconds)
    if theirs is not None and theirs.call("digest")[1] != ours.digest():
        raise SystemExit(f"format {fmt}, {order}: the two sides gather different bytes")
    ours.end()
    best = {name: min(seconds[1:]) for name, seconds in sides.items()}
    paired = {kind: ratios(processor, kind) for kind in KINDS}
    return {
        "format": fmt, "slots": order, "nbytes": ours.nbytes, "seconds": sides, "processor_seconds": processor,
        "memcpy_gb_per_s": ours.nbytes / best["memcpy"] / 1e9,
        "ratio": {kind: statistics.median(paired[kind]) for kind in KINDS},
        "spread": {kind: spread(paired[kind]) for kind in KINDS},
        "elapsed_ratio": {kind: statistics.median(ratios(sides, kind)) for kind in KINDS},
        "speedup": {kind: best[f"original {kind}"] / best[kind] for kind in KINDS if theirs is not None},
    }  # fmt: skip


def ratios(seconds: dict[str, list[float]], kind: str) -> list[float]:
    """Round by round, the first left out."""
    return [a / b for a, b in zip(seconds["memcpy"][1:], seconds[kind][1:], strict=True)]


def spread(values: list[float]) -> list[float]:
    cut = len(values) // 10
    inner = sorted(values)[cut : len(values) - cut]
    return [inner[0], inner[-1]]


def line(row: dict[str, Any]) -> list[str]:
    speedups = [f"{value:.2f}" for value in row["speedup"].values()] or ["-", "-"]
    found = [
        f"{row['ratio'][kind]:.2f} ({row['spread'][kind][0]:.2f}-{row['spread'][kind][1]:.2f})"
        for kind in KINDS
    ]
    elapsed = [f"{row['elapsed_ratio'][kind]:.2f}" for kind in KINDS]
    return [str(row["format"]), row["slots"], f"{row['memcpy_gb_per_s']:.1f}", *elapsed, *found, *speedups]


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        return serve(Its)
    from harness import Report, numbers, parser, table

    made = parser(__doc__, repeats=25)
    made.add_argument("--formats", type=numbers, default=list(SHAPES), help="ids of formats (all)")
    made.add_argument("--original", metavar="PYTHON", help="interpreter of an environment with lmcache 0.5.6")
    args = made.parse_args()
    report = Report(args)
    original = Remote(args.original, __file__) if args.original else None
    rows = [measure(original, fmt, order, args.repeats) for fmt in args.formats for order in ORDERS]
    if original is not None:
        original.close()
    work = [f"{kind} work" for kind in KINDS]
    table(["format", "slots", "memcpy GB/s", *KINDS, *work, "x original", "x original"], map(line, rows))
    report.data = {"cases": rows, "torch_threads": torch.get_num_threads(), "chunk": CHUNK, "layers": LAYERS}
    for of, what in (("elapsed_ratio", "time"), ("ratio", "processor time")):
        for order in ("consecutive", "blocks"):
            for kind in KINDS:
                found = [row[of][kind] for row in rows if row["slots"] == order]
                enough = sum(ratio >= GOAL for ratio in found)
                name = f"{kind}, {order}: / memcpy by {what}, worst of {len(found)} ({enough} reach it)"
                report.goal(name, min(found), ">=", GOAL)
    speedups = [value for row in rows for value in row["speedup"].values()]
    if speedups:
        report.goal(f"beside 0.5.6, worst of {len(speedups)}", min(speedups), ">=", 1.0, "x")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
