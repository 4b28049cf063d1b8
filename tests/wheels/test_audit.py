"""The audit of device wheels: a sound wheel passes, and each way to break one is named by the rule that is for it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from audit.__main__ import main
from audit.opened import opened
from audit.policies import POLICIES
from audit.rules import RULES, audit
from helpers.made_wheels import CODE_OBJECTS, CUBINS, INFO, METADATA, MODULE, MadeWheel, compiled, fatbin

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"),
    reason="makes libraries for Linux on x86-64 with a C compiler",
)
POLICY = POLICIES["cuda"]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compiled(tmp_path_factory.mktemp("module"), "sound")


def faults(wheel: Path) -> list[str]:
    with opened(wheel) as found:
        return audit(found, POLICY)


def metadata(old: str, new: str) -> dict[str, bytes | None]:
    assert old in METADATA
    return {f"{INFO}/METADATA": METADATA.replace(old, new).encode()}


def test_a_sound_wheel_has_no_fault(
    module: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = MadeWheel(module).write(tmp_path)
    assert faults(path) == []
    assert main(["cuda", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"sound: {path.name}" in said
    assert "device code for compute_90, gfx90a, gfx942, sm_100, sm_120, sm_80, sm_90" in said


# Name of the rule, what of its fault must be said, the files and tags that break it.
BY_FILES: list[tuple[str, str, dict[str, object]]] = [
    ("record", "more than once", {"twice": "lmcache_cuda/spec.py"}),
    ("record", "not in RECORD", {"files": {f"{INFO}/RECORD": f"{INFO}/RECORD,,\n".encode()}}),
    ("record", "in RECORD only", {"files": {f"{INFO}/RECORD": b"lmcache_cuda/gone.py,sha256=x,1\n"}}),
    ("record", "hash is not", {"files": {f"{INFO}/RECORD": b"lmcache_cuda/spec.py,sha256=x,1\n"}}),
    ("packages", "top level lmcache:", {"files": {"lmcache/v1/platform/cuda.py": b""}}),
    ("packages", "top level tests", {"files": {"tests/test_x.py": b""}}),
    ("packages", "lmcache_cuda.libs", {"files": {"lmcache_cuda.libs/libgomp.so": b""}}),
    ("stray", "a header", {"files": {"lmcache_cuda/include/lmcache/kv_body.h": b""}}),
    ("stray", "left over", {"files": {"lmcache_cuda/kernels.fatbin": b""}}),
    ("stray", "expected only", {"files": {"lmcache_cuda/tests/test_x.py": b""}}),
    ("stray", "expected only", {"files": {"lmcache_cuda/notes.txt": b""}}),
    ("module", "hollow", {"files": {MODULE: None}}),
    ("module", "expected one", {"files": {"lmcache_cuda/_native.so": b"PyInit__native"}}),
    ("module", "cpython-312", {"python": "cp312"}),
    ("tags", "expected a manylinux tag", {"platform": "linux_x86_64"}),
    ("tags", "WHEEL says", {"told_platform": "manylinux_2_34_x86_64"}),
    ("tags", "asks for glibc 2.39", {"platform": "manylinux_2_39_x86_64"}),
    ("tags", "promises 2.5", {"platform": "manylinux1_x86_64"}),
    ("tags", "is x86_64: manylinux_2_28_aarch64", {"platform": "manylinux_2_28_aarch64"}),
    ("needed", "damaged", {"files": {"lmcache_cuda/_native.pyi": b"\x7fELF"}}),
    ("size", "unpacked", {"files": {"lmcache_cuda/big.py": bytes(7 << 20)}}),
    ("size", "the wheel", {"files": {"lmcache_cuda/big.py": os.urandom(3 << 20)}}),
    ("images", "cut off", {"files": {"lmcache_cuda/_native.pyi": CUBINS[:40]}}),
    ("images", "sm_75, which the policy", {"files": {"lmcache_cuda/_native.pyi": fatbin((2, 75, 0))}}),
    ("metadata", "Name 'other'", {"files": metadata("Name: lmcache-cuda", "Name: other")}),
    ("metadata", "no Requires-Python", {"files": metadata("Requires-Python: >=3.10\n", "")}),
    ("metadata", "Requires-Dist lmcache: expected", {"files": metadata("lmcache<2,>=1.0", "lmcache")}),
    (
        "metadata",
        "Requires-Dist torch: expected",
        {"files": metadata("torch>=2.6", 'torch>=2; extra == "x"')},
    ),
    ("metadata", "pinned", {"files": metadata("torch>=2.6", "torch==2.11.0")}),
    ("entries", "entry points {}", {"files": {f"{INFO}/entry_points.txt": b""}}),
    ("entries", "no lmcache_cuda/spec.py", {"files": {"lmcache_cuda/spec.py": None}}),
    ("licence", "License-Expression ''", {"files": metadata("License-Expression: Apache-2.0\n", "")}),
    ("licence", "no License-File", {"files": metadata("License-File: LICENSE\n", "")}),
    ("licence", "not in", {"files": {f"{INFO}/licenses/LICENSE": None}}),
    ("licence", "not the text", {"files": {f"{INFO}/licenses/LICENSE": b"All rights reserved.\n"}}),
]


@pytest.mark.parametrize(("rule", "said", "change"), BY_FILES, ids=lambda value: str(value)[:24])
def test_a_wheel_with_a_fault_in_its_files_is_told_of_it(
    module: bytes, tmp_path: Path, rule: str, said: str, change: dict[str, object]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zipfile's, of the name that is there twice
        path = MadeWheel(module, **change).write(tmp_path)  # type: ignore[arg-type]
    found = faults(path)
    assert any(line.startswith(f"{rule}: ") and said in line for line in found), found


def linked_with(library: str) -> Callable[[Path], bytes]:
    def link(folder: Path) -> bytes:
        compiled(folder, library, f"-Wl,-soname,lib{library}.so.1", images=b"", init=f"{library}_one")
        return compiled(folder, "user", f"-L{folder}", "-Wl,--no-as-needed", f"-l{library}")

    return link


BY_MODULE: list[tuple[str, str, Callable[[Path], bytes]]] = [
    ("needed", "needs libtorch_cpu.so.1: torch's own", linked_with("torch_cpu")),
    ("needed", "needs libc10.so.1: torch's own", linked_with("c10")),
    ("needed", "needs libcudart.so.1: the CUDA runtime's", linked_with("cudart")),
    ("needed", "needs libcuda.so.1: the CUDA runtime's", linked_with("cuda")),
    ("needed", "needs libamdhip64.so.1: ROCm's", linked_with("amdhip64")),
    ("needed", "needs libgomp.so.1: expected only", linked_with("gomp")),
    (
        "search",
        "RPATH ['$ORIGIN/../torch/lib']",
        lambda at: compiled(at, "x", "-Wl,-rpath,$ORIGIN/../torch/lib"),
    ),
    ("module", "no PyInit function", lambda at: compiled(at, "x", init="PyInit_other")),
    ("calls", "knows cuCtxSynchronize", lambda at: compiled(at, "x", images=CUBINS + b"cuCtxSynchronize\0")),
    ("images", "no device code for sm_90", lambda at: compiled(at, "x", images=CODE_OBJECTS)),
    ("images", "no device code for gfx942", lambda at: compiled(at, "x", images=CUBINS)),
    ("images", "sm_90a, which the policy", lambda at: compiled(at, "x", images=fatbin((2, 90, 1 << 20)))),
]


@pytest.mark.parametrize(("rule", "said", "build"), BY_MODULE, ids=[said[:32] for _, said, _ in BY_MODULE])
def test_a_wheel_whose_module_has_a_fault_is_told_of_it(
    tmp_path: Path, rule: str, said: str, build: Callable[[Path], bytes]
) -> None:
    found = faults(MadeWheel(build(tmp_path)).write(tmp_path))
    assert any(line.startswith(f"{rule}: ") and said in line for line in found), found


def test_every_rule_has_a_wheel_that_breaks_it() -> None:
    assert {rule for rule, _, _ in [*BY_FILES, *BY_MODULE]} == set(RULES)


def test_a_wheel_that_is_not_for_publishing_may_ask_for_the_glibc_that_it_was_built_with(
    module: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = MadeWheel(module, platform="manylinux_2_36_x86_64").write(tmp_path)
    assert main(["cuda", str(path)]) == 1
    assert "asks for glibc 2.36: expected 2.28" in capsys.readouterr().out
    assert main(["cuda", "--glibc", "2.36", str(path)]) == 0
    with pytest.raises(SystemExit):
        main(["cuda", "--glibc", "new", str(path)])


def test_what_is_no_wheel_is_a_fault_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lmcache_cuda-1.0.0-cp311-cp311-linux_x86_64.whl"
    path.write_text("text")
    assert main(["cuda", str(path)]) == 1
    assert "expected a wheel" in capsys.readouterr().out


def test_what_auditwheel_is_told_to_leave_out_is_what_the_rule_forbids() -> None:
    assert {"libtorch*", "libc10*", "libcudart*", "libcuda.so*", "libamdhip64*"} <= set(POLICY.excludes())
