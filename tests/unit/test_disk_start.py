"""Taking a directory: what is ours is read, what was left half is removed, what is somebody else's is left alone."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import stored
from helpers.stored import (
    call,
    disk,
    is_right,
    key_of,
    load,
    objects_below,
    shared_fs,
    store,
    temps_below,
    the_file,
)
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2 import file_root

both = pytest.mark.parametrize("make", [disk, shared_fs])


def test_a_restart_finds_all_with_sizes_and_times_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = disk(tmp_path)
    for number in range(40):
        assert store(first, number, 1000 + number)
    os.utime(the_file(tmp_path, 7), (time.time() + 50, time.time()))
    os.utime(the_file(tmp_path, 8), (time.time() - 5000, time.time() - 9000))
    usage, held = first.usage(), {h.key: h.size for h in first.scan()}
    first.close()
    second = disk(tmp_path)
    assert second.usage() == usage
    found = list(second.scan())
    assert {h.key: h.size for h in found} == held
    by_use = [h.key for h in sorted(found, key=lambda h: h.used)]
    assert (by_use[0], by_use[-1]) == (key_of(8), key_of(7))
    written_down: list[tuple[int, int]] = []
    os.utime(the_file(tmp_path, 8), (time.time() - 5000, time.time() - 9000))  # a scan may be dated as a use
    monkeypatch.setattr(os, "utime", lambda fd, ns: written_down.append(ns))
    assert is_right(second, 8, 1008)
    monkeypatch.undo()
    [(used, modified)] = written_down
    assert abs(used / 1e9 - time.time()) < 100
    assert modified == the_file(tmp_path, 8).stat().st_mtime_ns
    second.close()


def test_what_is_damaged_or_unfinished_is_removed_at_start(tmp_path: Path) -> None:
    first = disk(tmp_path)
    for number in range(8):
        assert store(first, number, 20_000)
    first.close()
    os.truncate(the_file(tmp_path, 0), 0)
    os.truncate(the_file(tmp_path, 1), 10_000)
    the_file(tmp_path, 2).write_bytes(bytes(24_096))  # as after a power failure
    shutil.copyfile(the_file(tmp_path, 4), the_file(tmp_path, 3))
    with the_file(tmp_path, 5).open("r+b") as f:
        f.seek(30)
        f.write(b"\xff\xff")
    with the_file(tmp_path, 6).open("ab") as f:
        f.write(b"x")
    (tmp_path / "disk-1/tmp/123-abc.tmp").write_bytes(b"half")
    second = disk(tmp_path)
    assert sorted(h.key for h in second.scan()) == sorted([key_of(4), key_of(7)])
    assert second.usage()[:2] == (stored.blocks_below(tmp_path), 2)
    assert len(objects_below(tmp_path)) == 2
    assert temps_below(tmp_path) == []
    assert is_right(second, 4, 20_000)
    second.close()


@both
def test_foreign_and_hostile_names_are_neither_followed_nor_removed(make: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    path = tmp_path / "tier"
    adapter = make(path)
    assert store(adapter, 1, 9000)
    adapter.close()
    base = path / ("disk-1" if make is disk else "shared_fs-1")
    shutil.copytree(base, outside)
    elsewhere = disk(tmp_path / "elsewhere")
    assert store(elsewhere, 5, 9000)
    elsewhere.close()
    theirs = the_file(tmp_path / "elsewhere", 5)
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    linked, piped, folder, in_link = (key_of(n) for n in (2, 3, 4, 5))
    names = {key: base / f"{key[-1]:02x}" / f"{key.hex()}.kv" for key in (linked, piped, folder, in_link)}
    for key in (linked, piped, folder):
        names[key].parent.mkdir(exist_ok=True)
    names[linked].symlink_to(the_file(outside, 1))
    os.mkfifo(names[piped])
    names[folder].mkdir()
    names[in_link].parent.symlink_to(theirs.parent)
    hostile = [
        base / "readme",
        base / "zz",
        names[linked].parent / "..kv",
        names[linked].parent / "a\nb",
        names[linked].parent / f"{'0' * 128}.kv",  # not of this folder
        names[linked].parent / f"{linked.hex()}.kv.gz",
        base / "tmp" / "mine.txt",
        base / "tmp" / "1-2.tmp.d",
    ]
    for file in hostile:
        file.write_bytes(b"theirs")
    (base / "tmp" / "1-ab.tmp").symlink_to(the_file(outside, 1))

    adapter = make(path)
    for number in (2, 3, 4, 5):
        assert load(adapter, number, 9000) is None
        assert adapter.contains([key_of(number)], call()) == [False]
    assert adapter.headers([linked, piped, folder, in_link], call()) == [None] * 4
    assert is_right(adapter, 1, 9000)
    assert adapter.delete([linked, in_link], call()) == [True, True]  # at most the link
    assert adapter.clear(call()) == 1
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before
    assert theirs.exists()
    assert all(file.read_bytes() == b"theirs" for file in hostile)
    assert (base / "tmp" / "1-ab.tmp").is_symlink()
    adapter.close()


@both
def test_files_and_directories_are_for_their_owner_only(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    adapter = make(path, fsync="full")
    old = os.umask(0)
    try:
        assert store(adapter, 1, 300_000)
    finally:
        os.umask(old)
    for at, folders, names in os.walk(path):
        assert all(stat.S_IMODE(Path(at, f).lstat().st_mode) == 0o700 for f in folders)
        assert all(stat.S_IMODE(Path(at, f).lstat().st_mode) == 0o600 for f in names)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    adapter.close()


def _fork_and_wait(path: Path, said: Any) -> None:
    adapter = disk(path)
    forked, tell = os.pipe()
    child = os.fork()
    if child:
        os.read(forked, 1)  # it runs: what the fork did to the lock is done
        said.send(child)
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(tell, b".")
    signal.alarm(60)
    signal.pause()
    adapter.close()


def _from_a_process(act: Callable[[Path, Any], None], path: Path) -> tuple[Any, multiprocessing.Process]:
    """What ``act`` said first, in a process of its own, and the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.stored", "lmcache.v1.storage.l2.disk"])
    hears, said = context.Pipe()
    process: Any = context.Process(target=act, args=(path, said), daemon=True)
    process.start()
    assert hears.poll(60)
    return hears.recv(), process


def test_a_child_that_outlives_the_server_does_not_keep_its_directory(tmp_path: Path) -> None:
    child, process = _from_a_process(_fork_and_wait, tmp_path)
    try:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        disk(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def _fork_and_close(path: Path, said: Any) -> None:
    adapter = disk(path)
    child = os.fork()
    if not child:
        adapter.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    try:
        disk(path).close()
        said.send("the lock went with the child")
    except StartupError as exc:
        said.send(str(exc))
    adapter.close()


def test_a_forked_child_takes_no_lock_from_its_parent(tmp_path: Path) -> None:
    said, process = _from_a_process(_fork_and_close, tmp_path)
    assert "in use by process" in said
    process.join(60)


def _hold(path: Path, ready: Any, end: Any) -> None:
    adapter = disk(path)
    ready.send(os.getpid())
    end.poll(60)
    adapter.close()


def test_two_servers_never_own_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.stored", "lmcache.v1.storage.l2.disk"])
    ready, theirs = context.Pipe()
    end, their_end = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path, theirs, their_end), daemon=True)
    process.start()
    try:
        assert ready.poll(60)
        pid = ready.recv()
        with pytest.raises(StartupError, match=rf"in use by process {pid} on .*; give every server"):
            disk(tmp_path)
    finally:
        process.kill()
        process.join(60)
    adapter = disk(tmp_path)  # a lock goes with its process
    with pytest.raises(StartupError, match=f"in use by process {os.getpid()} on"):
        disk(tmp_path)
    adapter.close()
    disk(tmp_path).close()
    for pipe in (ready, theirs, end, their_end):
        pipe.close()


def test_who_closes_is_not_the_owner_any_more_whatever_was_forked_meanwhile(tmp_path: Path) -> None:
    first = disk(tmp_path)
    end, until = os.pipe()
    child = os.fork()
    if not child:
        os.close(until)
        os.read(end, 1)
        os._exit(0)
    try:
        first.close()
        disk(tmp_path).close()
    finally:
        os.close(until)
        os.waitpid(child, 0)
        os.close(end)


def test_a_full_disk_keeps_no_server_from_what_it_has_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    first = disk(tmp_path)
    assert store(first, 1, 5000)
    first.close()
    monkeypatch.setattr(os, "write", full)
    second = disk(tmp_path)
    assert is_right(second, 1, 5000)
    with pytest.raises(StartupError, match="in use by another process"):
        disk(tmp_path)
    second.close()


def test_a_fifo_in_the_place_of_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "disk-1").mkdir()
    os.mkfifo(tmp_path / "disk-1/lock")
    taken = threading.Thread(target=lambda: disk(tmp_path).close(), daemon=True)
    taken.start()
    taken.join(10)
    hung = taken.is_alive()
    os.close(os.open(tmp_path / "disk-1/lock", os.O_RDWR))  # lets go of who hangs
    assert not hung


def test_a_shared_directory_is_shared_and_never_mixed_with_an_owned_one(tmp_path: Path) -> None:
    one, two, own = shared_fs(tmp_path), shared_fs(tmp_path), disk(tmp_path)
    assert store(one, 1, 300_000)
    assert two.contains([key_of(1), key_of(2)], call()) == [True, False]
    assert is_right(two, 1, 300_000)
    assert own.contains([key_of(1)], call()) == [False]
    assert two.delete([key_of(1)], call()) == [True]
    assert load(one, 1, 300_000) is None
    assert store(two, 1, 300_000)
    assert store(one, 1, 300_000)
    assert own.clear(call()) == 0
    assert two.clear(call()) == 1
    assert one.contains([key_of(1)], call()) == [False]
    assert one.usage() == (-1, -1, 0)


def test_a_shared_directory_is_swept_of_old_unfinished_files_only(tmp_path: Path) -> None:
    shared_fs(tmp_path)
    tmp = tmp_path / "shared_fs-1" / "tmp"
    for name, age in (("1-aa.tmp", 3700), ("2-bb.tmp", 3000), ("mine.txt", 9000)):
        (tmp / name).write_bytes(b"half")
        os.utime(tmp / name, (time.time() - age,) * 2)
    adapter = shared_fs(tmp_path)
    assert sorted(f.name for f in tmp.iterdir()) == ["2-bb.tmp", "mine.txt"]
    again = shared_fs(tmp_path, sweep_hours=0.5)
    assert [f.name for f in tmp.iterdir()] == ["mine.txt"]
    (tmp / "3-cc.tmp").write_bytes(b"half")
    os.utime(tmp / "3-cc.tmp", (time.time() - 9000,) * 2)
    again._next_sweep = 0  # type: ignore[attr-defined]
    assert store(again, 1, 10)
    assert [f.name for f in tmp.iterdir()] == ["mine.txt"]
    adapter.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "max_gb, path: missing|path, max_gb: missing"),
        ({"path": "/x"}, "max_gb: missing"),
        ({"path": "/x", "max_gb": 0}, "max_gb=0: expected a number > 0"),
        ({"path": "/x", "max_gb": 1, "fsync": "yes"}, "fsync='yes': expected one of none, data, full"),
        ({"path": "/x", "max_gb": 1, "thread": 2}, "did you mean threads"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    from lmcache.v1.storage.l2.registry import build

    with pytest.raises(ConfigError, match=says):
        build({"type": "disk", **options})


def test_more_than_the_file_system_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_gb=1e[+]09: expected at most the size of the file system of .* GiB"
    ):
        disk(tmp_path, max_gb=1e9)
    disk(tmp_path).close()


@both
def test_a_path_that_is_a_file_is_refused_in_one_line(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match=r"file.*: (File exists|Not a directory) \(E\w+\)"):
        make(tmp_path / "file")


@both
def test_o_direct_that_is_asked_for_and_not_there_is_refused(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_root, "_has_direct", lambda base: False)
    with pytest.raises(StartupError, match="direct=on, but the file system has no O_DIRECT"):
        make(tmp_path, direct="on")
    adapter = make(tmp_path, direct="auto")
    assert store(adapter, 1, 1 << 20)
    assert is_right(adapter, 1, 1 << 20)
    adapter.close()
