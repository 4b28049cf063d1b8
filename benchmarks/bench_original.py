"""Beside LMCache 0.5.6: store, load and whole requests of the same vLLM, model and prompts.

Four engines run at once, each with a server of its own, and take turns prompt by prompt: this tree's
lmcache with shared memory and with payload in frames, 0.5.6 with shared memory (`--shm-name`) and by
default. A prompt is sent twice: cold, which stores its KV, and warm, which loads it. Transfers are timed in
the worker process, around the connector's `wait_for_save` and `start_load_kv`; on the CPU both connectors
do the whole transfer within these.

The original lives in an environment of its own; README.md says how to make it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import HERE, TESTS, Report, median, parser, table
from small_model import VOCAB

from e2e.engine import EngineProcess, connector
from helpers.server import dead_port, wait_for

CHUNK = 256
L1_GB = 1
PAUSE = 1.5
"""Seconds between requests: vLLM's worker polls at full speed for about a second after each one."""
FIGURES = {"store": "wait_for_save", "load": "start_load_kv"}


@dataclass
class Side:
    """One cache under test: how to start it, and what was measured."""

    name: str
    python: str
    ours: bool
    path: str
    """What the worker must say of the transfer path it took."""
    flags: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    server: Any = None
    engine: Any = None
    figures: dict[str, list[float]] = field(
        default_factory=lambda: {"store": [], "load": [], "cold": [], "warm": []}
    )

    @property
    def env(self) -> dict[str, str]:
        """The original must not see this tree's lmcache; both need the engine process's code."""
        tree = os.environ.get("PYTHONPATH", "") if self.ours else ""
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), str(HERE), tree])),
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
        }

    def log(self, folder: Path, what: str) -> Path:
        return folder / f"{self.name.replace(', ', '-').replace(' ', '-')}.{what}.log"

    def processes(self) -> list[int]:
        """The server and every process of the engine (which leads a session)."""
        leader = self.engine.process.pid
        found = [self.server.pid]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == leader:
                        found.append(int(entry.name))
                except ProcessLookupError:
                    continue
        return found

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.processes():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def sides(args: Any) -> list[Side]:
    # Its metrics need packages that vLLM does not bring; without them it also has less to do.
    old = ["--eviction-policy", "LRU", "--disable-observability"]
    segment = ["--shm-name", f"bench_{os.getpid()}", "--no-l1-use-lazy"]
    every = [
        Side("ours, shared memory", args.python, True, "shared_memory", extra={"lmcache.mp.shm": "require"}),
        Side("ours, frames", args.python, True, "frames", extra={"lmcache.mp.shm": "off"}),
        Side(
            "0.5.6, shared memory", args.original_python, False, "EngineDrivenContextShm",
            [*old, *segment, "--supported-transfer-mode", "engine_driven"],
            {"lmcache.mp.mp_transfer_mode": "engine_driven"},
        ),
        Side(
            "0.5.6, default", args.original_python, False, "EngineDrivenContextPickle",
            [*old, "--supported-transfer-mode", "auto"],
        ),
    ]  # fmt: skip
    return every


# ------------------------------------------------------------------------------------------------- processes


@contextmanager
def started_server(side: Side, port: int, logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    http = dead_port()
    command = [side.python, "-m", "lmcache.cli.main", "server", "--port", str(port), "--http-port", str(http)]
    command += ["--l1-size-gb", str(L1_GB), *side.flags]
    with open(side.log(logs, "server"), "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | side.env
        )

    def answers() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"{side.name}: the server ended at once; see {log.name}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    try:
        wait_for(answers, 120, f"{side.name}: server healthy")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def started_engine(side: Side, port: int, model: Path, logs: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(
        model, side.log(logs, "engine"), connector(port, **side.extra),
        python=side.python, main="timed_engine", env=side.env, dtype="bfloat16",
    )  # fmt: skip
    try:
        process.ready()
        path = process.call("put_clocks")
        if path != side.path:
            raise SystemExit(f"{side.name}: transfers take the path {path}, expected {side.path}")
        yield process
    finally:
        process.close()


def start(side: Side, stack: ExitStack, model: Path, logs: Path) -> None:
    began = time.monotonic()
    port = dead_port()
    side.server = stack.enter_context(started_server(side, port, logs))
    side.engine = stack.enter_context(started_engine(side, port, model, logs))
    print(f"{side.name}: started in {time.monotonic() - began:.0f} s", flush=True)


# --------------------------------------------------------------------------------------------------- a turn


def turn(side: Side, prompt: list[int]) -> tuple[dict[str, float], list[int]]:
    """The prompt cold and warm: seconds of both requests, of store and load; and the warm answer."""
    whole = len(prompt) // CHUNK * CHUNK
    seconds: dict[str, float] = {}
    side.engine.call("take_clocks")
    for kind, cached in (("cold", 0), ("warm", whole)):
        (result,), seconds[kind] = side.engine.timed([prompt])
        clocks = side.engine.call("take_clocks")
        if result["cached"] != cached:
            raise SystemExit(
                f"{side.name}, {kind}: {result['cached']} tokens from the cache, expected {cached}"
            )
        figure = "store" if kind == "cold" else "load"
        seconds[figure] = clocks[FIGURES[figure]]
        time.sleep(PAUSE)
    return seconds, result["tokens"]


def idle_share(all_sides: list[Side], seconds: float = 3.0) -> dict[str, float]:
    """CPU that each side takes while nobody asks for anything, as a share of one core."""
    before = [side.cpu_seconds() for side in all_sides]
    time.sleep(seconds)
    return {side.name: (side.cpu_seconds() - b) / seconds for side, b in zip(all_sides, before, strict=True)}


def one_round(all_sides: list[Side], number: int, length: int) -> None:
    """A new prompt on every side; another side begins each time."""
    prompt = random.Random(number).choices(range(VOCAB), k=length)
    first = number % len(all_sides)
    answers = []
    for side in all_sides[first:] + all_sides[:first]:
        seconds, tokens = turn(side, prompt)
        answers.append(tokens)
        for name, value in seconds.items():
            side.figures[name].append(value)
    if any(tokens != answers[0] for tokens in answers):
        raise SystemExit(f"the same prompt, warm, has different answers: {answers}")


# ------------------------------------------------------------------------------------------------- the result


def compare(all_sides: list[Side], report: Report) -> None:
    mid = {side.name: {k: median(v) for k, v in side.figures.items()} for side in all_sides}
    head = ("median ms", *mid[all_sides[0].name])
    print()
    table(head, [(name, *(f"{value * 1e3:.1f}" for value in row.values())) for name, row in mid.items()])
    ours, frames, shm, default = (mid[side.name] for side in all_sides)
    print()
    pairs = {"ours / 0.5.6 shared memory": (ours, shm), "ours / 0.5.6 default": (ours, default)}
    pairs |= {
        "our frames / 0.5.6 shared memory": (frames, shm),
        "our frames / 0.5.6 default": (frames, default),
    }
    table(
        ("times faster", *ours),
        [(name, *(f"{old[k] / new[k]:.2f}" for k in new)) for name, (new, old) in pairs.items()],
    )
    for figure in FIGURES:
        report.goal(f"{figure}, times faster than its shared memory", shm[figure] / ours[figure], ">=", 4)
        report.goal(f"{figure}, times faster than its default", default[figure] / ours[figure], ">=", 20)
    report.goal("warm request, shared memory, ours / its", ours["warm"] / shm["warm"], "<=", 1)
    report.goal("warm request, without, ours / its default", frames["warm"] / default["warm"], "<=", 1)


def main() -> int:
    made = parser(__doc__, repeats=9)
    made.add_argument(
        "--original-python", required=True, help="interpreter of the environment with lmcache 0.5.6"
    )
    made.add_argument(
        "--python", default=sys.executable, help="interpreter with this lmcache and vLLM (this one)"
    )
    made.add_argument("--tokens", type=int, default=4000, help="prompt length (4000)")
    made.add_argument("--logs", type=Path, help="folder for the logs of servers and engines")
    args = made.parse_args()
    report = Report(args)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-")))
        logs = args.logs or scratch
        logs.mkdir(parents=True, exist_ok=True)
        model = scratch / "model"
        subprocess.run(
            [args.python, str(HERE / "small_model.py"), str(model)], check=True, capture_output=True
        )
        all_sides = sides(args)
        for side in all_sides:
            start(side, stack, model, logs)
        one_round(all_sides, 0, args.tokens)  # to warm up
        for side in all_sides:
            side.figures = {name: [] for name in side.figures}
        idle = idle_share(all_sides)
        print(
            "CPU while idle, share of a core:",
            ", ".join(f"{k}: {v:.2f}" for k, v in idle.items()),
            flush=True,
        )
        for number in range(1, args.repeats + 1):
            one_round(all_sides, number, args.tokens)
    compare(all_sides, report)
    report.data = {"idle_share": idle, "seconds": {side.name: side.figures for side in all_sides}}
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
