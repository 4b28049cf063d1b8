"""What a disk does to us: full, failing, gone, read-only, and back."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stored import (
    blocks_below,
    call,
    disk,
    is_right,
    key_of,
    load,
    memory,
    objects_below,
    payload_of,
    put_of,
    shared_fs,
    store,
    temps_below,
    the_file,
)
from helpers.tiers import Store, until
from lmcache.v1.storage.l2.adapter import AdapterError, StorageAdapter, Want

both = pytest.mark.parametrize("make", [disk, shared_fs])
Make = Callable[..., StorageAdapter]
SIZE = 1 << 20


def check_account(adapter: StorageAdapter, path: Path, objects: int) -> None:
    assert temps_below(path) == []
    if not adapter.shared:
        assert adapter.usage()[:2] == (blocks_below(path), objects)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, good: int = 0) -> None:
    """``os.name`` fails with ``code``, after ``good`` calls that do not."""
    real, left = getattr(os, name), [good]

    def act(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **more)

    monkeypatch.setattr(os, name, act)


@both
@pytest.mark.parametrize(
    ("name", "code", "fsync", "says"),
    [
        ("pwritev", errno.ENOSPC, "none", r"No space left on device \(ENOSPC\); free space"),
        ("pwritev", errno.EIO, "none", r"Input/output error \(EIO\); look for"),
        ("pwritev", errno.EDQUOT, "none", r"\(EDQUOT\)"),
        ("fdatasync", errno.EIO, "data", r"\(EIO\)"),
        ("fsync", errno.EIO, "full", r"\(EIO\)"),
        ("rename", errno.EROFS, "none", r"\(EROFS\); mount it writable"),
        ("stat", errno.EIO, "none", r"\(EIO\)"),
    ],
)
def test_a_store_that_fails_says_why_and_leaves_nothing(
    make: Make, name: str, code: int, fsync: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make(tmp_path, fsync=fsync)
    assert store(adapter, 0, SIZE)
    with monkeypatch.context() as patched:
        failing(patched, name, code)
        with pytest.raises(AdapterError, match=says) as caught:
            adapter.store([put_of(1, SIZE), put_of(2, SIZE)], call())
    assert str(caught.value).startswith(f"{'shared_fs' if adapter.shared else 'disk'} {tmp_path}: ")
    assert adapter.contains([key_of(1), key_of(2)], call()) == [False, False]
    check_account(adapter, tmp_path, 1)
    assert store(adapter, 1, SIZE)
    assert is_right(adapter, 1, SIZE)
    adapter.close()


def test_a_name_that_could_not_be_made_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = disk(tmp_path, fsync="full")
    assert store(adapter, 0, SIZE)
    shutil.rmtree(tmp_path / "disk-1" / f"{key_of(1)[-1]:02x}", ignore_errors=True)
    for good in (1, 2):  # the file, the directory of the new folder; then the folder
        with monkeypatch.context() as patched:
            failing(patched, "fsync", errno.EIO, good)
            with pytest.raises(AdapterError, match="EIO"):
                store(adapter, 1, SIZE)
        check_account(adapter, tmp_path, 1)
    adapter.close()


@both
def test_the_rest_of_a_batch_is_answered_truthfully(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error raised would say that nothing is known of the first, which is there and takes room."""
    adapter = make(tmp_path)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", errno.ENOSPC, good=2)
        assert adapter.store([put_of(i, SIZE) for i in range(4)], call()) == [True, True, False, False]
    check_account(adapter, tmp_path, 2)
    with monkeypatch.context() as patched:
        failing(patched, "preadv", errno.EIO, good=1)
        wants = [Want(key_of(i), memory(SIZE)) for i in range(3)]
        answers = adapter.load(wants, call())
        # The third is not there: to know that needs no reading.
        assert [answer is not None for answer in answers] == [True, False, False]
        with pytest.raises(AdapterError, match=r"\(EIO\)"):
            adapter.load(wants[1:2], call())
    assert is_right(adapter, 1, SIZE)
    adapter.close()


@both
def test_short_reads_and_writes_are_finished(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call may move less than it was asked to, at any byte."""
    for step in (4096, 5000, 300_001):
        adapter = make(tmp_path / str(step))
        for name in ("pwritev", "preadv"):
            real = getattr(os, name)

            def some(fd: int, parts: list[memoryview], at: int, real: Any = real, step: int = step) -> int:
                few, room = [], step
                for part in parts:
                    few.append(part[:room])
                    room -= len(few[-1])
                moved = sum(map(len, few))
                return int(real(fd, few if moved else parts, at))

            monkeypatch.setattr(os, name, some)
        assert store(adapter, 1, SIZE + 77)
        assert is_right(adapter, 1, SIZE + 77)
        monkeypatch.undo()
        assert is_right(adapter, 1, SIZE + 77)
        adapter.close()


def test_what_does_not_fit_is_refused_until_there_is_room(tmp_path: Path) -> None:
    adapter = disk(tmp_path, max_gb=3.5 * SIZE / 2**30)
    assert adapter.store([put_of(i, SIZE) for i in range(4)], call()) == [True, True, True, False]
    assert adapter.store([put_of(5, 100_000)], call()) == [True]
    assert adapter.delete([key_of(0), key_of(9)], call()) == [True, True]
    assert store(adapter, 3, SIZE)
    check_account(adapter, tmp_path, 4)
    adapter.close()


@both
def test_a_directory_that_goes_is_an_error_and_one_that_comes_back_is_used(
    make: Make, tmp_path: Path
) -> None:
    path, aside = tmp_path / "tier", tmp_path / "aside"
    adapter = make(path)
    assert store(adapter, 1, SIZE)
    path.rename(aside)
    with pytest.raises(AdapterError, match=r"No such file or directory \(ENOENT\); create or mount it"):
        store(adapter, 2, SIZE)
    with pytest.raises(AdapterError, match="ENOENT"):  # what a tier asks to see whether all is well again
        adapter.contains([key_of(1)], call())
    with pytest.raises(AdapterError, match="ENOENT"):
        load(adapter, 1, SIZE)
    with pytest.raises(AdapterError, match="ENOENT"):
        adapter.delete([key_of(1)], call())
    assert not path.exists()
    aside.rename(path)
    assert is_right(adapter, 1, SIZE)
    check_account(adapter, path, 1)
    shutil.rmtree(path)
    path.mkdir()
    assert load(adapter, 1, SIZE) is None
    check_account(adapter, path, 0)
    assert store(adapter, 1, SIZE)
    shutil.rmtree(next(path.iterdir()))
    assert store(adapter, 2, SIZE)
    check_account(adapter, path, 1)
    adapter.close()


def test_a_disk_that_is_mounted_after_the_start_is_found_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    for folder, name in ((tmp_path / "volume", "old"), (path, "new")):
        tiers = Store(disk(folder))
        tiers.put(name)
        assert tiers.flush(10.0)
        if folder != path:
            tiers.close(5.0)
    path.rename(tmp_path / "aside")
    (tmp_path / "volume").rename(path)
    tiers.forget()
    assert tiers.fetch("new") == 0
    assert tiers.fetch("old") == 1
    (row,) = tiers.status()
    assert (row["objects"], row["used_bytes"]) == (1, blocks_below(path))
    tiers.close(5.0)


def test_a_directory_that_another_server_has_taken_meanwhile_is_not_ours(tmp_path: Path) -> None:
    ours = disk(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    theirs = disk(tmp_path / "a")
    with pytest.raises(AdapterError, match="in use by process"):
        store(ours, 1, SIZE)
    assert store(theirs, 1, SIZE)
    theirs.close()
    assert is_right(ours, 1, SIZE)
    check_account(ours, tmp_path / "a", 1)
    ours.close()
    with pytest.raises(AdapterError, match="closed"):
        store(ours, 2, SIZE)


def test_a_file_that_somebody_removed_is_a_miss_and_its_room_is_free(tmp_path: Path) -> None:
    adapter = disk(tmp_path)
    assert store(adapter, 1, SIZE)
    the_file(tmp_path, 1).unlink()
    assert load(adapter, 1, SIZE) is None
    assert adapter.contains([key_of(1)], call()) == [False]
    check_account(adapter, tmp_path, 0)
    adapter.close()


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, timeout=30).returncode == 0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    at = tmp_path / "small"
    at.mkdir()
    if os.geteuid() or not _mount("-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(at)):
        pytest.skip(
            "needs the right to mount a file system; the faults themselves are simulated in other tests"
        )
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True, timeout=30)


@both
def test_a_disk_that_is_really_full(make: Make, mounted: Path) -> None:
    more = {} if make is shared_fs else {"max_gb": 8 / 1024}
    adapter = make(mounted, **more)
    (mounted / "others").write_bytes(bytes(4 << 20))
    answers = adapter.store([put_of(i, SIZE) for i in range(6)], call())
    assert answers == [True, True, True, False, False, False]
    with pytest.raises(AdapterError, match="ENOSPC"):
        adapter.store([put_of(7, SIZE)], call())
    check_account(adapter, mounted, 3)
    assert all(is_right(adapter, i, SIZE) for i in range(3))
    assert adapter.delete([key_of(0)], call()) == [True]
    assert store(adapter, 7, SIZE)
    check_account(adapter, mounted, 3)
    adapter.close()


def test_a_shared_directory_on_a_full_disk_is_brought_below_its_limit_all_the_same(mounted: Path) -> None:
    adapter = shared_fs(mounted)
    assert adapter.store([put_of(n, SIZE) for n in range(3)], call()) == [True] * 3
    with (mounted / "others").open("wb", 0) as others:
        free = os.statvfs(mounted).f_bfree
        assert others.write(bytes(free * 4096)) == free * 4096
    assert os.statvfs(mounted).f_bfree == 0
    adapter.close()
    limited = shared_fs(mounted, max_gb=2 * (SIZE + 4096) / 2**30, check_seconds=0.05)
    assert until(lambda: limited.usage().objects == 1)
    assert len(objects_below(mounted)) == 1
    limited.close()


@both
def test_read_only_and_writable_again(make: Make, mounted: Path) -> None:
    more = {} if make is shared_fs else {"max_gb": 8 / 1024}
    adapter = make(mounted, **more)
    assert store(adapter, 1, SIZE)
    assert _mount("-o", "remount,ro", str(mounted))
    with pytest.raises(AdapterError, match=r"Read-only file system \(EROFS\)"):
        store(adapter, 2, SIZE)
    with pytest.raises(AdapterError, match="EROFS"):
        adapter.delete([key_of(1)], call())
    assert is_right(adapter, 1, SIZE)
    check_account(adapter, mounted, 1)
    assert _mount("-o", "remount,rw", str(mounted))
    assert store(adapter, 2, SIZE)
    check_account(adapter, mounted, 2)
    adapter.close()


@both
def test_unmounted_is_an_error_that_writes_nowhere_and_mounted_again_is_used(
    make: Make, mounted: Path, tmp_path: Path
) -> None:
    at = tmp_path / "at"
    at.mkdir()
    assert _mount("--bind", str(mounted), str(at))
    try:
        more = {} if make is shared_fs else {"max_gb": 8 / 1024}
        adapter = make(at, **more)
        assert store(adapter, 1, SIZE)
        subprocess.run(["umount", "-l", str(at)], check=True, timeout=30)
        with pytest.raises(AdapterError, match="not the file system that was there at start"):
            store(adapter, 2, SIZE)
        with pytest.raises(AdapterError, match="not the file system"):
            load(adapter, 1, SIZE)
        assert list(at.iterdir()) == []
        assert _mount("--bind", str(mounted), str(at))
        assert load(adapter, 1, SIZE) == bytes(payload_of(1, SIZE))
        assert store(adapter, 2, SIZE)
        check_account(adapter, mounted, 2)
        adapter.close()
    finally:
        subprocess.run(["umount", "-l", str(at)], timeout=30, check=False)
