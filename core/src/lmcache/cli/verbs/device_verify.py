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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache.cli.args import add_format, seconds
from lmcache.cli.output import clean, emit
from lmcache.errors import ConfigError, LMCacheError, StartupError

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
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="lmcache-verify-") as scratch:
        report = _verify(args, Path(scratch))
    emit(args.format, report.as_dict(), "\n".join(clean(line) for line in report.lines()))
    for flag, path, text in (("--report", args.report, report.json), ("--junit", args.junit, report.junit)):
        if path:
            try:
                Path(path).write_text(text(), encoding="utf-8")
            except OSError as exc:
                raise LMCacheError(
                    f"{flag} {path}: cannot be written ({exc.strerror}); choose another"
                ) from None
    return 0 if report.ok else 1


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What CI sends to end a job ends this process as an interrupt does: with all that it has started."""

    def end(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_files(args: argparse.Namespace) -> None:
    for flag, path in (("--report", args.report), ("--junit", args.junit)):
        if path:
            _check_writable(flag, Path(path))
    if args.report and args.junit and Path(args.report).absolute() == Path(args.junit).absolute():
        raise ConfigError(f"--junit {args.junit}: expected another file than that of --report")
    if args.expected:
        try:
            data = json.loads(Path(args.expected).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--expected {args.expected}: expected a JSON file ({exc})") from None
        if not isinstance(data, dict) or not all(isinstance(why, str) and why for why in data.values()):
            raise ConfigError(
                f"--expected {args.expected}: expected an object of test name to reason, both text"
            )


def _check_writable(flag: str, path: Path) -> None:
    """By doing it: who may write where is for the kernel to say, and after a run of minutes it is too late."""
    try:
        is_new = not path.exists()
        if not (is_new or path.is_file() or path.is_dir()):
            return  # a pipe or a terminal: to open it now would have effects
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as exc:  # ValueError: a NUL in it
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"{flag} {path}: expected a file in a folder that can be written to ({reason})"
        ) from None


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

    It leads a process group of its own, so that what it started ends with it, however it ends. Its standard input
    says whether we live; see :func:`lmcache.testing.runner.end_with_parent`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.testing.runner", json.dumps(asdict(settings))],
        env=_environment(settings.backend),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 -- asked for above
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()


def _environment(name: str) -> Mapping[str, str]:
    """The backend is chosen by its name; pytest plugins of the environment have no part in it."""
    drop = ("DEVICE_TYPE", "LMCACHE_DISABLE_PLUGINS", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return {**kept, "LMCACHE_DEVICE_BACKEND": name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
