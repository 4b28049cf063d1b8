"""The backend among others, in processes of their own: found, taken out, without its libraries, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.runner import Run
from lmcache.v1.platform._records import BUILT_IN
from lmcache.v1.platform.base.device_spec import DeviceSpec

_DECIDING = ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND", "LMCACHE_DISABLE_PLUGINS")
_SOUND = {"found", "available", "selected", "unavailable"}

# What stands in for a host on which something is missing, before the backends are looked for.
_WITHOUT = {
    "nothing": "",
    "torch": 'sys.modules["torch"] = None\n',
    "the device's torch module": """
import types
torch = types.ModuleType("torch")
torch.__version__ = "0"
sys.modules["torch"] = torch
""",
    "its own libraries": """
import importlib.abc, importlib.machinery
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != sys.argv[1]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            raise ImportError(f"{name}: the test has taken its library away")
        return spec
sys.meta_path.insert(0, Refuse())
""",
}
_LIST = """
import json, sys
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform._selection import import_torch
found, torch = _device_detect.registry(), import_torch()
for record in found.records:
    if record.spec is not None:
        found.probe(record, torch)
print(json.dumps([record.as_dict() for record in found.records]))
"""
_PROBE = """
import json, sys, time
from lmcache.v1.platform import _device_detect
record = next(r for r in _device_detect.registry().records if r.name == sys.argv[2])
answers, times = [], []
for _ in range(3):
    began = time.monotonic()
    answers.append(record.spec.is_available())
    times.append(time.monotonic() - began)
print(json.dumps({"record": record.as_dict(), "answers": answers, "times": times}))
"""


def _python(run: Run, code: str, **variables: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    package = type(run.spec).__module__.partition(".")[0]
    done = subprocess.run(
        [sys.executable, "-c", code, package, run.record.name],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-1500:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _listed(run: Run, without: str = "nothing", **variables: str) -> dict[str, dict[str, Any]]:
    code = _LIST.replace("import json, sys\n", "import json, sys\n" + _WITHOUT[without], 1)
    return {record["name"]: record for record in _python(run, code, **variables)}


def test_it_is_found_and_names_no_fault(run: Run) -> None:
    record = _listed(run)[run.record.name]
    assert record["state"] in _SOUND, record
    assert record["traceback"] == "", record["traceback"]


@needs("device")
def test_it_is_chosen_when_it_is_asked_for_by_name(run: Run, spec: DeviceSpec) -> None:
    code = "import json, lmcache; print(json.dumps([lmcache.torch_device_type, type(lmcache.device_ops).__name__]))"
    kind, ops = _python(run, code, LMCACHE_DEVICE_BACKEND=run.record.name)
    assert kind == spec.device_type
    assert ops == type(spec.get_ops()).__name__


def test_it_can_be_taken_out_and_is_not_imported_then(run: Run) -> None:
    if run.record.origin == BUILT_IN:
        pytest.skip("not a wheel of its own: it ships with the core")
    listed = _listed(run, LMCACHE_DISABLE_PLUGINS=run.record.name)
    assert (listed[run.record.name]["state"], listed[run.record.name]["code"]) == ("blocked", "disabled")
    assert listed[run.record.name]["import_seconds"] is None
    assert listed["cpu"]["state"] in _SOUND


@pytest.mark.parametrize("without", [name for name in _WITHOUT if name != "nothing"])
def test_where_something_is_missing_it_says_so_and_others_go_on(run: Run, without: str) -> None:
    listed = _listed(run, without)
    record = listed[run.record.name]
    assert record["state"] in _SOUND, f"without {without}: {record['note']}"
    assert record["code"] != "probe-raised", f"without {without}, is_available() raises: {record['note']}"
    assert listed["cpu"]["state"] in {"available", "selected"}
    if without != "its own libraries" and run.record.origin != BUILT_IN:
        assert record["state"] == "unavailable", f"without {without} it cannot be used, and says that it can"


def test_availability_is_a_bool_that_stays_and_is_quick_to_ask(run: Run) -> None:
    found = _python(run, _PROBE)
    assert found["record"]["code"] != "probe-raised", found["record"]["note"]
    assert all(answer is found["answers"][0] for answer in found["answers"])
    assert isinstance(found["answers"][0], bool), f"is_available() answers {found['answers'][0]!r}"
    assert found["times"][-1] < 1, f"is_available() took {found['times'][-1]:.1f} s though asked before"
