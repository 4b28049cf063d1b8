"""What finding the device backends costs, beside the scan of entry points that nobody can avoid.

Goal: with 300 distributions installed and 10 device plugins, the first access takes at most 1.3 times the
bare ``entry_points()`` scan plus the time that importing the plugins takes. Each figure is from a process of
its own, because both scans keep what they have read; the sides take turns. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL = 1.3
GROUP = "lmcache.device_plugins"

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n\n{text}"
_SPEC = """
from lmcache.v1.platform.base.device_spec import DeviceSpec


class Spec(DeviceSpec):
    device_type = backend_name = torch_module_name = "{name}"
"""

_LIBRARY = """
import json, sys, time
if sys.version_info >= (3, 12):
    import importlib.metadata as metadata
else:
    import importlib_metadata as metadata
"""

SIDES = {
    "bare scan": _LIBRARY
    + """
began = time.perf_counter()
found = len(list(metadata.entry_points(group=sys.argv[1])))
print(json.dumps({"seconds": time.perf_counter() - began, "plugins": found, "imports": 0}))
""",
    "first access": _LIBRARY
    + """
import lmcache
from lmcache.v1.platform import _device_detect
began = time.perf_counter()
lmcache.torch_device_type
took = time.perf_counter() - began
from lmcache.v1.platform import device_records
records = [r for r in device_records() if r.origin == "entry-point"]
assert all(r.import_seconds is not None for r in records), records
imports = sum(r.import_seconds for r in records)
print(json.dumps({"seconds": took, "plugins": len(records), "imports": imports}))
""",
}


def populate(site: Path, distributions: int, plugins: int) -> None:
    """Write the metadata of ``distributions``, of which ``plugins`` are device plugins with a module."""
    text = "A description, as long as those of real packages are.\n" * 60
    for index in range(distributions):
        name = f"some-package-{index}"
        points = f"[console_scripts]\n{name} = some_package_{index}:main\n"
        requires = "numpy>=1.20"
        if index < plugins:
            name, requires = f"lmcache-dev{index}", "lmcache>=1.0,<2"
            points = f"[{GROUP}]\ndev{index} = lmcache_dev{index}:Spec\n"
            (site / f"lmcache_dev{index}.py").write_text(_SPEC.format(name=f"dev{index}"))
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(_METADATA.format(name=name, requires=requires, text=text))
        (info / "entry_points.txt").write_text(points)


def measure(site: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """``rounds`` results of each side; one round more before them fills the caches of the file system."""
    names = ("LMCACHE_DEVICE_BACKEND", "DEVICE_TYPE", "LMCACHE_DISABLE_PLUGINS")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["LMCACHE_LOG_LEVEL"] = "error"
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side, code in SIDES.items():
            done = subprocess.run(
                [sys.executable, "-c", code, GROUP], env=env, check=True, capture_output=True, text=True
            )
            if turn:
                results[side].append(json.loads(done.stdout))
    return results


def main() -> int:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distributions", type=int, default=300)
    parser.add_argument("--plugins", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if the goal is missed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "torch.py").write_text("__version__ = '0'\n")  # a real torch's import is not what is timed
        populate(site, args.distributions, args.plugins)
        results = measure(site, args.rounds)
    bare = statistics.median(run["seconds"] for run in results["bare scan"])
    access = statistics.median(run["seconds"] - run["imports"] for run in results["first access"])
    imports = statistics.median(run["imports"] for run in results["first access"])
    ratio = access / bare
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {python}, {args.distributions} distributions, {args.plugins} plugins")
    print(f"bare scan                     {bare * 1e3:7.2f} ms")
    print(f"first access without imports  {access * 1e3:7.2f} ms")
    print(f"imports of the plugins        {imports * 1e3:7.2f} ms")
    print(f"ratio                         {ratio:7.2f}     goal: at most {GOAL}")
    return 1 if args.strict and ratio > GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
