"""Distributions for tests: real wheels, built and installed, and made-up ones that are two files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BUILD_SECONDS = 300


def write_distribution(
    site: Path,
    name: str,
    points: Mapping[str, str],
    modules: Mapping[str, str],
    version: str = "1.0",
    requires: Sequence[str] = (),
    group: str = "lmcache.plugins",
) -> None:
    """Put modules and the metadata of an installed distribution into the folder ``site``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    entries = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{entries}")
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)


def build_wheel(project: Path, into: Path) -> Path:
    """Build the wheel of a project with pip, in an environment of its own as on a user's machine."""
    done = _run("-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(into), str(project))
    assert done.returncode == 0, done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


def install(wheel: Path, site: Path) -> None:
    """Install a wheel into the folder ``site``."""
    done = _run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    assert done.returncode == 0, done.stderr


def environment(site: Path, **more: str) -> dict[str, str]:
    """Variables for a process that finds what is installed in ``site``, before all else."""
    path = os.pathsep.join(part for part in (str(site), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "PYTHONPATH": path, **more}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        env=settings,
    )
