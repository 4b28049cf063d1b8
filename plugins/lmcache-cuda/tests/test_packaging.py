"""The built wheel as it is installed, and its source distribution, on a machine with neither driver nor GPU.

`./dev cuda` builds both and says where they are in LMCACHE_BUILT_WHEELS. What is in the wheel is audited there too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import lmcache

BUILT = os.environ.get("LMCACHE_BUILT_WHEELS", "")
pytestmark = pytest.mark.skipif(not BUILT, reason="needs the wheel and the sdist that ./dev cuda builds")

PLUGIN = Path(__file__).resolve().parents[1]
TARGETS = {"cuda": "sm_80 sm_90 sm_100 sm_120 compute_90", "rocm": "gfx90a gfx942"}
SECONDS = 300


def run(*command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine without a driver: what stands in for one elsewhere is not to be found."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")
    }
    return subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def python(code: str, **env: str) -> str:
    done = run(sys.executable, "-c", code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lmcache_cli(*arguments: str) -> tuple[int, Any]:
    done = run(sys.executable, "-m", "lmcache.cli.main", *arguments, "--format", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def rows(found: Any) -> dict[str, Any]:
    """Records by their backend's name, wherever in the answer they are listed."""
    listed = (
        found if isinstance(found, list) else next(v for v in found.values() if isinstance(v, list) and v)
    )
    return {row["name"]: row for row in listed}


# ---- installed


def test_the_installed_wheel_is_the_built_one_with_code_for_every_promised_target() -> None:
    code = (
        "from lmcache_cuda import _native; import json; print(json.dumps([_native.__file__, _native.IMAGES]))"
    )
    file, images = json.loads(python(code))
    listed = {path.locate().resolve() for path in distribution("lmcache-cuda").files or ()}
    assert Path(file).resolve() in listed
    assert {kind: set(text.split()) for kind, text in images.items()} == {
        kind: set(text.split()) for kind, text in TARGETS.items()
    }


def test_importing_the_native_module_opens_no_driver_and_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, lmcache_cuda.spec; from lmcache_cuda import _native\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])\n"
        "print([l.split()[-1] for l in open('/proc/self/maps') if 'libcuda' in l or 'libamdhip' in l])"
    )
    assert python(code).split() == ["[]", "[]"]


@pytest.mark.parametrize(("kind", "library"), [("cuda", "libcuda.so.1"), ("rocm", "libamdhip64.so")])
def test_the_first_call_says_in_one_line_that_there_is_no_driver(kind: str, library: str) -> None:
    if any(
        Path(folder, library).exists()
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/opt/rocm/lib")
    ):
        pytest.skip(f"this machine has {library}")
    code = (
        f"from lmcache_cuda import _native as n\nn.use({kind!r})\n"
        "try:\n    n.device_count()\nexcept RuntimeError as exc:\n    print(exc)"
    )
    said = python(code).splitlines()
    assert len(said) == 1
    assert library in said[0]


# ---- discovery without a device


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_list_and_doctor_say_why_the_backend_is_not_usable_and_name_no_fault(backend: str) -> None:
    pytest.importorskip("torch")
    _, found = lmcache_cli("device", "list")
    row = rows(found)[backend]
    assert (row["state"], row["code"]) == ("unavailable", "not-on-this-host")
    assert row["traceback"] == ""
    assert rows(found)["cpu"]["state"] in ("available", "selected")
    _, found = lmcache_cli("device", "doctor")
    row = rows(found)[backend]
    assert row["state"] == "unavailable", row


def test_explain_falls_to_the_cpu_and_asking_for_cuda_is_an_error_in_one_line() -> None:
    pytest.importorskip("torch")
    code, found = lmcache_cli("device", "explain")
    assert code == 0
    assert "cpu" in json.dumps(found)
    done = run(sys.executable, "-c", "import lmcache; lmcache.device_ops", LMCACHE_DEVICE_BACKEND="cuda")
    assert done.returncode != 0
    assert "cuda" in done.stderr.splitlines()[-1]


# ---- the conformance kit


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_the_wheel_conforms_at_the_level_that_needs_no_device(backend: str) -> None:
    pytest.importorskip("torch")
    code, report = lmcache_cli("device", "verify", backend, "--level", "packaging")
    assert report["failed"] == []
    assert code == 0
    assert report["source"].startswith("lmcache-cuda ")
    assert {test.partition(".")[0] for test in report["passed"]} == {
        "test_level",
        "test_identity",
        "test_discovery",
    }
    assert "device" not in report["declared"]


@pytest.mark.torch
def test_the_next_level_says_that_the_device_is_missing() -> None:
    pytest.importorskip("torch")
    code, report = lmcache_cli("device", "verify", "cuda", "--level", "basic", "--only", "test_level")
    assert code == 1
    assert [row["test"] for row in report["failed"]] == [
        "test_level.test_the_level_s_capabilities_are_declared"
    ]
    assert "'device': 'not declared" in report["failed"][0]["why"]


# ---- the source distribution


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (sdist,) = Path(BUILT).glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def test_the_sdist_has_what_a_build_needs_and_nothing_of_another_s(source: Path) -> None:
    tops = {path.name for path in source.iterdir()}
    wanted = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "ci", "csrc", "pyproject.toml", "src"}
    assert tops == {*wanted, "cibuildwheel.toml"}
    assert [path for path in source.rglob("*") if path.suffix in (".so", ".o", ".fatbin", ".pyc")] == []


def test_the_sdk_in_the_sdist_is_the_core_s(source: Path) -> None:
    mine, core = source / "csrc" / "sdk" / "lmcache", Path(lmcache.get_include()) / "lmcache"
    headers = {path.name: path.read_bytes() for path in core.glob("*.h")}
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == headers, (
        "csrc/sdk is not what core/src/lmcache/include has: copy it anew"
    )


# ---- builds that cannot be


def folders_of(*programs: str) -> str:
    """Where programs are, for CMake to look away from."""
    places = [*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin", "/opt/rocm/llvm/bin"]
    # Not where the C++ compiler is: what else is there is named by its path.
    found = {place for place in places for name in programs if Path(place, name).exists()}
    return ";".join(sorted(found - {"/usr/bin", "/bin"}))


WANTED = "-Ccmake.define.LMCACHE_CUDA_TARGETS="
HIDDEN = f"-Ccmake.define.CMAKE_IGNORE_PATH={folders_of('nvcc')}"
CASES: list[tuple[str, Sequence[str], dict[str, str], str]] = [
    ("nothing is said of targets", (HIDDEN,), {}, "lmcache-cuda: no nvcc"),
    ("no nvcc", (f"{WANTED}cuda", HIDDEN), {}, "lmcache-cuda: no nvcc"),
    ("an nvcc that does not run", (f"{WANTED}cuda",), {"CUDACXX": "/bin/false"}, "/bin/false --version"),
    ("a clang that does not run", (f"{WANTED}rocm",), {"HIPCXX": "/bin/false"}, "/bin/false --version"),
    ("no C++ compiler", (f"{WANTED}cuda",), {"CXX": "/bin/false"}, "/bin/false"),
    ("an unknown target", (f"{WANTED}cudda",), {}, "target 'cudda'"),
    ("no target", (WANTED,), {}, "LMCACHE_CUDA_TARGETS is empty"),
]


@pytest.mark.parametrize(
    ("settings", "env", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_build_that_lacks_something_fails_loudly_and_makes_no_hollow_wheel(
    source: Path, tmp_path: Path, settings: Sequence[str], env: dict[str, str], said: str
) -> None:
    copy = shutil.copytree(source, tmp_path / "source")
    build = (
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        *settings,
        "-o",
        str(tmp_path / "made"),
    )
    cleared = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "ROCM_PATH"), "")
    done = run(*build, str(copy), **cleared, **env)
    assert done.returncode != 0
    assert list(tmp_path.rglob("*.whl")) == []
    assert said in re.sub(r"\s+", " ", done.stdout + done.stderr)


# ---- what is published


def test_the_reader_of_device_code_agrees_with_nvidia_s_tool(tmp_path: Path) -> None:
    cuobjdump = next(Path(sys.prefix).glob("lib/python3.*/site-packages/nvidia/*/bin/cuobjdump"), None)
    if cuobjdump is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    from audit.images import device_images

    file = json.loads(
        python("from lmcache_cuda import _native; import json; print(json.dumps(_native.__file__))")
    )
    data = Path(file).read_bytes()
    at = data.index(bytes.fromhex("50ed55ba"))
    size = 16 + int.from_bytes(data[at + 8 : at + 16], "little")
    (tmp_path / "kernels.fatbin").write_bytes(data[at : at + size])
    said = ""
    for what in ("--list-elf", "--list-ptx"):
        done = run(str(cuobjdump), what, "kernels.fatbin", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    theirs = re.findall(r"\.(sm_\d+[af]?)\.(cubin|ptx)", said)
    mine = list(device_images(data[at : at + size]))
    assert sorted(mine) == sorted(
        name if kind == "cubin" else name.replace("sm", "compute") for name, kind in theirs
    )


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_cibuildwheel_makes_a_wheel_for_every_python_and_both_processors(arch: str) -> None:
    config = str(PLUGIN / "cibuildwheel.toml")
    command = ("-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux", "--archs", arch)
    done = run(sys.executable, *command, "--config-file", config, str(PLUGIN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"cp3{minor}-manylinux_{arch}" for minor in range(10, 15)]


def test_what_cibuildwheel_leaves_out_of_wheels_is_what_the_audit_forbids() -> None:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    from audit.policies import POLICIES

    with (PLUGIN / "cibuildwheel.toml").open("rb") as file:
        config = tomllib.load(file)["tool"]["cibuildwheel"]
    told = re.findall(r"--exclude '([^']+)'", config["linux"]["repair-wheel-command"])
    assert set(told) == set(POLICIES["cuda"].excludes())
    assert config["config-settings"] == {"cmake.define.LMCACHE_CUDA_TARGETS": "cuda;rocm"}
