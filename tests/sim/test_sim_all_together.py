"""Every device wheel of this repository beside the simulated device's, in one environment, on hosts that lack things.

The wheels are there as their sources: what they say without their native modules is what they say without a device.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.wheels import ROOT, environment, write_distribution

pytest.importorskip("torch")
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later reads the projects' settings")
pytestmark = pytest.mark.sim

GROUP = "lmcache.device_plugins"
PROJECTS = [*sorted((ROOT / "plugins").iterdir()), ROOT / "examples" / "lmcache-musa-style"]
BACKENDS = {"cuda", "rocm", "xpu", "hpu", "neuron", "musa_style"}

# What a host lacks: a module that is found in the place of the real one, and does what is written here.
CANNOT = "raise OSError('libvendor.so.1: cannot open shared object file')"
NO_TORCH = {"torch": "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"}
HALF_A_TORCH = {"torch": "__version__ = '2.13.0'"}
NO_SIM = {"lmcache_sim": CANNOT}
BROKEN_VENDORS = {"habana_frameworks": CANNOT, "torch_neuronx": CANNOT, "torch_musa": CANNOT}
HOSTS = {
    "torch for the CPU, and vendors' packages that do not load": {**NO_SIM, **BROKEN_VENDORS},
    "half a torch": {**HALF_A_TORCH, **NO_SIM},
    "no torch, and vendors' packages that do not load": {**NO_TORCH, **BROKEN_VENDORS},
    "no torch": {**NO_TORCH, **NO_SIM},
}
UNSOUND = {"half a torch": ["cpu"]}
"""What doctor rightly finds beside the wheels: the CPU's own backend copies by that torch."""


def settings(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all of them are."""
    folder = tmp_path_factory.mktemp("all") / "site"
    for project in PROJECTS:
        told = settings(project)
        extras = told.get("optional-dependencies", {}).items()
        requires = told["dependencies"] + [f'{one}; extra == "{name}"' for name, of in extras for one in of]
        points = told["entry-points"][GROUP]
        write_distribution(folder, told["name"], points, {}, requires=requires, group=GROUP)
        (package,) = (path.parent for path in (project / "src").glob("*/spec.py"))
        (folder / package.name).symlink_to(package)
    return folder


def run(env: dict[str, str], *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def device(env: dict[str, str], verb: str, code: int = 0) -> dict[str, Any]:
    command = ("-m", "lmcache.cli.main", "device", verb, "--format", "json")
    found: dict[str, Any] = json.loads(run(env, *command, code=code))
    return found


@pytest.mark.parametrize("host", HOSTS)
def test_without_any_runtime_doctor_list_and_explain_name_reasons_and_no_fault(
    host: str, site: Path, tmp_path: Path
) -> None:
    for name, body in HOSTS[host].items():
        (tmp_path / f"{name}.py").write_text(body + "\n")
    env = environment(site)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])

    wrong = UNSOUND.get(host, [])
    examined = device(env, "doctor", code=1 if wrong else 0)["devices"]
    assert [record["name"] for record in examined if not record["sound"]] == wrong
    listed, explained = device(env, "list"), device(env, "explain")
    assert explained["selected"] == "cpu"
    for records in (examined, listed["devices"], explained["devices"]):
        assert {record["name"] for record in records} == {"cpu", "sim"} | BACKENDS
        for record in records:
            assert record["traceback"] == "", record
            if record["name"] != "cpu":
                assert record["state"] == "unavailable", record
                assert record["note"], record


def test_the_simulated_device_is_chosen_among_them(site: Path) -> None:
    code = "import lmcache; print(lmcache.torch_device_type, type(lmcache.device_ops).__name__)"
    assert run(environment(site), "-c", code).split() == ["sim", "SimDeviceOps"]
    explained = device(environment(site), "explain")
    assert explained["selected"] == "sim"
    states = {record["name"]: record["state"] for record in explained["devices"]}
    assert states == {"cpu": "available", "sim": "selected"} | dict.fromkeys(BACKENDS, "unavailable")


IMPORT = """
import importlib, json, sys, time
import lmcache.v1.platform.base.device_spec
before = set(sys.modules)
module, _, name = sys.argv[1].partition(":")
began = time.perf_counter()
spec = getattr(importlib.import_module(module), name)()
spent = time.perf_counter() - began
spec.backend_name, spec.device_type, spec.torch_module_name
print(json.dumps([spent, sorted({new.partition(".")[0] for new in set(sys.modules) - before})]))
"""


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_importing_a_plugin_takes_20_ms_at_most_and_loads_itself_only(project: Path, site: Path) -> None:
    for target in settings(project)["entry-points"][GROUP].values():
        times = []
        for _ in range(3):  # the quickest: others share the machine
            spent, new = json.loads(run(environment(site), "-c", IMPORT, target))
            times.append(spent)
            mine = {target.partition(".")[0], "lmcache"}
            assert set(new) - mine - sys.stdlib_module_names == set()
        assert min(times) <= 0.020, times


def needed(name: str, where: list[str]) -> Iterator[str]:
    """Distributions that come with one, by what the installed ones of them ask for."""
    waiting, seen = [name], set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        yield name
        (found, *_) = importlib.metadata.distributions(name=name, path=where)
        waiting += wanted_by(found.requires or [])


def wanted_by(lines: Iterable[str]) -> list[str]:
    rows = [
        row for row in map(Requirement, lines) if row.marker is None or row.marker.evaluate({"extra": ""})
    ]
    assert not [row for row in rows if row.extras], "extras are not followed here"
    return [row.name for row in rows]


@pytest.mark.parametrize("name", ["lmcache-xpu", "lmcache-hpu", "lmcache-neuron", "lmcache-musa-style"])
def test_no_cuda_package_comes_with_the_wheel_of_another_vendor(name: str, site: Path) -> None:
    """Neither does torch: the build that the package index serves by default brings CUDA."""
    everything = set(needed(name, [str(site), *sys.path]))
    assert {name, "lmcache", "msgspec", "pyzmq"} <= everything
    assert [one for one in everything if one == "torch" or one.startswith(("nvidia", "cuda", "triton"))] == []


def test_the_walk_finds_what_the_wheel_for_cuda_brings(site: Path) -> None:
    assert "torch" in set(needed("lmcache-cuda", [str(site), *sys.path]))
