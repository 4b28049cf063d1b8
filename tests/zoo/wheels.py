"""Builds wheels from source trees held in memory, and installs them for real.

A wheel is a zip file with four files of metadata; writing it here takes a millisecond and no build backend.
pip installs it as it would any other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

GROUP = "lmcache.device_plugins"

# One process for all: most of what pip costs is its start.
_PIP = """
import json, sys
from pip._internal.cli.main import main
for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(code)
"""


def build(
    folder: Path,
    distribution: str,
    files: Mapping[str, str | bytes],
    entry_points: str = "",
    requires: Sequence[str] = ("lmcache",),
    version: str = "1.0",
    tag: str = "py3-none-any",
) -> Path:
    """Write a wheel into ``folder``; ``files`` are contents by path below site-packages."""
    stem = f"{distribution.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in requires]
    contents: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: zoo\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if entry_points:
        contents[f"{info}/entry_points.txt"] = entry_points
    path = folder / f"{stem}-{tag}.whl"
    record = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")
    return path


def install(wheels: Sequence[tuple[Path, Path]]) -> None:
    """``pip install --target`` for each (wheel, target folder)."""
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
    plain = ["install", "--no-deps", "--no-index", "--no-cache-dir", "--no-compile", *quiet]
    runs = [[*plain, "--target", str(target), str(wheel)] for wheel, target in wheels]
    subprocess.run([sys.executable, "-c", _PIP, json.dumps(runs)], check=True, timeout=300)
