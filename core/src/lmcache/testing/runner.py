"""The process in which a backend is tested: finds it, then runs the suite. Started by ``lmcache device verify``.

What it found is in the report's file, whatever becomes of the process. If that file is there already, the run
goes on behind the test that ended the last one.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lmcache.errors import StartupError
from lmcache.testing.capabilities import Capabilities, probe_capabilities
from lmcache.testing.report import Report
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform._records import PluginRecord
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["Run", "Settings", "main"]


@dataclass(frozen=True)
class Settings:
    """One run, as ``lmcache device verify`` asks for it."""

    backend: str
    level: str
    report: str
    scratch: str
    """A folder for pytest's own settings."""
    expected: str = ""
    only: str = ""
    test_seconds: float = 180.0


class Run:
    """The backend under test, what it declares, and what was found so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.level = settings, settings.level
        self.path = Path(settings.report)
        self.record = _find(settings.backend)
        assert self.record.spec is not None
        self.spec: DeviceSpec = self.record.spec
        self.capabilities: Capabilities = probe_capabilities(self.spec)
        self.report = Report.load(self.path) if self.path.is_file() else self._begin()

    def _begin(self) -> Report:
        own = dict(getattr(self.spec, "conformance_expected_failures", {}))
        given = self.settings.expected
        given = json.loads(Path(given).read_text(encoding="utf-8")) if given else {}
        return Report(
            self.settings.backend,
            self.level,
            self.settings.only,
            self.record.source,
            _version("lmcache"),
            _version("torch"),
            sorted(self.capabilities.declared),
            dict(self.capabilities.faults),
            expectations={**own, **given},
        )

    def save(self) -> None:
        """Put what was found into the file."""
        self.report.save(self.path)


def _find(name: str) -> PluginRecord:
    """The record of a backend that can be used.

    Raises:
        StartupError: There is none of that name, or it cannot be used; says why.
    """
    records = _device_detect.registry().records
    found = [record for record in records if record.name == name]
    if not found:
        names = list(dict.fromkeys(record.name for record in records))
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"installed: {', '.join(names)}"
        raise StartupError(f"no device backend is called {name!r}; {hint}")
    record = next((record for record in found if record.spec is not None), found[0])
    if record.spec is None:
        raise StartupError(f"device backend {name}: {record.verdict()}")
    return record


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def end_with_parent() -> None:
    """Once standard input ends, end this process's group: who asked for the run is gone, however it ended.

    The tests get an empty standard input.
    """
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lmcache-verify-parent", daemon=True).start()


def main(argument: str) -> int:
    """Run the suite; ``argument`` is :class:`Settings` as JSON. Exit code 3 if it cannot begin."""
    settings = Settings(**json.loads(argument))
    path = Path(settings.report)
    try:
        run = Run(settings)
    except Exception as exc:
        # StartupError is ours; whatever else comes from the backend, and ends the run before it began.
        text = (
            str(exc) if isinstance(exc, StartupError) else f"{settings.backend}: {type(exc).__name__}: {exc}"
        )
        Report(settings.backend, settings.level, error=text).save(path)
        return 3
    import pytest

    from lmcache.testing import plugin

    return int(pytest.main(_pytest_arguments(settings), plugins=[plugin.Kit(run), plugin]))


def _pytest_arguments(settings: Settings) -> list[str]:
    import lmcache.testing.suite

    (suite,) = lmcache.testing.suite.__path__
    ini = Path(settings.scratch, "pytest.ini")
    ini.write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
    arguments = [suite, "-c", str(ini), "--rootdir", suite, "-q", "--tb=short", "-rN"]
    arguments += ["-p", "no:cacheprovider", "--disable-warnings", "--import-mode=importlib"]
    return arguments + (["-k", settings.only] if settings.only else [])


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1]))
