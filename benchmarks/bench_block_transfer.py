"""Whole blocks between an engine's tensors and chunk objects in host memory, beside one thread's memcpy.

For every format that vLLM and SGLang have: gather (pages to chunks) and scatter, block ids consecutive and at
random. Each case moves the same bytes as the memcpy of its round. With `--original`, the torch baseline of
LMCache 0.5.6 does the same in a process of its own, in turns, on tensors of the same content; both sides
must gather the same bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

MIB = 1 << 20
FORMATS = (0, 1, 2, 3, 6, 7, 9, 12, 13, 14, 15, 16, 17, 18)
LAYERS, BLOCK, HEAD, CHUNK = 8, 16, 128, 256
GOALS = {"consecutive": 0.8, "random": 0.5}
KINDS = ("memcpy", "gather", "scatter")

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


class Sizes:
    """Of one format: a page (one layer of one block, K and V) has ``page`` bytes."""

    def __init__(self, fmt: int, mib: int, page: int, dtype: torch.dtype) -> None:
        elements = page // BLOCK // dtype.itemsize  # of a slot
        self.kv = 2 if fmt in (0, 1, 2, 6, 7, 9, 15, 16) else 1
        self.nb = mib * MIB // (LAYERS * page)
        self.hs = elements if fmt in (3, 14, 17) else 2 * HEAD if fmt in (12, 13) else HEAD
        self.nh = elements // self.kv // self.hs
        self.dtype = dtype

    def shape(self, fmt: int) -> tuple[int, ...]:
        nb, nh, hs = self.nb, self.nh, self.hs
        return {
            0: (nb, LAYERS, 2, BLOCK, nh, hs),
            1: (2, nb, BLOCK, nh, hs),
            2: (nb, 2, BLOCK, nh, hs),
            6: (2, nb, nh, BLOCK, hs),
            7: (nb, 2, nh, BLOCK, hs),
            12: (nb, nh, BLOCK, hs),
            3: (nb, BLOCK, hs),
            14: (nb, BLOCK, hs),
            15: (2, nb, nh, 1, BLOCK, hs),
        }.get(fmt, (nb, BLOCK, nh, hs))


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=made).view(dtype).view(shape)


def pages(fmt: int, sizes: Sizes) -> Any:
    """Tensors of noise, nested as the format says."""
    shape = sizes.shape(fmt)
    if fmt == 0:
        return noise(shape, sizes.dtype, 0)
    if fmt == 17:  # two planes, an eighth of a slot and the rest
        widths = (sizes.hs // 8, sizes.hs - sizes.hs // 8)
        shapes = [(sizes.nb, BLOCK, 1, width) for width in widths]
        return [
            [noise(shape, sizes.dtype, 2 * at + i) for i, shape in enumerate(shapes)] for at in range(LAYERS)
        ]
    count = LAYERS * (2 if fmt in (9, 16) else 1)
    tensors = [noise(shape, sizes.dtype, seed) for seed in range(count)]
    if fmt == 9:
        return [tensors[:LAYERS], tensors[LAYERS:]]
    return list(zip(tensors[::2], tensors[1::2], strict=True)) if fmt == 16 else tensors


class Side:
    """One implementation on tensors of its own."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer

    def prepare(self, fmt: int, mib: int, page: int, order: str, dtype: str) -> None:
        kind = getattr(torch, dtype)
        self._fmt, self._sizes = fmt, Sizes(fmt, mib, page, kind)
        sizes = self._sizes
        self._paged = pages(fmt, sizes)
        chunks = sizes.nb * BLOCK // CHUNK
        hidden = sizes.nh * sizes.hs
        self._objects = [torch.zeros((sizes.kv, LAYERS, CHUNK, hidden), dtype=kind) for _ in range(chunks)]
        ids = list(range(sizes.nb))
        if order == "random":
            random.Random(7).shuffle(ids)
        self._ids = torch.tensor(ids)
        self._source = torch.zeros(mib * MIB, dtype=torch.uint8) + 1
        self._target = torch.zeros(mib * MIB, dtype=torch.uint8) + 2

    def memcpy(self) -> None:
        _memcpy(self._target.data_ptr(), self._source.data_ptr(), self._source.numel())

    def gather(self) -> None:
        self._run(1)

    def scatter(self) -> None:
        self._run(0)

    def digest(self) -> str:
        """Of what was gathered."""
        state = hashlib.sha256()
        for obj in self._objects[:: max(1, len(self._objects) // 8)]:
            state.update(obj.view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def _run(self, direction: int) -> None:
        self._transfer(self._paged, self._objects, self._ids, direction, self._sizes, CHUNK, self._fmt)


def our_transfer() -> Any:
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc
    from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer

    def call(paged: Any, objects: Any, ids: Any, direction: int, s: Sizes, chunk: int, fmt: int) -> None:
        desc = PageBufferShapeDesc(s.kv, LAYERS, s.nb, BLOCK, s.nh, s.hs, s.dtype.itemsize)
        multi_layer_block_kv_transfer(paged, objects, ids, "cpu", direction, desc, chunk, fmt, 0)

    return call


def its_transfer() -> Any:
    from lmcache import lmcache_native as native
    from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer

    def call(paged: Any, objects: Any, ids: Any, direction: int, s: Sizes, chunk: int, fmt: int) -> None:
        desc = native.PageBufferShapeDesc()
        desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh, desc.hs = s.kv, LAYERS, s.nb, BLOCK, s.nh, s.hs
        desc.element_size, desc.dtype = s.dtype.itemsize, s.dtype
        way = native.TransferDirection.D2H if direction else native.TransferDirection.H2D
        if s.kv == 1:
            objects = [obj[0] for obj in objects]
        multi_layer_block_kv_transfer(
            paged, objects, ids, "cpu", way, desc, chunk, native.EngineKVFormat(fmt), 0
        )

    return call


# ----------------------------------------------------------------------------------------- the other process


def serve(make: Callable[[], Any]) -> int:
    """Answer lines of JSON on stdin: ``["prepare", ...]``, ``["gather"]`` and so on, by what ``make`` makes."""
    from time import perf_counter

    channel = sys.stdout
    sys.stdout = sys.stderr  # what the import prints is not an answer
    side = make()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        began = perf_counter()
        try:
            result = getattr(side, name)(*arguments)
        except Exception as exc:
            result = f"{type(exc).__name__}: {exc}"
        channel.write(json.dumps([perf_counter() - began, result]) + "\n")
        channel.flush()
    return 0


class Remote:
    """The original behind a pipe; the calls of :class:`Side`."""

    def __init__(self, python: str, script: str = __file__) -> None:
        self._process = subprocess.Popen(
            [python, script, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={"LMCACHE_TRACK_USAGE": "false"},
        )  # fmt: skip

    def call(self, name: str, *arguments: Any) -> tuple[float, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the original's process ended; does its environment import lmcache 0.5.6?")
        seconds, result = json.loads(line)
        return seconds, result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


# --------------------------------------------------------------------------------------------------- a case


def measure(ours: Side, original: Remote | None, repeats: int, case: tuple[Any, ...]) -> dict[str, Any]:
    """Least seconds of each kind of call, in turns."""
    from harness import timed

    fmt, mib, page, order, dtype = case
    ours.prepare(*case)
    sides: dict[str, Any] = {kind: [] for kind in KINDS}
    faults: dict[str, str] = {}
    if original is not None:
        original.call("prepare", *case)
        sides |= {f"original {kind}": [] for kind in KINDS[1:]}
    for _ in range(repeats + 1):
        for kind in KINDS:
            sides[kind].append(timed(getattr(ours, kind)))
            if original is not None and kind != "memcpy":
                seconds, fault = original.call(kind)
                sides[f"original {kind}"].append(seconds)
                if fault:
                    faults[kind] = fault
        if original is not None and not faults and original.call("digest")[1] != ours.digest():
            raise SystemExit(f"{case}: the two sides gather different bytes")
    best = {name: min(seconds[1:]) for name, seconds in sides.items()}
    row = {
        "format": fmt, "mib": mib, "page": page, "order": order, "dtype": dtype, "seconds": sides,
        "memcpy_gb_per_s": mib * MIB / best["memcpy"] / 1e9,
        "ratio": {kind: best["memcpy"] / best[kind] for kind in KINDS[1:]},
        "original_fault": faults,
    }  # fmt: skip
    if original is not None:
        row["speedup"] = {
            kind: best[f"original {kind}"] / best[kind] for kind in KINDS[1:] if kind not in faults
        }
    return row


def fixed_cost(layers: int) -> dict[str, float]:
    """Microseconds per layer of a call that moves one tiny block, by tensors."""
    from harness import timed

    from lmcache.v1.platform.ops_types import PageBufferShapeDesc
    from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer

    found = {}
    for fmt, shape, kv in ((2, (4, 2, 4, 1, 8), 2), (12, (4, 2, 4, 8), 1), (13, (4, 4, 2, 8), 1)):
        paged = [torch.zeros(shape) for _ in range(layers)]
        nh = 1 if kv == 2 else 2
        objects = [torch.zeros(kv, layers, 4, nh * 8)]
        desc = PageBufferShapeDesc(kv, layers, 4, 4, nh, 8, 4)
        call = (paged, objects, [1], "cpu", 1, desc, 4, fmt, 0)
        best = min(timed(lambda: multi_layer_block_kv_transfer(*call)) for _ in range(200))  # noqa: B023
        found[str(fmt)] = best / layers * 1e6
    return found


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        return serve(lambda: Side(its_transfer()))
    from harness import Report, numbers, parser, table

    made = parser(__doc__, repeats=7)
    made.add_argument("--sizes", type=numbers, default=[32, 128], help="MiB per transfer (32,128)")
    made.add_argument("--pages", type=numbers, default=[32], help="KiB per page (32)")
    made.add_argument("--formats", type=numbers, default=list(FORMATS), help="ids of formats (all)")
    made.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16"], help="(bfloat16)")
    made.add_argument("--original", metavar="PYTHON", help="interpreter of an environment with lmcache 0.5.6")
    args = made.parse_args()
    report = Report(args)
    ours, original = Side(our_transfer()), Remote(args.original) if args.original else None
    rows = []
    head = ["format", "size", "page", "dtype", "block ids", "memcpy GB/s", "gather", "scatter"]
    head += ["x original", "x original"] if original else []
    for mib in args.sizes:
        for page in args.pages:
            for dtype in args.dtypes:
                for fmt in args.formats:
                    for order in GOALS:
                        case = (fmt, mib, page * 1024, order, dtype)
                        rows.append(measure(ours, original, args.repeats, case))
                        print("measured", *line(rows[-1]), file=sys.stderr, flush=True)
    table(head, map(line, rows))
    if original is not None:
        original.close()
    report.data = {
        "cases": rows,
        "fixed_us_per_layer": fixed_cost(32),
        "torch_threads": torch.get_num_threads(),
    }
    print("\nmicroseconds per layer beside the bytes:", report.data["fixed_us_per_layer"])
    for order, bound in GOALS.items():
        for kind in KINDS[1:]:
            ratios = [row["ratio"][kind] for row in rows if row["order"] == order]
            enough = sum(ratio >= bound for ratio in ratios)
            name = f"{kind}, {order}: / memcpy, worst of {len(ratios)} ({enough} reach it)"
            report.goal(name, min(ratios), ">=", bound)
    if original is not None:
        gains = [gain for row in rows for gain in row["speedup"].values()]
        report.goal(f"times as fast as 0.5.6, worst of {len(gains)}", min(gains, default=0.0), ">=", 1)
    return report.finish()


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    what = (str(row["format"]), f"{row['mib']} MiB", f"{row['page'] >> 10} KiB", row["dtype"], row["order"])
    ratios = (f"{row['ratio'][kind]:.2f}" for kind in KINDS[1:])
    gains = row.get("speedup")
    beside = () if gains is None else (f"{gains[k]:.2f}" if k in gains else "fails" for k in KINDS[1:])
    return (*what, f"{row['memcpy_gb_per_s']:.1f}", *ratios, *beside)


if __name__ == "__main__":
    sys.exit(main())
