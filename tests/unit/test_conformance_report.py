"""What the conformance kit makes of outcomes: lists, verdict, JSON, JUnit; and of declarations: capabilities."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.testing.capabilities import CAPABILITIES, LEVELS, is_in_level, probe_capabilities
from lmcache.testing.report import Report, why_expected
from lmcache.v1.platform.base.device_spec import DeviceSpec


def ended(**fields: Any) -> Report:
    return Report("foo", "basic", finished=True, **fields)


ROW = {"test": "test_x.test_y[a]", "why": "because\x1b[0m <&>"}


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({"passed": ["test_x.test_y"]}, True),
        ({}, False),  # nothing was shown
        ({"passed": ["a"], "failed": [ROW]}, False),
        ({"passed": ["a"], "unexpected_passes": [ROW]}, False),
        ({"passed": ["a"], "stale_expectations": [ROW]}, False),
        ({"passed": ["a"], "error": "no such backend"}, False),
        ({"passed": ["a"], "expected_failures": [ROW], "unsupported": [ROW], "not_shown": [ROW]}, True),
    ],
)
def test_what_conforms(fields: dict[str, Any], ok: bool) -> None:
    assert ended(**fields).ok is ok
    assert ("does NOT conform" in list(ended(**fields).lines())[-1]) is not ok


def test_a_run_that_did_not_end_does_not_conform() -> None:
    report = Report("foo", "basic", passed=["a"], running="test_x.test_y")
    assert not report.ok
    assert any("test_x.test_y" in line for line in report.lines())


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = ended(
        passed=["a"], failed=[ROW], figures={"rate": 1.5}, durations={"a": 0.1}, expectations={"a": "b"}
    )
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_every_list_has_its_lines_and_its_cases_in_junit() -> None:
    lists = (
        "failed",
        "unexpected_passes",
        "stale_expectations",
        "expected_failures",
        "unsupported",
        "not_shown",
    )
    report = ended(
        passed=["test_x.test_ok"], **{name: [{"test": f"test_x.{name}", "why": ROW["why"]}] for name in lists}
    )
    lines = list(report.lines())
    assert all(any(name in line for line in lines) for name in lists)
    suite = ElementTree.fromstring(report.junit())
    kinds = {case.get("name"): [child.tag for child in case] for case in suite}
    assert kinds == {
        "test_ok": [], "failed": ["failure"], "unexpected_passes": ["failure"], "stale_expectations": ["failure"],
        "expected_failures": ["skipped"], "unsupported": ["skipped"], "not_shown": ["skipped"],
    }  # fmt: skip
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "3", "3")
    assert report.settled() == {"test_x.test_ok", *(f"test_x.{name}" for name in lists)}


@pytest.mark.parametrize(
    ("expectations", "why"),
    [
        ({}, None),
        ({"test_x.test_y": "all of them"}, "all of them"),
        ({"test_x.test_y[a]": "this one"}, "this one"),
        ({"test_x.test_y[b]": "another"}, None),
        ({"test_x.test_y": "all", "test_x.test_y[a]": "this"}, "this"),
    ],
)
def test_a_name_without_parameters_stands_for_all_of_them(
    expectations: dict[str, str], why: str | None
) -> None:
    assert why_expected(expectations, "test_x.test_y[a]") == why


def test_a_crash_is_filed_under_the_test_that_ran_and_may_be_expected() -> None:
    report = Report("foo", "basic", running="test_x.test_y[a]", expectations={"test_x.test_z": "known"})
    report.died("the process died of SIGSEGV")
    assert report.failed == [{"test": "test_x.test_y[a]", "why": "the process died of SIGSEGV"}]
    report.running = "test_x.test_z"
    report.died("the process died of SIGSEGV")
    assert report.expected_failures == [
        {"test": "test_x.test_z", "why": "known (the process died of SIGSEGV)"}
    ]
    assert report.running == ""


@pytest.mark.parametrize("absent", ["pytest", "numpy", "torch"])
def test_without_what_the_kit_needs_it_does_not_start(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name in ("pytest", "numpy", "torch"):
            return None if name == absent else object()
        return there(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["device", "verify", "cpu"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith(f"lmcache device verify: needs {absent}: pip install 'lmcache[testing]'")
    assert (said.err.count("\n"), said.out) == (1, "")


class Broken(DeviceSpec):
    @property
    def event_ipc_backend(self) -> Any:
        raise ImportError("libfoo.so: cannot open")

    def is_available(self) -> bool:
        return True

    def create_cache_context(self, *_: Any, **__: Any) -> Any:
        return None


def test_a_declaration_that_raises_is_a_fault_and_costs_only_itself() -> None:
    found = probe_capabilities(Broken())
    assert found.faults["event-ipc"] == "ImportError: libfoo.so: cannot open"
    assert {"device", "cache-context"} <= found.declared
    assert "event-ipc" in found.missing_for("lmcache-driven")
    assert "tensor-ipc" not in found.declared


def test_each_level_asks_for_capabilities_that_it_also_tests() -> None:
    for level, wanted in LEVELS.items():
        assert set(wanted) <= set(CAPABILITIES)
        assert all(is_in_level(name, level) for name in wanted)
    assert not is_in_level("tensor-ipc", "native")
