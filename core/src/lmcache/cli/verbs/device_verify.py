"""``lmcache device verify``: the conformance kit against one backend."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache.cli.args import add_format, seconds
from lmcache.cli.output import clean, emit
from lmcache.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from lmcache.testing.report import Report
    from lmcache.testing.runner import Settings

HELP = "run the conformance kit against a device backend"

_RUN_SECONDS = 1200.0
_TEST_SECONDS = 180.0
_DEATHS = 5
"""Tests that may take the process with them; after that the run ends."""
_NEEDED = ("pytest", "numpy", "torch")


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from lmcache.testing.capabilities import LEVELS

    parser.add_argument("name", metavar="NAME", help="the backend's name, as lmcache device list shows it")
    parser.add_argument("--level", choices=tuple(LEVELS), default="basic", help="what it is to prove (basic)")
    parser.add_argument("--report", metavar="FILE", help="write what was found to this file, JSON")
    parser.add_argument("--junit", metavar="FILE", help="write it to this file, JUnit XML")
    parser.add_argument(
        "--expected", metavar="FILE", help="expected failures, JSON: test name to reason; none may pass"
    )
    parser.add_argument("--only", metavar="EXPR", help="run the tests that this names (pytest's -k)")
    parser.add_argument(
        "--timeout", type=seconds, default=_RUN_SECONDS, help="seconds for the whole run (1200)"
    )
    parser.add_argument(
        "--test-timeout", type=seconds, default=_TEST_SECONDS, help="seconds for each test (180)"
    )
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if the backend does not conform."""
    import importlib.util

    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise StartupError(
            f"needs {' and '.join(absent)}: pip install 'lmcache[testing]', and your device's torch"
        )
    _check_files(args)
    with tempfile.TemporaryDirectory(prefix="lmcache-verify-") as scratch:
        report = _verify(args, Path(scratch))
    if args.report:
        report.save(Path(args.report))
    if args.junit:
        Path(args.junit).write_text(report.junit(), encoding="utf-8")
    emit(args.format, report.as_dict(), "\n".join(clean(line) for line in report.lines()))
    return 0 if report.ok else 1


def _check_files(args: argparse.Namespace) -> None:
    for flag, path in (("--report", args.report), ("--junit", args.junit)):
        if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise ConfigError(f"{flag} {path}: expected a file in a folder that can be written to")
    if args.expected:
        try:
            data = json.loads(Path(args.expected).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--expected {args.expected}: expected a JSON file ({exc})") from None
        if not isinstance(data, dict) or not all(isinstance(why, str) and why for why in data.values()):
            raise ConfigError(
                f"--expected {args.expected}: expected an object of test name to reason, both text"
            )


def _verify(args: argparse.Namespace, scratch: Path) -> Report:
    """Run the suite to its end, going on behind each test that takes the process with it."""
    from lmcache.testing.report import Report
    from lmcache.testing.runner import Settings

    path = scratch / "report.json"
    expected = str(Path(args.expected).absolute()) if args.expected else ""
    settings = Settings(
        args.name, args.level, str(path), str(scratch), expected, args.only or "", args.test_timeout
    )
    deadline = time.monotonic() + args.timeout
    for _ in range(_DEATHS):
        code = _run_once(settings, deadline, quiet=args.format == "json")
        if not path.is_file():
            ended = "not done in time" if code is None else f"the process ended with code {code}"
            raise StartupError(f"{args.name}: {ended} before the first test; see above")
        report = Report.load(path)
        if report.error:
            raise StartupError(report.error)
        if report.finished:
            if code == 4 or not report.settled():
                raise ConfigError(f"--only {args.only!r}: expected an expression that names a test")
            return report
        began = bool(report.running)
        report.died(_how(code, path, args))
        report.save(path)
        if code is None or not began:
            return report
    return report


def _how(code: int | None, path: Path, args: argparse.Namespace) -> str:
    """How the process ended. The file was last written when the test began."""
    if code is None:
        return f"the run was not done within {args.timeout:g} s"
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    if time.time() - path.stat().st_mtime >= args.test_timeout:
        return f"not done within {args.test_timeout:g} s; the stacks are on standard error"
    return f"the process ended with code {code}"


def _run_once(settings: Settings, deadline: float, quiet: bool) -> int | None:
    """The exit code of the process that runs the suite; None if it was not done in time.

    It leads a process group of its own, so that what it started ends with it, however it ends.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.testing.runner", json.dumps(asdict(settings))],
        env=_environment(settings.backend),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
    )
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(name: str) -> Mapping[str, str]:
    """The backend is chosen by its name; pytest plugins of the environment have no part in it."""
    drop = ("DEVICE_TYPE", "LMCACHE_DISABLE_PLUGINS", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return {**kept, "LMCACHE_DEVICE_BACKEND": name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
