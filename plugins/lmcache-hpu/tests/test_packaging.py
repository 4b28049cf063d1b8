"""The built wheel and its source distribution. `./dev hpu` builds both and says where in LMCACHE_BUILT_WHEELS."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).resolve().parents[1]
BUILT = os.environ.get("LMCACHE_BUILT_WHEELS", "")
needs_built = pytest.mark.skipif(not BUILT, reason="needs the wheel and the sdist that ./dev hpu builds")


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def lmcache_cli(*arguments: str) -> Any:
    done = run(sys.executable, "-m", "lmcache.cli.main", *arguments, "--format", "json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def listed(answer: Any) -> list[dict[str, Any]]:
    """The records of an answer, whatever they are called there."""
    return (
        answer if isinstance(answer, list) else next(v for v in answer.values() if isinstance(v, list) and v)
    )


@needs_built
def test_the_installed_module_is_the_built_one() -> None:
    from lmcache_hpu import _native

    listed = {path.locate().resolve() for path in distribution("lmcache-hpu").files or ()}
    assert Path(_native.__file__).resolve() in listed


@needs_built
def test_without_a_device_list_and_doctor_say_why_and_name_no_fault() -> None:
    for verb in ("list", "doctor"):
        (row,) = [one for one in listed(lmcache_cli("device", verb)) if one["name"] == "hpu"]
        assert row["state"] == "unavailable", row
        assert row["code"] == "not-on-this-host"
        assert "habana_frameworks" in json.dumps(row)


@needs_built
def test_asking_for_it_without_a_device_is_an_error_in_one_line() -> None:
    done = run(sys.executable, "-c", "import lmcache; lmcache.device_ops", LMCACHE_DEVICE_BACKEND="hpu")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "hpu" in last
    assert "habana_frameworks is not installed" in last


@needs_built
@pytest.mark.torch
def test_the_wheel_conforms_at_the_level_that_needs_no_device(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "report.json"
    verify = ("device", "verify", "hpu", "--level", "packaging", "--report", str(report))
    done = run(sys.executable, "-m", "lmcache.cli.main", *verify)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["failed"] == []


@needs_built
def test_the_sdist_holds_all_that_is_built_and_neither_tests_nor_modules() -> None:
    (archive,) = Path(BUILT).glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {p.relative_to(PLUGIN).as_posix() for p in (PLUGIN / "csrc").rglob("*.*") if p.is_file()}
    assert wanted | {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not any(name.startswith("tests/") or name.endswith(".so") for name in names)


@needs_built
def test_a_build_without_a_compiler_fails_and_makes_no_hollow_wheel(tmp_path: Path) -> None:
    (archive,) = Path(BUILT).glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = (one for one in tmp_path.iterdir() if one.is_dir())
    build = (
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "-o",
        str(tmp_path / "made"),
        str(source),
    )
    done = run(*build, CXX="/bin/false")
    assert done.returncode != 0
    assert "/bin/false" in re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert list(tmp_path.rglob("*.whl")) == []


def test_what_cibuildwheel_leaves_out_of_wheels_is_what_the_audit_forbids() -> None:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    pytest.importorskip("audit", reason="is in tools/, which the project's own pytest settings name")
    from audit.policies import POLICIES

    with (PLUGIN / "cibuildwheel.toml").open("rb") as file:
        config = tomllib.load(file)["tool"]["cibuildwheel"]
    told = re.findall(r"--exclude '([^']+)'", config["linux"]["repair-wheel-command"])
    assert set(told) == set(POLICIES["hpu"].excludes())


def test_host_staging_is_the_same_text_in_every_plugin_that_ships_it() -> None:
    """Their sdists build alone, so each has a copy: cp -r plugins/lmcache-hpu/csrc/host plugins/lmcache-X/csrc/"""
    mine = {path.name: path.read_text() for path in (PLUGIN / "csrc" / "host").iterdir()}
    others = [one for one in PLUGIN.parent.glob("lmcache-*/csrc/host") if one.parents[1] != PLUGIN]
    for other in others:
        assert {path.name: path.read_text() for path in other.iterdir()} == mine, other
    assert others or not (PLUGIN.parent / "lmcache-neuron").exists()
