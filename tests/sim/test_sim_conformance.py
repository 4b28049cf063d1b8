"""The simulated accelerator passes the conformance kit, at every level."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.kit import verify

pytest.importorskip("torch")
pytestmark = pytest.mark.sim


def test_the_device_conforms_at_the_highest_level_with_nothing_unseen(good_sim: dict[str, Any]) -> None:
    assert good_sim["failed"] == []
    assert good_sim["not_shown"] == []
    assert good_sim["expected_failures"] == []
    assert good_sim["ok"]
    for group in (
        "block_transfer",
        "events",
        "tensor_ipc",
        "cache_context",
        "end_to_end",
        "streams",
        "plans",
        "faults",
    ):
        assert any(name.startswith(f"test_{group}.") for name in good_sim["passed"]), group


def test_it_lacks_nothing_but_tensors_as_operands_and_planes_of_a_layer(good_sim: dict[str, Any]) -> None:
    """Its kernels take addresses; these do not tell the widths of planes."""
    reasons = {row["why"] for row in good_sim["unsupported"]}
    known = ("operands not declared: tensors", "format not declared: NL_X_NP_X_NB_BS_ONE_HS")
    assert {why for why in reasons if why not in known} == set()


@pytest.mark.long
@pytest.mark.parametrize("level", ["basic", "native"])
def test_it_declares_what_the_lower_levels_ask_for(level: str, tmp_path: Path) -> None:
    report = verify("sim", tmp_path / "report.json", os.environ, "--level", level, "--only", "test_level")
    assert report["ok"], report["failed"]
