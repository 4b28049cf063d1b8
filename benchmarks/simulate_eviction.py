"""Hit rates of every eviction policy on recorded requests, by both replays of ``lmcache tool simulate``.

    python benchmarks/simulate_eviction.py --json benchmarks/results/eviction.json \
        mooncake_conversation_trace.jsonl.xz mooncake_synthetic_trace.jsonl.xz

Writes one chart per trace and replay beside the JSON file. Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def simulate(trace: Path, replay: str, chart: Path) -> dict[str, object]:
    """What the verb says."""
    verb = [sys.executable, "-m", "lmcache.cli.main", "tool", "simulate", str(trace)]
    flags = ["--replay", replay, "--plot", str(chart), "--format", "json"]
    done = subprocess.run([*verb, *flags], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    results = []
    for trace in args.traces:
        for replay in ("accesses", "l1"):
            name = trace.name.partition(".")[0]
            result = simulate(trace, replay, args.json.with_name(f"{args.json.stem}-{name}-{replay}.svg"))
            results.append(result)
            print(f"{trace.name} {replay}: {json.dumps(result['hit_rates'])}", flush=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
