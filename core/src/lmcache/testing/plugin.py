"""The pytest plugin of the kit: which tests apply, how each outcome is filed, and what tests are given."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.capabilities import is_in_level
from lmcache.testing.marks import NOT_SHOWN
from lmcache.testing.report import Report, why_expected
from lmcache.testing.runner import Run
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec


def test_name(nodeid: str) -> str:
    """``test_module.test_function[parameters]``: the same wherever the kit is installed."""
    path, _, rest = nodeid.partition("::")
    return f"{Path(path).stem}.{rest.replace('::', '.')}"


test_name.__test__ = False  # type: ignore[attr-defined]


class Kit:
    """The hooks, around one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = time.monotonic()
        self._before = run.report.seconds
        self._stderr = 2

    def save(self) -> None:
        """Put what was found into the file."""
        self._run.report.seconds = round(self._before + time.monotonic() - self._began, 2)
        self._run.save()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Declare the mark; keep the real standard error, which pytest takes away during tests."""
        config.addinivalue_line("markers", "lmcache_needs(*capabilities): what a backend must declare")
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be collected has failed as a whole."""
        name = test_name(report.nodeid)
        if report.failed and name not in self._run.report.settled():
            self._run.report.failed.append({"test": name, "why": _reason(report)})

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what the level does not ask for and what is settled; skip what is not declared."""
        report, names = self._run.report, {test_name(item.nodeid) for item in items}
        known = names | {name.partition("[")[0] for name in names}
        settled = report.settled()
        for name, why in report.expectations.items():
            if name not in known and name not in settled:
                report.stale_expectations.append({"test": name, "why": why})
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            wanted = [name for mark in item.iter_markers("lmcache_needs") for name in mark.args]
            asked = all(is_in_level(name, self._run.level) for name in wanted)
            (kept if asked and test_name(item.nodeid) not in settled else dropped).append(item)
            self._mark(item, [name for name in wanted if name not in report.declared])
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)

    def _mark(self, item: pytest.Item, absent: list[str]) -> None:
        expected = why_expected(self._run.report.expectations, test_name(item.nodeid))
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"not declared: {', '.join(absent)}"))
        elif expected is not None:
            item.add_marker(pytest.mark.xfail(reason=expected, strict=False))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Say which test is under way, so that a crash has a name; end the process if it takes too long."""
        name, began = test_name(item.nodeid), time.monotonic()
        self._run.report.running = name
        self.save()
        faulthandler.dump_traceback_later(self._run.settings.test_seconds, exit=True, file=self._stderr)
        try:
            outcome: Any = yield
            return outcome
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._run.report.durations[name] = round(time.monotonic() - began, 3)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """File each outcome."""
        outcome: Any = yield
        _file(self._run.report, test_name(item.nodeid), outcome)
        return outcome

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        self._run.report.running = ""
        self._run.report.finished = True
        self.save()

    @pytest.fixture(name="run", scope="session")
    def given_run(self) -> Run:
        """The run; tests add to ``run.report.figures``."""
        return self._run


def _file(report: Report, test: str, outcome: Any) -> None:
    expected = hasattr(outcome, "wasxfail")
    if outcome.skipped and expected:
        report.expected_failures.append({"test": test, "why": outcome.wasxfail})
    elif outcome.skipped:
        text = outcome.longrepr[2] if isinstance(outcome.longrepr, tuple) else str(outcome.longrepr)
        text = text.removeprefix("Skipped: ")
        rows = report.not_shown if text.startswith(NOT_SHOWN) else report.unsupported
        rows.append({"test": test, "why": text.removeprefix(NOT_SHOWN)})
    elif outcome.failed:
        if test in report.passed:  # it passed, and cleaning up failed
            report.passed.remove(test)
        report.failed.append({"test": test, "why": _reason(outcome)})
    elif outcome.when == "call" and expected:
        report.unexpected_passes.append({"test": test, "why": outcome.wasxfail})
    elif outcome.when == "call":
        report.passed.append(test)


def _reason(outcome: Any) -> str:
    crash = getattr(outcome.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(outcome.longrepr)
    return " ".join(text.split())[:500]


# ---- what tests are given


@pytest.fixture(scope="session")
def spec(run: Run) -> DeviceSpec:
    """The backend under test."""
    return run.spec


@pytest.fixture(scope="session")
def ops(spec: DeviceSpec) -> DeviceOps:
    """Its device operations."""
    return spec.get_ops()


@pytest.fixture(scope="session")
def dev(spec: DeviceSpec) -> Any:
    """Its torch module, or the stand-in for it."""
    return spec._get_torch_module()


@pytest.fixture(scope="session")
def device(spec: DeviceSpec) -> Any:
    """The torch device that tests use: the first one."""
    import torch

    return torch.device("cpu") if spec.device_type == "cpu" else torch.device(spec.device_type, 0)


@pytest.fixture(scope="session")
def helper() -> Iterator[Any]:
    """A second process that has the backend, which tests share; it is replaced once it has died."""
    from lmcache.testing.peer import Helper

    one = Helper()
    yield one
    one.close()


@pytest.fixture(scope="session")
def stall(spec: DeviceSpec, dev: Any, device: Any) -> Any:
    """Busies the current stream for some time; see :class:`lmcache.testing.stall.Stall`."""
    from lmcache.testing.stall import Stall

    return Stall(spec, dev, device)
