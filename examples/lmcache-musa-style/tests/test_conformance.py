"""LMCache's own tests for backends. Without the device only those that need none of it are run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmcache_musa_style.spec import MusaStyleDeviceSpec

for needed in ("torch", "numpy"):
    pytest.importorskip(needed, reason="the conformance kit needs torch and numpy: lmcache[testing]")

WITHOUT_DEVICE = ("--only", "test_identity or test_discovery or no_declaration or not_claimed or says_what_it_serves")


def test_the_conformance_kit_finds_no_fault() -> None:
    chosen = ("--level", "basic") if MusaStyleDeviceSpec().is_available() else WITHOUT_DEVICE
    done = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "device", "verify", "musa_style", *chosen],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
