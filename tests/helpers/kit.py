"""Running the conformance kit as a vendor does, on good devices and bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.wheels import write_distribution

BAD = Path(__file__).resolve().parents[1] / "devices" / "lmcache-sim-bad"


def install_bad_sim(site: Path) -> None:
    """Put the backend ``sim-bad`` into the folder ``site``; LMCACHE_SIM_FAULT says what is wrong with it."""
    points = {"sim-bad": "lmcache_sim_bad.spec:BadSimDeviceSpec"}
    requires = ("lmcache>=1.0,<2",)
    write_distribution(site, "lmcache-sim-bad", points, {}, requires=requires, group="lmcache.device_plugins")
    (site / "lmcache_sim_bad").symlink_to(BAD / "lmcache_sim_bad")


def verify(
    backend: str, report: Path, env: Mapping[str, str], *options: str, seconds: float = 900
) -> dict[str, Any]:
    """``lmcache device verify``; its report. Fails if there is none, and says what the kit said."""
    command = [sys.executable, "-m", "lmcache.cli.main", "device", "verify", backend, "--report", str(report)]
    done = subprocess.run(
        [*command, *options, "--format", "json"],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert report.is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["ok"] is (done.returncode == 0)
    return found
