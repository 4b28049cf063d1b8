"""The same tests on the other drivers: HIP's, and a CUDA driver without batched copies. A process has one driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_rig import KIND, environment, native

HERE = Path(__file__).resolve().parent
FILES = [HERE / f"test_native_{name}.py" for name in ("transfers", "codec", "plans", "driver", "streams")]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["rocm", "old"])
def test_all_of_it_holds_on_another_driver(kind: str) -> None:
    pytest.importorskip("torch")
    if KIND != "cuda":
        pytest.skip(f"this run is on the {KIND} driver itself")
    if kind == "rocm" and not native.IMAGES["rocm"]:
        pytest.skip("this module has no kernels for ROCm; build it with LMCACHE_CUDA_TARGETS='cuda;rocm'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    done = subprocess.run(command, env=environment(kind), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout
