"""The published guide's Foo wheel, byte for byte: built, installed, discovered, chosen, used."""

from __future__ import annotations

import ast
import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.server import COMMAND
from zoo import wheels
from zoo.animals import FAKE_TORCH

GUIDE = Path(__file__).parents[1] / "zoo" / "guide"

# The guide's second part, for a device that has all that lmcache-driven mode needs, in a plugin that imports
# the contracts (and lmcache itself) at its top level.
FULL = """
import lmcache
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper


class Wrapper(DeviceIPCWrapper):
    @classmethod
    def wrap(cls, value):
        return ("handle of", value)


class Ops(DeviceOps):
    def record_completion_on_stream(self, stream_ptr, kind, payload): ...

    def drain_recorded_completions(self):
        return []


class FullSpec(DeviceSpec):
    device_type = backend_name = torch_module_name = "full"
    ops_cls = Ops
    _events = None

    def is_available(self):
        return True

    @property
    def event_ipc_backend(self):
        if self._events is None:
            import torch
            self._events = DefaultEventIPCBackend(event_module=torch.full, device_type=self.device_type)
        return self._events

    @property
    def ipc_wrapper_cls(self):
        return Wrapper

    def SPELLING(self):
        return True

    def create_cache_context(self, *args, **kwargs):
        return BaseCacheContext
"""

FULL_MODULE = """
class _Event:
    from_ipc_handle = ipc_handle = print

    def __init__(self, interprocess): ...

full = SimpleNamespace(Event=_Event)
"""

USE = """
import json, lmcache
from lmcache.v1 import platform
report = lmcache.device_ops.binding_report()
print(json.dumps({
    "type": lmcache.torch_device_type,
    "is_module": lmcache.torch_dev is __import__("torch").foo,
    "ops": type(lmcache.device_ops).__name__,
    "baseline": "multi_layer_block_kv_transfer" in report.baseline,
    "mode": platform.current_device_spec.default_mp_transfer_mode().value,
    "records": {r.name: r.state.value for r in platform.device_records()},
    "synchronized": platform.synchronize_device("foo:0"),
}))
"""

USE_FULL = """
import json, lmcache
from lmcache.v1 import platform
spec = platform.current_device_spec
print(json.dumps({
    "mode": spec.default_mp_transfer_mode().value,
    "missing": spec.missing_for_lmcache_driven(),
    "both": [spec.is_handle_transfer_available(), spec.is_lmcache_driven_available()],
    "wrapped": platform.resolve_kv_wrapper_factory("full")(1),
    "events": type(platform.get_event_ipc_backend("full:0")).__name__,
    "once": platform.get_event_ipc_backend("full:0") is spec.event_ipc_backend,
}))
"""

REAL_TORCH = """
import types, torch
torch.utils.rename_privateuse1_backend("foo")
module = types.ModuleType("torch.foo")
module.is_available = lambda: True
module.synchronize = lambda: None
torch._register_device_module("foo", module)
"""


def read_project() -> tuple[str, str, list[str], str]:
    """Name, version, dependencies and entry points of the guide's pyproject.toml, which is simple enough."""
    parser = configparser.ConfigParser()
    parser.read_string((GUIDE / "pyproject.toml").read_text())
    project = {name: ast.literal_eval(value) for name, value in parser["project"].items()}
    points = parser[f'project.entry-points."{wheels.GROUP}"']
    lines = [f"{name} = {ast.literal_eval(value)}" for name, value in points.items()]
    text = "\n".join([f"[{wheels.GROUP}]", *lines, ""])
    return project["name"], project["version"], project["dependencies"], text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("guide")
    name, version, requires, points = read_project()
    files = {str(p.relative_to(GUIDE / "src")): p.read_bytes() for p in (GUIDE / "src").rglob("*.py")}
    wheel = wheels.build(root, name, files, points, requires, version)
    assert wheel.name == "lmcache_foo_device-0.1.0-py3-none-any.whl"
    wheels.install([(wheel, root / "site")])
    return root / "site"


@pytest.fixture(scope="module")
def fake_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    (folder / "torch.py").write_text(FAKE_TORCH + FULL_MODULE)
    return folder


def run(*argv: str, sites: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    names = ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND", "LMCACHE_DISABLE_PLUGINS")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join([*map(str, sites), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        env={**clean, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_the_guide_s_wheel_is_chosen_and_its_ops_are_the_baseline(site: Path, fake_torch: Path) -> None:
    told = json.loads(run(sys.executable, "-c", USE, sites=(site, fake_torch)).stdout)
    assert told == {
        "type": "foo",
        "is_module": True,
        "ops": "FooDeviceOps",
        "baseline": True,
        "mode": "engine_driven",
        "records": {"cpu": "found", "foo": "selected"},
        "synchronized": None,
    }


def test_the_guide_s_wheel_passes_the_doctor(site: Path, fake_torch: Path) -> None:
    done = run(*COMMAND, "device", "doctor", "--format", "json", sites=(site, fake_torch))
    row = next(r for r in json.loads(done.stdout)["devices"] if r["name"] == "foo")
    assert (row["state"], row["distribution"], row["version"]) == ("available", "lmcache-foo-device", "0.1.0")
    assert [(check["check"], check["ok"]) for check in row["checks"]] == [("native", True), ("copy", True)]


@pytest.mark.torch
def test_the_guide_s_wheel_works_with_a_real_torch_that_has_its_module(site: Path) -> None:
    pytest.importorskip("torch")
    told = json.loads(run(sys.executable, "-c", REAL_TORCH + USE, sites=(site,)).stdout)
    assert (told["type"], told["is_module"], told["ops"]) == ("foo", True, "FooDeviceOps")


@pytest.mark.parametrize("spelling", ["is_handle_transfer_available", "is_lmcache_driven_available"])
def test_a_device_with_all_of_it_is_lmcache_driven_by_either_spelling(
    spelling: str, fake_torch: Path, tmp_path: Path
) -> None:
    source = FULL.replace("SPELLING", spelling)
    points = f"[{wheels.GROUP}]\nfull = lmcache_full:FullSpec\n"
    wheel = wheels.build(tmp_path, "lmcache-full", {"lmcache_full.py": source}, points)
    wheels.install([(wheel, tmp_path / "site")])
    done = run(sys.executable, "-c", USE_FULL, sites=(tmp_path / "site", fake_torch))
    assert json.loads(done.stdout) == {
        "mode": "lmcache_driven",
        "missing": [],
        "both": [True, True],
        "wrapped": ["handle of", 1],
        "events": "DefaultEventIPCBackend",
        "once": True,
    }
