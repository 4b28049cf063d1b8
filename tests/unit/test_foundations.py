"""What errors, logging, discovery of subclasses and the engines' names promise to every other module."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache import errors
from lmcache.logging import info_once, init_logger, warn_once
from lmcache.utils import EngineType
from lmcache.v1.utils.subclass_discovery import discover_subclasses


def run(code: str, level: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LMCACHE_LOG_LEVEL": level},
    )


# --- discovery of subclasses -------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    files = {
        "__init__.py": "class Base: pass",
        "b.py": "from zoo_pkg import Base\nclass B(Base): pass",
        "a/__init__.py": "from zoo_pkg import Base\nfrom zoo_pkg.b import B\nclass A(Base): pass",
        "a/deep.py": "from zoo_pkg import Base\nclass Deep(Base): pass",
        "bad.py": "raise RuntimeError('boom')",
        "worse.py": "raise SystemExit(3)",
    }
    for name, text in files.items():
        path = tmp_path / "zoo_pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("zoo_pkg")
    for name in [m for m in sys.modules if m.partition(".")[0] == "zoo_pkg"]:
        del sys.modules[name]


def test_each_subclass_is_found_once_where_it_is_defined_and_failures_are_reported(
    package: ModuleType,
) -> None:
    failed: dict[str, BaseException] = {}

    def names(**options: Any) -> list[str]:
        failed.clear()
        found = discover_subclasses(package, package.Base, on_error=failed.__setitem__, **options)
        return [cls.__name__ for cls in found]

    assert names() == ["A", "B"]
    assert {name: type(exc) for name, exc in failed.items()} == {
        "zoo_pkg.bad": RuntimeError,
        "zoo_pkg.worse": SystemExit,
    }
    assert names(levels=(1, 2)) == ["A", "Deep", "B"]
    assert names(levels=[2, 2]) == ["Deep"]
    assert not failed
    assert names(module_filter=lambda short: short == "b") == ["B"]
    assert names(packages_only=True) == ["A"]
    with pytest.raises(ValueError, match="levels"):
        names(levels=(2, 1))


def test_a_failure_nobody_asked_about_is_logged(
    package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    discover_subclasses(package, package.Base)
    assert "cannot import zoo_pkg.bad: RuntimeError: boom" in caplog.text


# --- errors, logging, names --------------------------------------------------------------------------------


def test_errors_carry_exit_codes_and_are_what_callers_catch() -> None:
    codes = {name: getattr(errors, name).exit_code for name in errors.__all__ if name[0].isupper()}
    assert codes == {
        "LMCacheError": 1,
        "ConfigError": 2,
        "StartupError": 3,
        "DeviceError": 1,
        "LayoutError": 1,
    }
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.DeviceError, RuntimeError)
    assert errors.bad_value("--port", "x\n", "0 to 65535", "choose\nanother") == (
        "--port='x\\n': expected 0 to 65535; choose another"
    )


def test_log_lines_go_to_stderr_in_one_format_and_a_misspelt_level_is_info_with_one_warning() -> None:
    code = """
        import logging
        from lmcache.logging import init_logger
        for name in ("lmcache.a", "vendor.b"):
            init_logger(name).info("hello")
            init_logger(name).debug("quiet")
        assert logging.getLogger().handlers == []
    """
    done = run(code, level="loud")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (0, "", 3), done.stderr
    assert lines[0].startswith("LMCache WARNING [")
    assert "LMCACHE_LOG_LEVEL='LOUD'" in lines[0]
    assert lines[1].startswith("LMCache INFO [")
    assert lines[1].endswith("] hello (lmcache.a)")
    assert lines[2].endswith("] hello (lmcache.vendor.b)")
    assert run(code, level="error").stderr == ""


def test_an_application_that_configured_its_root_logger_prints_each_line_once() -> None:
    done = run("""
        import logging
        from lmcache.logging import init_logger
        logging.basicConfig(format="app %(message)s")
        init_logger("lmcache.x").warning("hello")
    """)
    assert done.stderr.splitlines() == ["app hello"]


def test_what_is_said_once_is_said_once_per_logger_and_key(caplog: pytest.LogCaptureFixture) -> None:
    one, two = init_logger("lmcache.once.one"), init_logger("lmcache.once.two")
    for _ in range(3):
        warn_once(one, "k", "a %d", 1)
        info_once(two, "k", "b")
    with caplog.at_level(logging.INFO, "lmcache"):
        warn_once(one, "other", "c")
    assert [r.getMessage() for r in caplog.records] == ["a 1", "b", "c"]
    assert {r.funcName for r in caplog.records} == {
        test_what_is_said_once_is_said_once_per_logger_and_key.__name__
    }


def test_engines_are_named_as_strings() -> None:
    assert [e.value for e in EngineType] == ["vllm", "sglang", "trtllm", "atom", "transformers", "mock"]
    assert EngineType("vllm") is EngineType.VLLM
