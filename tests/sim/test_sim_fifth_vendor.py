"""A vendor's wheel as ``lmcache device new`` writes it, from its build through the conformance kit on a device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.kit import verify
from helpers.wheels import ROOT, build_wheel, environment, install

pytest.importorskip("torch")
pytestmark = [pytest.mark.sim, pytest.mark.long]

SAMPLE = ROOT / "examples" / "lmcache-musa-style"
POINT = 'musa_style = "lmcache_musa_style.spec:MusaStyleDeviceSpec"\n'
SECOND = 'musa_on_sim = "lmcache_musa_style.on_sim:OnSimSpec"\n'

# The wheel's code with the names of another device. What is not overridden is the wheel's.
ON_SIM = """
from lmcache_musa_style.spec import MusaStyleDeviceSpec


class OnSimSpec(MusaStyleDeviceSpec):
    device_type = torch_module_name = "sim"
    backend_name = "musa_on_sim"

    def _device_module(self):
        import lmcache_sim
        return super()._device_module()

    def conformance_stall(self, stream, seconds):
        import torch
        torch.sim.Stream.of(stream).sleep(int(seconds * 1e6))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed. It was built with a second backend, which has the other names."""
    folder = tmp_path_factory.mktemp("fifth")
    project = shutil.copytree(SAMPLE, folder / "project")
    (project / "src/lmcache_musa_style/on_sim.py").write_text(ON_SIM)
    settings = (project / "pyproject.toml").read_text()
    assert settings.count(POINT) == 1
    (project / "pyproject.toml").write_text(settings.replace(POINT, POINT + SECOND))
    install(build_wheel(project, folder / "wheel"), folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def found(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kit says of it, where no other plugin serves the simulated device."""
    report = tmp_path_factory.mktemp("report") / "report.json"
    env = environment(site, LMCACHE_DISABLE_PLUGINS="sim")
    return verify("musa_on_sim", report, env, "--level", "basic")


def test_it_conforms_with_nothing_unseen(found: dict[str, Any]) -> None:
    assert found["failed"] == []
    assert found["not_shown"] == []
    assert found["expected_failures"] == []
    assert found["ok"]
    for group in ("identity", "discovery", "device", "block_transfer", "slot_transfer", "faults", "streams"):
        assert any(name.startswith(f"test_{group}.") for name in found["passed"]), group


def test_an_engine_on_it_stores_and_loads(found: dict[str, Any]) -> None:
    byte_for_byte = "test_a_prompt_s_kv_comes_back_byte_for_byte_and_nothing_else_moves[engine_driven]"
    assert f"test_end_to_end.{byte_for_byte}" in found["passed"]


def test_it_declares_what_its_readme_says_and_no_more(found: dict[str, Any]) -> None:
    assert found["declared"] == ["async-memcpy", "asynchronous", "block-transfer", "device", "slot-transfer"]


def test_its_own_methods_moved_the_blocks(site: Path) -> None:
    code = (
        "import json; from lmcache.v1.platform import resolve_device_ops as ops\n"
        "r = ops('sim').binding_report(); print(json.dumps([r.overridden, r.bound, r.modules]))"
    )
    env = environment(site, LMCACHE_DISABLE_PLUGINS="sim")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["multi_layer_block_kv_transfer"], [], []]


def test_without_its_device_the_wheel_s_own_tests_pass(site: Path) -> None:
    tests = [str(path) for path in sorted(SAMPLE.glob("tests/test_*.py")) if "conformance" not in path.name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=site,
        env=environment(site, PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\d+ passed in", done.stdout.splitlines()[-1])


def test_where_the_vendor_s_package_is_missing_the_list_names_it(site: Path) -> None:
    command = [sys.executable, "-m", "lmcache.cli.main", "device", "list", "--format", "json"]
    env = {**environment(site), "LMCACHE_SIM_AUTOLOAD": os.environ.get("LMCACHE_SIM_AUTOLOAD", "0")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    (record,) = [row for row in json.loads(done.stdout)["devices"] if row["name"] == "musa_style"]
    assert (record["state"], record["code"]) == ("unavailable", "not-on-this-host")
    assert "torch.musa is not there: No module named 'torch_musa'" in record["note"]
