"""LMCache finds this backend, explains it, and uses it when the device is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# Stands in for a host with the device, torch or not.
WITH_DEVICE = """
import sys, types
torch = types.ModuleType("torch")
torch.__version__ = "0"
torch.musa = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
sys.modules["torch"] = torch
import lmcache
print(lmcache.torch_device_type, type(lmcache.device_ops).__name__, lmcache.torch_dev is torch.musa)
"""


def run(*arguments: str, **variables: str) -> str:
    drop = ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND", "LMCACHE_DISABLE_PLUGINS")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**env, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_of_devices_has_it_and_names_no_fault() -> None:
    found = json.loads(run("-m", "lmcache.cli.main", "device", "list", "--format", "json"))
    (record,) = [row for row in found["devices"] if row["name"] == "musa_style"]
    assert record["distribution"] == "lmcache-musa-style"
    assert record["state"] in {"unavailable", "available", "selected"}, record
    assert record["traceback"] == ""
    assert record["state"] != "unavailable" or "torch" in record["note"], "it does not say why it is not available"


def test_where_the_device_is_there_it_is_chosen_with_its_ops() -> None:
    for variables in ({}, {"LMCACHE_DEVICE_BACKEND": "musa_style"}, {"DEVICE_TYPE": "musa"}):
        assert run("-c", WITH_DEVICE, **variables).split() == ["musa", "MusaStyleDeviceOps", "True"]
