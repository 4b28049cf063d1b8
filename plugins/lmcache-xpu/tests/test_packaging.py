"""The built wheel as it is installed, and its source distribution, on a machine with neither torch.xpu nor a GPU.

`./dev xpu` builds both and says where they are in LMCACHE_BUILT_WHEELS. What is in the wheel is audited there too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import lmcache

BUILT = os.environ.get("LMCACHE_BUILT_WHEELS", "")
PLUGIN = Path(__file__).resolve().parents[1]
SECONDS = 300

installed = pytest.mark.skipif(not BUILT, reason="needs the wheel and the sdist that ./dev xpu builds")


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def lmcache_cli(*arguments: str) -> tuple[int, Any]:
    done = run(sys.executable, "-m", "lmcache.cli.main", *arguments, "--format", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def row(found: Any) -> Any:
    """The record of this backend, wherever in the answer they are listed."""
    listed = (
        found if isinstance(found, list) else next(v for v in found.values() if isinstance(v, list) and v)
    )
    return next(one for one in listed if one["name"] == "xpu")


def test_the_sdk_s_headers_are_the_core_s() -> None:
    mine, core = PLUGIN / "csrc" / "sdk" / "lmcache", Path(lmcache.get_include()) / "lmcache"
    headers = {path.name: path.read_bytes() for path in core.glob("*.h")}
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == headers, (
        "csrc/sdk is not what core/src/lmcache/include has: copy it anew"
    )


@installed
def test_the_installed_module_is_the_wheel_s() -> None:
    code = "from lmcache_xpu import native; print(native.load().__file__)"
    file = run(sys.executable, "-c", code).stdout.strip()
    listed = {path.locate().resolve() for path in distribution("lmcache-xpu").files or ()}
    assert Path(file).resolve() in listed


@installed
def test_it_asks_for_no_package_of_another_vendor_and_none_of_intel_s() -> None:
    wanted = [one for one in distribution("lmcache-xpu").requires or [] if "extra ==" not in one]
    assert {re.split(r"[^a-z0-9-]", one)[0] for one in wanted} == {"lmcache", "numpy"}


@installed
@pytest.mark.torch
def test_list_explain_and_doctor_say_why_it_is_not_usable_and_name_no_fault() -> None:
    pytest.importorskip("torch")
    _, found = lmcache_cli("device", "list")
    assert (row(found)["state"], row(found)["code"]) == ("unavailable", "not-on-this-host")
    assert row(found)["traceback"] == ""
    assert "is built without XPU" in json.dumps(row(found))
    _, found = lmcache_cli("device", "doctor")
    assert row(found)["state"] == "unavailable"
    code, found = lmcache_cli("device", "explain")
    assert code == 0
    done = run(sys.executable, "-c", "import lmcache; lmcache.device_ops", LMCACHE_DEVICE_BACKEND="xpu")
    assert done.returncode != 0
    assert "is built without XPU" in done.stderr.splitlines()[-1]


@installed
@pytest.mark.torch
def test_the_wheel_conforms_at_the_level_that_needs_no_device() -> None:
    pytest.importorskip("torch")
    code, report = lmcache_cli("device", "verify", "xpu", "--level", "packaging")
    assert report["failed"] == []
    assert code == 0
    assert report["source"].startswith("lmcache-xpu ")
    assert "device" not in report["declared"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (sdist,) = Path(BUILT).glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@installed
def test_the_sdist_has_what_a_build_needs_and_nothing_of_another_s(source: Path) -> None:
    tops = {path.name for path in source.iterdir()}
    wanted = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "ci", "csrc", "pyproject.toml", "src"}
    assert tops == {*wanted, "cibuildwheel.toml"}
    assert [path for path in source.rglob("*") if path.suffix in (".so", ".o", ".pyc")] == []


@installed
@pytest.mark.parametrize(
    ("settings", "env", "said"),
    [
        (("SYCL_INCLUDE=SYCL_INCLUDE-NOTFOUND", "CMAKE_IGNORE_PATH={prefix}/include"), {}, "no SYCL runtime"),
        (("LMCACHE_XPU_AOT=pvc",), {}, "LMCACHE_XPU_AOT=pvc: expected icpx"),
        ((), {"CXX": "/bin/false"}, "/bin/false"),
    ],
    ids=["no runtime", "no icpx", "no C++ compiler"],
)
def test_a_build_that_lacks_something_fails_loudly_and_makes_no_hollow_wheel(
    source: Path, tmp_path: Path, settings: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    copy = shutil.copytree(source, tmp_path / "source")
    defines = [f"-Ccmake.define.{one.format(prefix=sys.prefix)}" for one in settings]
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", *defines)
    done = run(*build, "-o", str(tmp_path / "made"), str(copy), CMPLR_ROOT="", **env)
    assert done.returncode != 0
    assert list(tmp_path.rglob("*.whl")) == []
    assert said in re.sub(r"\s+", " ", done.stdout + done.stderr)


def test_what_cibuildwheel_leaves_out_of_wheels_is_what_the_audit_forbids() -> None:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    from audit.policies import POLICIES

    with (PLUGIN / "cibuildwheel.toml").open("rb") as file:
        config = tomllib.load(file)["tool"]["cibuildwheel"]
    told = re.findall(r"--exclude '([^']+)'", config["linux"]["repair-wheel-command"])
    assert set(told) == set(POLICIES["xpu"].excludes())


def test_the_audit_lets_no_runtime_but_that_of_2026_be_needed() -> None:
    from audit.policies import POLICIES

    assert [name for name in POLICIES["xpu"].needed if "sycl" in name] == ["libsycl.so.9"]
