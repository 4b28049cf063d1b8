"""What can be said of tests/gpu without a GPU: the scripts are sound, refuse what is wrong, and their measuring and
exchanging parts run over the fake driver. Nothing here says that they work on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parent / "gpu"
STEPS = ["build", "doctor", "ipc", "measure", "kit", "modes", "sync"]
sys.path.insert(0, str(GPU))  # rig
sys.path.insert(0, str(GPU.parent / "fake"))


def run(*command: str, seconds: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def script(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run("bash", str(GPU / "run.sh"), *arguments, **env)


def over_fake(name: str, kind: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("lmcache_cuda._native")
    import fakedriver

    path = str(fakedriver.folder(kind))
    return run(sys.executable, str(GPU / name), "--kind", kind, *arguments, LD_LIBRARY_PATH=path, **env)


def with_path(folder: str) -> str:
    return os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH", "")) if part)


# ---- run.sh


@pytest.mark.parametrize("name", ["gpu/run.sh", "gpu/prepare.sh"])
def test_the_shell_scripts_parse(name: str) -> None:
    assert run("bash", "-n", str(GPU.parent / name)).returncode == 0
    assert os.access(GPU.parent / name, os.X_OK)


def test_a_dry_run_names_every_step_and_runs_nothing(tmp_path: Path) -> None:
    done = script("--dry-run", "--out", str(tmp_path), "--python", "/nowhere/python")
    assert done.returncode == 0, done.stderr
    assert [line[5:] for line in done.stdout.splitlines() if line.startswith("==== ")] == [*STEPS, "results"]
    assert "LMCACHE_CUDA_TARGETS=cuda" in done.stdout
    for level in ("packaging", "basic", "native", "lmcache-driven"):
        assert f"--level {level}" in done.stdout
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fast"], "--fast: no such option"),
        (["measures"], "measures: no such step"),
        (["--seconds", "0"], "--seconds 0: expected a whole number"),
        (["--backend", "xpu"], "--backend xpu: expected cuda or rocm"),
        (["--kit", "/nowhere"], "--kit /nowhere: no such folder"),
        (["--out"], "--out: expected a value"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_runs(arguments: list[str], said: str) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[0]
    assert done.stdout == ""


def test_a_step_that_fails_fails_the_run_and_nothing_is_tried_without_a_wheel(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path), "--python", "/bin/false")
    assert done.returncode == 1
    assert (tmp_path / "results.txt").read_text().split()[:3] == ["build", "FAILED", "(1)"]
    done = script("--out", str(tmp_path), "--python", "/bin/false", "doctor", "ipc")
    assert done.returncode == 1
    lines = (tmp_path / "results.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["doctor", "FAILED"], ["ipc", "FAILED"]]


def test_a_step_that_hangs_is_ended_when_the_time_is_up(tmp_path: Path) -> None:
    hang = tmp_path / "python"
    hang.write_text("#!/bin/sh\nexec sleep 300\n")
    hang.chmod(0o755)
    done = script("--out", str(tmp_path), "--python", str(hang), "--seconds", "2", "ipc", "sync")
    assert done.returncode == 1
    lines = (tmp_path / "results.txt").read_text().splitlines()
    assert all("NOT DONE IN TIME" in line for line in lines), lines


# ---- over the fake driver


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_two_processes_share_memory_and_keep_the_order_of_events(kind: str) -> None:
    done = over_fake("two_processes.py", kind, "--mib", "4", FAKE_DELAY_US="50")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("memory by ")]
    assert len(lines) == 2
    assert lines[0] == "memory by handle, 4 MiB, with an event: ok"


def test_a_handle_that_cannot_be_opened_fails_the_check() -> None:
    done = over_fake("two_processes.py", "cuda", "--mib", "4", FAKE_FAIL="cuIpcOpenMemHandle_v2=1")
    assert done.returncode != 0
    assert "ok" not in done.stdout.split()


def test_the_measuring_script_fills_its_table_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = over_fake("measure.py", "cuda", "--scale", "0.01", "--rounds", "1", "--json", str(path))
    assert done.returncode in (0, 1), done.stderr  # over the fake the goals mean nothing
    rows = {row["what"]: row for row in json.loads(path.read_text())}
    assert all(row["value"] > 0 for row in rows.values())
    assert {"ceiling: pinned H2D", "ceiling: pinned D2H", "ceiling: device copy"} <= set(rows)
    goals = [row for row in rows.values() if row["goal"] or row["most"]]
    assert (
        len(goals) == 2 * 2 * 3 + 2 * 5 + 2
    )  # copies both ways and both calls, kernels of five layouts, launches
    assert (done.returncode == 1) == any(row["met"] is False for row in goals)


MOVES_NOTHING = """
import measure
from rig import rig
with rig("cuda", 0, 1) as one:
    pages = measure.Pages(one, measure.CASES[0], 4, 2)
    pages.check()
    print("sound", flush=True)
    pages.move = lambda way: None
    pages.check()
"""


def test_a_transfer_that_moves_nothing_ends_the_measuring(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(MOVES_NOTHING)
    done = over_fake(str(tmp_path / "nothing.py"), "cuda", PYTHONPATH=with_path(str(GPU)))
    assert done.stdout == "sound\n"
    assert "not what was stored" in done.stderr


# ---- goals and verdicts


def test_a_goal_is_met_at_its_ratio_and_missed_below_it() -> None:
    from rig import Row

    assert Row("copy", 9.0, "GB/s", "pinned", 0.9, goal=0.9).met is True
    assert Row("copy", 8.9, "GB/s", "pinned", 0.89, goal=0.9).met is False
    assert Row("launch", 51.0, "us", most=50.0).met is False
    assert Row("ceiling", 51.0, "GB/s").met is None
    assert "MISSED" in Row("launch", 51.0, "us", most=50.0).line()


def trace(*waits: tuple[str, int]) -> list[dict[str, Any]]:
    marks = [
        ("watched: ops", 0, 100),
        ("watched: engine_driven", 200, 100),
        ("control: a wait on purpose", 400, 50),
    ]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur} for name, ts, dur in marks
    ]
    calls = [{"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1} for name, ts in waits]
    return [*events, *calls, {"ph": "M", "name": "process_name"}]


CONTROL = ("cudaDeviceSynchronize", 410)


@pytest.mark.parametrize(
    ("events", "faults"),
    [
        (trace(CONTROL), []),
        (trace(CONTROL, ("cudaStreamSynchronize", 50), ("cudaDeviceSynchronize", 150)), []),
        (trace(CONTROL, ("cuCtxSynchronize", 50)), ["watched: ops: ['cuCtxSynchronize']"]),
        (trace(CONTROL, ("Context Sync", 250)), ["watched: engine_driven: ['Context Sync']"]),
        (trace(), ["the profiler did not see the wait that was there on purpose, so it shows nothing"]),
    ],
)
def test_a_wait_for_the_whole_device_is_found_where_it_was_made(
    tmp_path: Path, events: list[dict[str, Any]], faults: list[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    done = run(sys.executable, str(GPU / "sync_check.py"), "--trace", str(path))
    assert done.returncode == int(bool(faults)), done.stderr
    assert done.stdout.splitlines() == (faults or ["no wait for the whole device in 2 stretches of work"])


@pytest.mark.torch
def test_both_modes_bring_back_what_was_stored_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "rows.json"
    sizes = ("--mib", "4", "--layers", "4", "--blocks", "16")
    done = run(sys.executable, str(GPU / "modes.py"), "--backend", "cpu", *sizes, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [row["what"] for row in json.loads(path.read_text())]
    for mode in ("engine_driven", "lmcache_driven"):
        assert {f"store, {mode}, 8 chunks", f"load, {mode}, 8 chunks"} <= set(told)
