"""What the benchmarks share: goals, the report, warmed memory, a plain memcpy."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmcache

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))  # the real server and the real engine are started as the tests start them

MIB = 1 << 20

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memcpy.restype = None


class Goal(NamedTuple):
    """A figure and the bound that it should keep."""

    name: str
    value: float
    sign: str
    bound: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.sign == ">=" else self.value <= self.bound

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.name}: {self.value:.3g}{unit}, goal {self.sign} {self.bound:g}{unit}"


class Report:
    """Collects goals and data of one script; ``finish`` prints the goals and writes the JSON file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._json: Path | None = args.json
        self._strict: bool = args.strict
        self._goals: list[Goal] = []
        self.data: dict[str, Any] = {}
        self._began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._load_before = os.getloadavg()[0]

    def goal(self, name: str, value: float, sign: str, bound: float, unit: str = "") -> None:
        self._goals.append(Goal(name, value, sign, bound, unit))

    def finish(self) -> int:
        """Exit code: 1 if a goal was missed and ``--strict`` is on."""
        load = (self._load_before, os.getloadavg()[0])
        print(
            f"\nload average {load[0]:.1f} before, {load[1]:.1f} after"
            " (other work on the machine spoils the figures)"
        )
        for goal in self._goals:
            print(goal)
        missed = [goal for goal in self._goals if not goal.met]
        if self._json is not None:
            record = {
                "script": Path(sys.argv[0]).name,
                "arguments": [Path(a).name if os.sep in a else a for a in sys.argv[1:]],
                "began": self._began,
                "lmcache": lmcache.__version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "cpu": _cpu(),
                "cores": len(os.sched_getaffinity(0)),
                "load_average": [round(x, 2) for x in load],
                "goals": [goal._asdict() | {"met": goal.met} for goal in self._goals],
                "data": self.data,
            }
            self._json.parent.mkdir(parents=True, exist_ok=True)
            self._json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return 1 if missed and self._strict else 0


def parser(text: str | None, repeats: int) -> argparse.ArgumentParser:
    """A command line with what every script takes."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=repeats, help=f"measurements per figure ({repeats})")
    made.add_argument("--json", type=Path, help="write all figures to this file")
    made.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    return made


def numbers(text: str) -> list[int]:
    """``1,2,3`` on a command line."""
    return [int(part) for part in text.split(",")]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


# ---------------------------------------------------------------------------------------------------- time


def timed(what: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def alternate(sides: dict[str, Callable[[], Any]], rounds: int, batch: int = 1) -> dict[str, list[float]]:
    """Seconds of every single call. The sides take turns, ``batch`` calls each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            seconds[name].extend(timed(call) for _ in range(batch))
    return seconds


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


# -------------------------------------------------------------------------------------------------- memory


class Buffer:
    """Private memory of this process, every page touched; the pages are small, as an engine's are."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        pattern = os.urandom(MIB)
        for at in range(0, size, MIB):
            self.view[at : at + MIB] = pattern[: size - at]


def copy_seconds(dst: Buffer, src: Buffer, size: int) -> float:
    """One plain memcpy in the calling thread."""
    return timed(lambda: memcpy(dst.address, src.address, size))


def process_memory(pid: int) -> dict[str, int]:
    """Bytes by kind (VmRSS, RssShmem, ...) from a process's status."""
    out = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            out[words[0].rstrip(":")] = int(words[1]) * 1024
    return out


# --------------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a head, columns aligned."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
