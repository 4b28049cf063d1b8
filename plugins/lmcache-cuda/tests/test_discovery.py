"""The wheel as LMCache finds it: by its entry points, without a GPU, and with the reason where it can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENTRY_POINTS = """[lmcache.device_plugins]
cuda = lmcache_cuda.spec:CudaDeviceSpec
rocm = lmcache_cuda.spec:RocmDeviceSpec
"""


def lmcache(site: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    info = site / "lmcache_cuda-1.0.0.dist-info"
    if not info.exists():
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-cuda\nVersion: 1.0.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", "from lmcache.cli.main import main; raise SystemExit(main())", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **settings}, timeout=300,
    )  # fmt: skip


def records(answer: Any) -> dict[str, Any]:
    return {record["name"]: record for record in answer["backends"]}


@pytest.mark.torch
def test_without_a_gpu_both_are_unavailable_and_explain_says_why(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for a GPU")
    done = lmcache(tmp_path, "device", "explain")
    assert done.returncode == 0, done.stderr
    for backend, vendor in (("cuda", "CUDA"), ("rocm", "ROCm")):
        line = next(line for line in done.stdout.splitlines() if backend in line and "unavailable" in line)
        assert f"is built without {vendor}; install a build of torch for {vendor}" in line


@pytest.mark.torch
def test_a_gpu_that_is_asked_for_and_is_not_there_is_an_error_with_the_reason(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for a GPU")
    done = lmcache(tmp_path, "device", "explain", "--format", "json", LMCACHE_DEVICE_BACKEND="cuda")
    answer = json.loads(done.stdout)
    text = json.dumps(answer)
    assert "LMCACHE_DEVICE_BACKEND=cuda: not available on this host: torch" in text
    assert "install a build of torch for CUDA" in text
