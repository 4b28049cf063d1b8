"""``lmcache device verify``: the CPU conforms, each fault is caught by the test that names it, the rest goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_backends import FAKES, FakeBackend, install_badly_packed, install_fakes, verify
from helpers.server import wait_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_fakes(tmp_path_factory.mktemp("fakes"))


def found(site: Path, *arguments: str, code: int, seconds: float = 300.0) -> dict[str, Any]:
    done = verify(site, *arguments, "--format", "json", seconds=seconds)
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] == (code == 0)
    return report


def named(tests: Any) -> str:
    return " or ".join(sorted({test.partition(".")[2] for test in tests}))


def refused(site: Path, *arguments: str, code: int) -> str:
    done = verify(site, *arguments, "--format", "json")
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("lmcache device verify")]
    assert (len(lines), done.stdout) == (1, "")
    return lines[0]


# ---- verdicts


@pytest.mark.long
def test_the_cpu_conforms_at_every_level_that_it_declares(site: Path, tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    report = found(site, "cpu", "--level", "lmcache-driven", "--report", str(kept), code=0, seconds=600)
    assert len(report["passed"]) > 450
    assert {"event-ipc", "tensor-ipc", "cache-context", "lmcache-driven"} <= set(report["declared"])
    assert json.loads(kept.read_text()) == report
    reasons = {row["why"] for row in report["unsupported"]}
    assert reasons <= {
        "not declared: asynchronous",
        "not declared: direct-copies",
        "not declared: group-plans",
        "not declared: group-plans, asynchronous",
        "not declared: pinning",
        "not a wheel of its own: it ships with the core",
    }


def test_a_sound_wheel_conforms_in_all_that_the_bad_ones_fail(site: Path) -> None:
    chosen = named(fake.caught_by for fake in FAKES)
    report = found(site, "fake_good", "--level", "lmcache-driven", "--only", chosen, code=0)
    assert "lmcache-fakes 1.0" in report["source"]
    report = found(site, "fake_async", "--only", f"test_streams or test_identity or ({chosen})", code=0)
    assert report["not_shown"] == []
    assert {fake.caught_by for fake in FAKES if fake.caught_by.startswith("test_streams")} <= set(
        report["passed"]
    )


def test_a_wheel_is_judged_as_a_wheel_where_its_device_is_absent(site: Path) -> None:
    report = found(site, "fake_absent", "--level", "packaging", code=0)
    modules = {test.partition(".")[0] for test in report["passed"]}
    assert modules == {"test_level", "test_identity", "test_discovery"}
    assert report["unsupported"] == report["not_shown"] == []
    report = found(site, "fake_absent", "--level", "basic", "--only", "test_level", code=1)
    assert "device" in report["failed"][0]["why"]


@pytest.mark.parametrize(
    "fake",
    [
        pytest.param(fake, id=fake.name, marks=[pytest.mark.long] if i > 0 else [])
        for i, fake in enumerate(FAKES)
    ],
)
def test_each_fault_is_caught_by_the_test_that_says_what_is_wrong(site: Path, fake: FakeBackend) -> None:
    where = site.parent / "eager" if fake.name == "fake_eager" else site
    report = found(where, fake.name, "--level", fake.level, "--only", named([fake.caught_by]), code=1)
    assert {row["test"].partition("[")[0] for row in report["failed"]} >= {fake.caught_by}
    assert all(row["why"] for row in report["failed"])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_that_is_packed_badly_is_told_what_is_wrong_with_it(tmp_path: Path) -> None:
    for name, source, flags in (
        ("torch", "int t(void) { return 1; }", ()),
        ("mine", "int t(void); int m(void) { return t(); }", ("-L.", "-ltorch")),
    ):
        (tmp_path / f"{name}.c").write_text(source)
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-o",
            f"lib{name}.so",
            f"{name}.c",
            *flags,
            "-Wl,-rpath,build/lib",
        ]
        subprocess.run(command, cwd=tmp_path, check=True)
    site = install_badly_packed(tmp_path, (tmp_path / "libmine.so").read_bytes())
    report = found(site, "fake_good", "--only", "test_identity", code=1)
    faults = {row["test"]: row["why"] for row in report["failed"]}
    assert set(faults) == {
        f"test_identity.{name}"
        for name in (
            "test_the_wheel_says_which_lmcache_it_is_for",
            "test_the_wheel_puts_nothing_into_packages_of_others",
            "test_the_wheel_s_tags_tell_whether_it_has_compiled_code",
            "test_no_library_of_the_wheel_is_tied_to_a_torch_or_a_cuda_runtime",
            "test_no_library_of_the_wheel_is_searched_for_beside_the_current_folder",
        )
    }
    assert (
        "libtorch.so"
        in faults["test_identity.test_no_library_of_the_wheel_is_tied_to_a_torch_or_a_cuda_runtime"]
    )


# ---- what takes the process with it


def test_a_crash_is_a_failed_test_and_the_rest_still_runs(site: Path, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    chosen = "(test_reading_pages and NL_X_NB_BS_HS-tensors) or test_memory"
    done = verify(site, "fake_crash", "--only", chosen, "--junit", str(junit))
    assert done.returncode == 1, done.stdout + done.stderr
    test = "test_block_transfer.test_reading_pages_does_not_write_them[NL_X_NB_BS_HS-tensors]"
    assert f"FAILED: {test}: the process died of SIGSEGV" in done.stdout
    assert "Segmentation fault" in done.stderr  # with the stacks
    cases = ElementTree.fromstring(junit.read_text()).findall("testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failed == [test.partition(".")[2]]
    assert len([case for case in cases if case.get("classname") == "test_memory"]) > 5


@pytest.mark.long
def test_a_hang_is_a_failed_test_and_the_rest_still_runs(site: Path) -> None:
    chosen = "(test_reading_pages and NL_X_NB_BS_HS-tensors) or test_async_copies_of_nothing"
    done = verify(site, "fake_hang", "--only", chosen, "--test-timeout", "8", "--format", "json")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    (row,) = report["failed"]
    assert row["why"].startswith("not done within 8 s")
    assert report["passed"] == ["test_memory.test_async_copies_of_nothing_move_nothing"]
    assert "in hang" in done.stderr  # the stack says where


@pytest.mark.long
def test_a_run_that_is_not_done_in_time_says_where_it_was(site: Path) -> None:
    report = found(site, "fake_hang", "--only", "test_reading_pages", "--timeout", "25", code=1)
    assert report["failed"][0]["why"] == "the run was not done within 25 s"
    assert not report["finished"]


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
    ids=str,
)
def test_whatever_ends_a_run_ends_everything_that_was_started(tmp_path: Path, signum: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.cli.main", "device", "verify", "cpu", "--only", "test_end_to_end"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    started = wait_for(
        lambda: len(family(process.pid)) > 1 and family(process.pid), 60, "a server is started"
    )
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode == code
    wait_for(lambda: not [pid for pid in started if runs(pid)], 20, f"{started} are gone")
    assert signum == signal.SIGKILL or list(tmp_path.iterdir()) == []


def family(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ended meanwhile
            for child in map(int, task.read_text().split()):
                found += [child, *family(child)]
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- expected failures


@pytest.mark.long
def test_an_expected_failure_that_fails_does_not_fail_the_run(site: Path, tmp_path: Path) -> None:
    test = "test_block_transfer.test_a_copy_that_is_asked_for_is_made"
    known = tmp_path / "expected.json"
    known.write_text(json.dumps({test: "the copy engine is not connected yet"}))
    chosen = f"({named([test])}) or test_async_copies_of_nothing"
    report = found(site, "fake_idle", "--only", chosen, "--expected", str(known), code=0)
    assert report["failed"] == []
    assert {row["why"] for row in report["expected_failures"]} == {"the copy engine is not connected yet"}
    assert report["unsupported"] or report["passed"]


@pytest.mark.long
def test_an_expected_failure_that_passes_fails_the_run_and_is_named(site: Path, tmp_path: Path) -> None:
    test = "test_memory.test_async_copies_of_nothing_move_nothing"
    known = tmp_path / "expected.json"
    known.write_text(json.dumps({test: "long mended"}))
    report = found(site, "cpu", "--only", "test_memory", "--expected", str(known), code=1)
    assert report["unexpected_passes"] == [{"test": test, "why": "long mended"}]


@pytest.mark.long
def test_an_expectation_of_a_test_that_does_not_exist_fails_the_run(site: Path, tmp_path: Path) -> None:
    known = tmp_path / "expected.json"
    known.write_text(json.dumps({"test_memory.test_gone": "renamed"}))
    report = found(site, "cpu", "--only", "test_memory", "--expected", str(known), code=1)
    assert report["stale_expectations"] == [{"test": "test_memory.test_gone", "why": "renamed"}]


# ---- refusals


def test_an_unknown_backend_is_refused_with_the_one_that_was_meant(site: Path) -> None:
    assert refused(site, "fake_god", code=3).endswith(
        "no device backend is called 'fake_god'; did you mean fake_good?"
    )


def test_an_expression_that_names_no_test_is_refused(site: Path) -> None:
    assert "--only 'no_such_test'" in refused(site, "cpu", "--only", "no_such_test", code=2)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--expected", "{folder}/none.json", "expected a JSON file"),
        ("--expected", "{folder}/list.json", "expected an object of test name to reason"),
        ("--report", "{folder}/none/report.json", "expected a file in a folder"),
        ("--junit", "{folder}", "expected a file in a folder"),
        ("--report", "/proc/report.json", "expected a file in a folder"),
        ("--junit", "/proc/self/status", "expected a file in a folder"),
        ("--junit", "{folder}/" + 300 * "x", "expected a file in a folder"),
        ("--level", "best", "--level: 'best': expected one of packaging, basic"),
        ("--timeout", "0", "expected seconds above 0"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_in_one_line(
    site: Path, tmp_path: Path, flag: str, value: str, said: str
) -> None:
    (tmp_path / "list.json").write_text("[]")
    line = refused(site, "cpu", flag, value.format(folder=tmp_path), code=2)
    assert flag in line
    assert said in line


def test_two_reports_do_not_go_into_one_file(site: Path, tmp_path: Path) -> None:
    both = str(tmp_path / "report")
    assert "another file" in refused(site, "cpu", "--report", both, "--junit", both, code=2)


# ---- what is written


def test_a_report_may_go_to_a_pipe_and_leaves_it_one(site: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        done = verify(site, "cpu", "--only", "test_level", "--report", str(pipe))
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(reader.communicate(timeout=20)[0])["only"] == "test_level"
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_report_that_cannot_be_written_is_one_line_behind_what_was_found(site: Path) -> None:
    done = verify(site, "cpu", "--only", "test_level", "--report", "/dev/full")
    assert done.returncode == 1
    assert "passes what --only names at level basic" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "lmcache device verify: --report /dev/full: cannot be written (No space left on device); choose another"
    )
    assert Path("/dev/full").is_char_device()
