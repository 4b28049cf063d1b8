"""The conformance kit on the wheel: on the simulated accelerator, and without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lmcache_neuron._native")

from neuron_on_sim import distribution

pytestmark = [pytest.mark.torch, pytest.mark.sim]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("lmcache_sim", reason="needs the simulated accelerator: ./dev neuron")
    site = tmp_path_factory.mktemp("site")
    report = site / "report.json"
    command = [
        sys.executable,
        "-m",
        "lmcache.cli.main",
        "device",
        "verify",
        "neuron-on-sim",
        "--level",
        "native",
    ]
    done = subprocess.run(
        [*command, "--report", str(report)], env={**os.environ, **distribution(site)}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert report.is_file(), done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(report.read_text())
    assert answer["ok"] is (done.returncode == 0)
    return answer


def test_it_conforms_at_the_level_of_native_code_with_nothing_unseen(found: dict[str, Any]) -> None:
    assert found["failed"] == []
    assert found["not_shown"] == []
    assert found["ok"]
    for group in ("block_transfer", "slot_transfer", "faults", "streams"):
        assert any(name.startswith(f"test_{group}.") for name in found["passed"]), group


def test_an_engine_stores_and_loads_in_engine_driven_mode(found: dict[str, Any]) -> None:
    passed = {name for name in found["passed"] if name.startswith("test_end_to_end.")}
    assert (
        "test_end_to_end.test_a_prompt_s_kv_comes_back_byte_for_byte_and_nothing_else_moves[engine_driven]"
        in passed
    )
    assert not any("lmcache_driven" in name for name in passed)


def test_it_declares_what_the_documents_say_and_no_more(found: dict[str, Any]) -> None:
    assert found["declared"] == [
        "async-memcpy", "asynchronous", "block-transfer", "device", "native-ops", "slot-transfer",
    ]  # fmt: skip
