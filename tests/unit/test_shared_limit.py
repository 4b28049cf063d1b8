"""The limit of a shared directory: what goes, what never does, who looks, and whose clock counts."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.stored import (
    call,
    is_right,
    key_of,
    load,
    memory,
    objects_below,
    payload_of,
    shared_fs,
    store,
    the_file,
)
from helpers.tiers import until
from lmcache.errors import ConfigError
from lmcache.v1.storage.l2 import files, shared_limit
from lmcache.v1.storage.l2.adapter import AdapterError, StorageAdapter, Want
from lmcache.v1.storage.l2.file_root import Root
from lmcache.v1.storage.l2.shared_limit import SharedLimit

KIB = 1 << 10
SIZE = 96 * KIB
ON_DISK = 100 * KIB
"""With the page of its header."""
HOUR = 3600.0


class Server:
    """One server's part, which looks when it is told to."""

    def __init__(self, path: Path, limit: int = 10 * ON_DISK, seconds: float = 60.0) -> None:
        self.root = Root(str(path), "shared_fs")
        self.limit = SharedLimit(self.root, limit, seconds, lambda now: None)

    def look(self) -> bool:
        with self.root.open() as base:
            return self.limit.look(base)

    @property
    def sweep(self) -> Path:
        return Path(self.root.base, "sweep")

    def age(self, seconds: float) -> None:
        """Somebody worked at it so long ago."""
        os.utime(self.sweep, (time.time() - seconds,) * 2)


@contextmanager
def filled(path: Path, objects: int, hours: float = 1.0) -> Iterator[StorageAdapter]:
    """A directory of objects, 0 used longest ago."""
    adapter = shared_fs(path)
    for number in range(objects):
        assert store(adapter, number, SIZE)
        used(path, number, (objects - number) * hours)
    try:
        yield adapter
    finally:
        adapter.close()


def used(path: Path, number: int, hours_ago: float) -> None:
    os.utime(the_file(path, number), (time.time(), time.time() - hours_ago * HOUR))


def there(adapter: StorageAdapter, objects: int) -> list[int]:
    found = adapter.contains([key_of(n) for n in range(objects)], call())
    return [n for n in range(objects) if found[n]]


def test_what_a_look_leaves_is_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        server = Server(tmp_path)
        assert server.look()
    finally:
        os.umask(before)
    assert stat.S_IMODE(server.sweep.stat().st_mode) == 0o600


# ---- what goes


def test_at_the_limit_nothing_goes(tmp_path: Path) -> None:
    with filled(tmp_path, 10) as adapter:
        server = Server(tmp_path)
        assert server.look()
        assert there(adapter, 10) == list(range(10))
        assert server.limit.found == (10 * ON_DISK, 10, 0)


def test_above_it_what_was_used_longest_ago_goes_down_to_nine_tenths(tmp_path: Path) -> None:
    with filled(tmp_path, 14) as adapter:
        used(tmp_path, 0, 0.1)
        server = Server(tmp_path)
        assert server.look()
        assert there(adapter, 14) == [0, *range(6, 14)]
        assert server.limit.found == (9 * ON_DISK, 9, 0)
        assert all(is_right(adapter, n, SIZE) for n in there(adapter, 14))


def test_of_one_second_goes_only_what_must(tmp_path: Path) -> None:
    with filled(tmp_path, 12, hours=0.0) as adapter:
        moment = time.time() // 1 - 5
        for number in range(12):
            os.utime(the_file(tmp_path, number), (moment, moment + number / 20))
        assert Server(tmp_path).look()
        assert len(there(adapter, 12)) == 9


@pytest.mark.parametrize(("apart", "ago"), [(1, 30.0), (60, 30 * HOUR)])
def test_a_second_apart_counts_in_the_last_hour_and_a_minute_before(
    apart: int, ago: float, tmp_path: Path
) -> None:
    with filled(tmp_path, 12, hours=0.0) as adapter:
        for number in range(12):
            moment = time.time() - ago + number * apart
            os.utime(the_file(tmp_path, number), (moment, moment))
        assert Server(tmp_path).look()
        assert there(adapter, 12) == list(range(3, 12))


def test_a_load_or_a_store_is_a_use_and_a_question_is_none(tmp_path: Path) -> None:
    with filled(tmp_path, 14) as adapter:
        assert is_right(adapter, 0, SIZE)
        assert store(adapter, 1, SIZE)
        assert there(adapter, 14) == list(range(14))
        assert Server(tmp_path).look()
        assert there(adapter, 14) == [0, 1, *range(7, 14)]


def test_the_time_of_use_is_the_file_server_s_whatever_our_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 30 * HOUR)
    with filled(tmp_path, 1) as adapter:
        assert is_right(adapter, 0, SIZE)
        renewed = the_file(tmp_path, 0).stat()
        assert abs(renewed.st_mtime - now) < 60
        assert is_right(adapter, 0, SIZE)
        assert the_file(tmp_path, 0).stat().st_mtime_ns == renewed.st_mtime_ns, "once in ten minutes"
        used(tmp_path, 0, -50)  # the file server's clock was set back
        assert is_right(adapter, 0, SIZE)
        assert abs(the_file(tmp_path, 0).stat().st_mtime - now) < 60


def test_what_is_not_ours_and_what_is_being_written_stays(tmp_path: Path) -> None:
    with filled(tmp_path, 3) as adapter:
        base = tmp_path / "shared_fs-1"
        folder = base / files.folder_name(key_of(0))
        outside = tmp_path / "outside.kv"
        outside.write_bytes(bytes(ON_DISK))
        link = folder / f"{'ab' * 63}{folder.name}.kv"
        link.symlink_to(outside)
        strangers = [
            base / "mine.kv",
            folder / "mine.kv",
            folder / f"{'00' * 64}.kv.bak",
            folder / f"{'00' * 63}{(int(folder.name, 16) + 1) % 256:02x}.kv",  # of another folder
            base / "tmp" / "12-ab.tmp",
            tmp_path / f"{'00' * 64}.kv",
        ]
        for file in strangers:
            file.write_bytes(bytes(ON_DISK))
            os.utime(file, (0, 0))
        (folder / f"{'cd' * 63}{folder.name}.kv").mkdir()
        (base / "fe").symlink_to(tmp_path)
        assert Server(tmp_path, limit=1).look()
        assert there(adapter, 3) == []
        assert all(file.read_bytes() == bytes(ON_DISK) for file in [*strangers, outside])
        assert link.is_symlink()
        assert (folder / f"{'cd' * 63}{folder.name}.kv").is_dir()


def test_unfinished_files_count(tmp_path: Path) -> None:
    with filled(tmp_path, 10) as adapter:
        (tmp_path / "shared_fs-1/tmp/12-ab.tmp").write_bytes(bytes(2 * ON_DISK))
        assert Server(tmp_path).look()
        assert there(adapter, 10) == [3, 4, 5, 6, 7, 8, 9]


def test_what_was_used_or_made_anew_since_it_was_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, 14) as adapter:
        oldest = shared_limit._oldest

        def meanwhile(*arguments: Any) -> tuple[int, int]:
            assert is_right(adapter, 0, SIZE)
            the_file(tmp_path, 1).unlink()
            assert store(adapter, 1, SIZE)
            the_file(tmp_path, 2).unlink()
            return oldest(*arguments)

        monkeypatch.setattr(shared_limit, "_oldest", meanwhile)
        assert Server(tmp_path).look()
        assert there(adapter, 14) == [0, 1, *range(5, 14)]

        again = shared_limit._remove
        file = shared_limit._File(the_file(tmp_path, 13).name, the_file(tmp_path, 13).stat())
        used(tmp_path, 13, 0.5)
        folder = os.open(the_file(tmp_path, 13).parent, os.O_RDONLY)
        assert not again(folder, file), "between a look at the folder and the removal, too"
        os.close(folder)
        assert 13 in there(adapter, 14)


def test_a_reader_of_what_is_removed_has_all_of_it_or_a_miss(tmp_path: Path) -> None:
    with filled(tmp_path, 2) as adapter:
        into = memory(SIZE)
        with (
            Root(str(tmp_path), "shared_fs").open() as base,
            files.opened_object(base, key_of(0)) as (fd, info),
        ):
            assert Server(tmp_path, limit=1).look()
            assert objects_below(tmp_path) == []
            assert files.load_object(fd, Want(key_of(0), into), False, info) is not None
        assert bytes(into) == bytes(payload_of(0, SIZE))
        assert load(adapter, 0, SIZE) is None


def test_a_store_of_what_is_removed_at_that_moment_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, 1) as adapter:
        present = files.present

        def then_gone(base: int, key: bytes) -> Any:
            found = present(base, key)
            files.remove(base, key)
            return found

        monkeypatch.setattr(files, "present", then_gone)
        assert store(adapter, 0, SIZE)
        assert is_right(adapter, 0, SIZE)


# ---- who looks


def test_one_server_at_a_time_looks_and_each_knows_what_was_found(tmp_path: Path) -> None:
    with filled(tmp_path, 12) as adapter:
        first, second = Server(tmp_path), Server(tmp_path)
        assert first.look()
        assert not second.look(), "somebody just did"
        assert second.limit.found == first.limit.found == (9 * ON_DISK, 9, 0)
        for number in range(5):
            store(adapter, number, SIZE)
        first.age(61)
        assert second.look()
        assert len(there(adapter, 12)) == 9
        assert not first.look()


def test_while_one_looks_others_do_not_unless_its_host_died_with_the_lock(tmp_path: Path) -> None:
    with filled(tmp_path, 12) as adapter:
        server = Server(tmp_path)
        server.sweep.touch()
        with server.sweep.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert not server.look()
            server.age(110)
            assert not server.look()
            assert there(adapter, 12) == list(range(12))
            server.age(121)
            assert server.look()
            assert len(there(adapter, 12)) == 9
        server.age(61)
        assert server.look(), "our own lock is free again"


def test_who_works_renews_the_time_that_its_lock_is_respected_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, seconds=0.2)
    files_of, ages = shared_limit._files_of, list[float]()

    def slowly(base: int, folder: str) -> Any:
        ages.append(time.time() - server.sweep.stat().st_mtime)
        if len(ages) == 1:
            server.age(1000)
            time.sleep(0.06)
        return files_of(base, folder)

    monkeypatch.setattr(shared_limit, "_files_of", slowly)
    assert server.look()
    assert max(ages) < 500


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, childs = Server(tmp_path), list[int]()
    monkeypatch.setattr(SharedLimit, "_work", lambda self, base, now, fd: childs.append(os.dup(fd)))
    assert server.look()
    assert server.look()
    assert len(childs) == 2
    for fd in childs:
        os.close(fd)


def test_what_another_did_before_we_had_the_lock_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Server(tmp_path), Server(tmp_path)
    locked = shared_limit._locked

    def after_another(fd: int, respected: bool) -> bool:
        monkeypatch.undo()
        assert second.look()
        return locked(fd, respected)

    monkeypatch.setattr(shared_limit, "_locked", after_another)
    assert not first.look()


def test_a_look_is_no_more_frequent_than_its_length_allows(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.sweep.write_text("5 1 30\n")  # half a minute
    server.age(290)
    assert not server.look()
    server.age(301)
    assert server.look()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_the_time_of_the_last_look_is_enough(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, what: int) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with filled(tmp_path, 12) as adapter:
        assert Server(tmp_path).look()
        assert len(there(adapter, 12)) == 9
        assert not Server(tmp_path).look()


@pytest.mark.parametrize("text", [b"", b"garbage", b"1 2\n", b"\xff" * 5000, b"9" * 30 + b" 1 1\n"])
def test_a_damaged_note_of_the_last_look_is_made_anew(text: bytes, tmp_path: Path) -> None:
    with filled(tmp_path, 12) as adapter:
        server = Server(tmp_path)
        server.sweep.write_bytes(text)
        assert server.look()
        assert len(there(adapter, 12)) == 9
        assert server.sweep.read_text() == f"{9 * ON_DISK} 9 0\n"


def test_a_clock_that_was_set_back_stops_no_look(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.look()
    server.age(-1000)
    assert server.look()


def test_two_that_look_at_once_remove_no_more_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=20)
    oldest = shared_limit._oldest

    def meet(*arguments: Any) -> tuple[int, int]:
        both.wait()
        return oldest(*arguments)

    monkeypatch.setattr(shared_limit, "_oldest", meet)
    monkeypatch.setattr(shared_limit, "_locked", lambda fd, respected: True)
    monkeypatch.setattr(SharedLimit, "_last", lambda self, fd, now: (0.0, 0.0))
    with filled(tmp_path, 20) as adapter:
        threads = [threading.Thread(target=Server(tmp_path).look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert there(adapter, 20) == list(range(11, 20))


# ---- as a server has it


def test_an_adapter_keeps_its_directory_below_the_limit_and_says_what_there_is(tmp_path: Path) -> None:
    adapter = shared_fs(tmp_path, max_gb=10 * ON_DISK / 2**30, check_seconds=0.05)
    try:
        for number in range(40):
            assert store(adapter, number, SIZE)
        assert until(
            lambda: 0 < adapter.usage().used_bytes <= 10 * ON_DISK and len(objects_below(tmp_path)) <= 10
        )
        assert adapter.usage().capacity_bytes == 10 * ON_DISK
        assert until(lambda: adapter.usage().objects == len(objects_below(tmp_path)))
    finally:
        adapter.close()
    assert not [t for t in threading.enumerate() if t.name == "lmcache-shared-fs-limit"]


def test_without_a_limit_nothing_goes_and_nobody_looks(tmp_path: Path) -> None:
    with filled(tmp_path, 1) as adapter:
        assert adapter.usage() == (-1, -1, 0)
        assert not [t for t in threading.enumerate() if t.name == "lmcache-shared-fs-limit"]
    assert not (tmp_path / "shared_fs-1/sweep").exists()


def test_a_directory_that_cannot_be_read_is_told_once_and_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []

    def fails(base: int) -> float:
        looks.append(base)
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(shared_limit, "clock_of", fails)
    adapter = shared_fs(tmp_path, max_gb=10 * ON_DISK / 2**30, check_seconds=0.01)
    try:
        assert until(lambda: len(looks) > 3)
        monkeypatch.undo()
        assert until(lambda: adapter.usage().objects == 0)
    finally:
        adapter.close()
    (told,) = [record.message for record in caplog.records if "max_gb" in record.message]
    assert "Input/output error (EIO)" in told


def test_a_full_disk_does_not_keep_anybody_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with filled(tmp_path, 12) as adapter:
        monkeypatch.setattr(os, "write", full)
        assert Server(tmp_path).look()
        monkeypatch.undo()
        assert len(there(adapter, 12)) == 9


def test_something_else_in_the_place_of_the_note_is_an_error_of_that_look(tmp_path: Path) -> None:
    server = Server(tmp_path)
    os.mkfifo(server.sweep)
    with pytest.raises(AdapterError, match="sweep is no file; move it away"):
        server.look()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_gb": 0}, "max_gb=0: expected"),
        ({"max_gb": "x"}, "max_gb='x': expected"),
        ({"max_gb": float("inf")}, "max_gb=inf: expected a finite number"),
        ({"max_gb": 1e9}, "max_gb=1e+09: expected at most the size of the file system of"),
        ({"max_gb": 1, "check_seconds": 0}, "check_seconds=0: expected"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        shared_fs(tmp_path, **options)
    assert says in str(told.value)
    assert str(told.value).startswith("--l2-adapter shared_fs: ")
    assert len(str(told.value).splitlines()) == 1
