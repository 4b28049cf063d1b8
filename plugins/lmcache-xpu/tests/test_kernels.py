"""The kernel: the shipped SPIR-V is what its source compiles to, and both ways of having one move the same bytes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
BYTES = 4096
MADE_WITH = "2026.0.0"
"""The runtime whose compiler made the shipped SPIR-V."""


@pytest.fixture(params=["spirv", "source"])
def way(request: pytest.FixtureRequest, module: Any) -> Iterator[str]:
    module.kernels_from(request.param)
    yield request.param
    module.kernels_from("")


def test_the_shipped_spirv_is_what_its_source_compiles_to(module: Any, queue: int) -> None:
    if version("intel-sycl-rt") != MADE_WITH:
        pytest.skip(f"another compiler makes other bytes of the same source: needs intel-sycl-rt {MADE_WITH}")
    fresh = module.compile_spirv(queue)
    assert fresh == module.shipped_spirv(), "run ci/make_spirv.py, and build anew"


def test_the_module_has_the_tree_s_spirv(module: Any) -> None:
    assert module.shipped_spirv() == (SOURCES / "kernels.spv").read_bytes(), "build the module anew"


def test_the_script_makes_it_with_nothing_set(module: Any, queue: int, tmp_path: Path) -> None:
    script = tmp_path / "ci" / "make_spirv.py"
    script.parent.mkdir()
    (tmp_path / "csrc").mkdir()
    shutil.copy(SOURCES.parent / "ci" / script.name, script)
    env = {name: value for name, value in os.environ.items() if name != "OCL_ICD_FILENAMES"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "csrc" / "kernels.spv").read_bytes() == module.compile_spirv(queue)


def test_the_kernel_moves_the_same_bytes_wherever_it_comes_from(module: Any, queue: int, way: str) -> None:
    ptr = module.usm_alloc(queue, 2 * BYTES, "host")
    data = bytes(range(256)) * (BYTES // 256)
    ctypes.memmove(ptr, data, BYTES)
    # 8 blocks of 4 slots of 32 floats in one layer of MLA; the object takes four of them.
    module.transfer("t", queue, 3, 1, [1, 1, 8, 4, 1, 32, 4, 0], [ptr], [ptr + BYTES], [6, 0, 3, 7], 16)
    module.queue_wait(queue)
    assert module.kernel_origin(queue) == way
    block = BYTES // 8
    moved = ctypes.string_at(ptr + BYTES, 4 * block)
    assert moved == b"".join(data[at * block : (at + 1) * block] for at in (6, 0, 3, 7))
    module.usm_free(ptr)


def test_more_tokens_than_a_launch_has_groups_are_all_moved(module: Any, queue: int) -> None:
    tokens = 300_000
    ptr = module.usm_alloc(queue, 4 * tokens, "host")
    data = (bytes(range(256)) * (2 * tokens // 256 + 1))[: 2 * tokens]
    ctypes.memmove(ptr, data, 2 * tokens)
    slots = [(7919 * token) % tokens for token in range(tokens)]  # each once
    module.transfer(
        "t", queue, 3, 1, [1, 1, tokens, 1, 1, 1, 2, 0], [ptr], [ptr + 2 * tokens], slots, tokens, by_slot=True
    )  # fmt: skip
    module.queue_wait(queue)
    assert ctypes.string_at(ptr + 2 * tokens, 2 * tokens) == b"".join(
        data[2 * at : 2 * at + 2] for at in slots
    )
    module.usm_free(ptr)


def test_another_way_to_have_a_kernel_is_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="expected spirv, source or nothing"):
        module.kernels_from("fatbin")
