"""What the shared-memory pool promises: memory that is really there, and nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.errors import StartupError
from lmcache.v1.storage import shm_pool
from lmcache.v1.storage.shm_pool import (
    PAGE,
    PoolView,
    ShmPool,
    available_memory,
    new_generation,
    sweep_stale_segments,
    table_bytes,
)

SIZE = 64 * PAGE
NAME = "pool"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for segments, on the usual file system: any server that starts sweeps the usual folder."""
    path = Path(tempfile.mkdtemp(prefix="lmcache_test_", dir="/dev/shm"))
    monkeypatch.setattr(shm_pool, "_SHM_DIR", path)
    yield path
    assert list(path.iterdir()) == [], "left behind"
    path.rmdir()


@pytest.fixture
def segment(folder: Path) -> Path:
    """The file of a pool named NAME."""
    return folder / f"lmcache-l1-{NAME}"


@pytest.fixture(params=["memfd", "named"])
def pool(request: pytest.FixtureRequest, folder: Path) -> Iterator[ShmPool]:
    made = ShmPool(SIZE, NAME if request.param == "named" else None)
    yield made
    made.close()


# --------------------------------------------------------------------------------------------------- geometry


@given(st.integers(1, 1 << 22))
def test_the_table_has_a_word_for_every_page_and_ends_on_a_page(pages: int) -> None:
    table = table_bytes(pages * PAGE)
    assert table % PAGE == 0
    assert pages * 8 <= table < pages * 8 + PAGE


def test_the_data_begin_after_the_table_and_nothing_overlaps(pool: ShmPool) -> None:
    view = pool.view
    assert len(view.data) == SIZE
    assert len(view.generations) == SIZE // PAGE
    view.data[:] = b"\xff" * SIZE
    assert not any(view.generations)
    view.generations[-1] = view.generations[0] = 2**64 - 1
    assert bytes(view.data) == b"\xff" * SIZE
    assert view.generation(SIZE - 1) == view.generation(0) == 2**64 - 1
    assert view.generation(PAGE) == 0


def test_the_address_is_that_of_the_first_data_byte(pool: ShmPool) -> None:
    ctypes.memmove(pool.view.address + 5, b"here", 4)
    assert bytes(pool.view.data[:10]) == bytes(5) + b"here" + bytes(1)


def test_what_one_mapping_writes_another_reads(pool: ShmPool) -> None:
    other = PoolView(pool.fd, SIZE)
    other.data[7] = 42
    other.generations[3] = 99
    assert (pool.view.data[7], pool.view.generation(3 * PAGE + 1)) == (42, 99)
    other.prefault(threading.Event())
    assert other.data[7] == 42


def test_a_size_is_rounded_down_to_whole_pages() -> None:
    pool = ShmPool(SIZE + PAGE - 1)
    assert pool.view.data_bytes == SIZE
    pool.close()


def test_a_generation_is_never_the_word_of_free_memory() -> None:
    words = {new_generation() for _ in range(1000)}
    assert len(words) == 1000
    assert all(0 < word < 2**63 for word in words)


# ------------------------------------------------------------------------------------------------ reservation


def test_every_page_is_reserved_before_the_pool_is_used(pool: ShmPool) -> None:
    stat = os.fstat(pool.fd)
    assert stat.st_size == pool.total_bytes == SIZE + table_bytes(SIZE)
    assert stat.st_blocks * 512 >= pool.total_bytes


def test_a_pool_larger_than_memory_is_refused_with_what_is_needed_and_available() -> None:
    for chosen in (None, NAME):
        with pytest.raises(StartupError, match=r"needed, .* available in .*--l1-size-gb") as refusal:
            ShmPool(1 << 50, chosen)
        assert "1050624.00 GiB needed" in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_named_pool_must_fit_the_file_system_of_segments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(folder)
    small = os.statvfs_result((*real[:4], 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(StartupError, match=f"available in {folder}"):
        ShmPool(1 << 20, NAME)
    ShmPool(1 << 20).close()  # an anonymous one does not count against it


def test_memory_that_runs_out_while_reserving_is_an_error_and_not_a_crash_later(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_pool, "_RESERVE_STEP", 16 * PAGE)
    reserve = os.posix_fallocate

    def run_out(fd: int, at: int, size: int) -> None:
        if at >= 32 * PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    before = len(os.listdir("/proc/self/fd"))
    for chosen in (None, NAME):
        with pytest.raises(StartupError, match=r"failed after 0.00 GiB \(No space left on device\)"):
            ShmPool(SIZE, chosen)
    assert not segment.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_signal_ends_a_long_reservation() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StartupError, match="signal"):
        ShmPool(SIZE, NAME, stop)


MEMINFO = "MemTotal:       9000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n"
V2 = {
    "memory.max": "600000",
    "memory.current": "500000",
    "memory.stat": "anon 1\nactive_file 1000\ninactive_file 2000\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "600000",
    "memory/memory.usage_in_bytes": "500000",
    "memory/memory.stat": "active_file 1\ntotal_active_file 1000\ntotal_inactive_file 2000\n",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 1000 * 1024),
        (V2, 103000),
        (V1, 103000),
        (V2 | {"memory.max": "max"}, 1000 * 1024),
        (V2 | {"memory.max": "400000"}, 0),
        (V2 | {"memory.max": str(1 << 40)}, 1000 * 1024),
        ({"memory.max": "600000"}, 1000 * 1024),
    ],
    ids=["no cgroup", "v2", "v1", "no limit", "over the limit", "limit above the system's", "unreadable"],
)
def test_available_memory_counts_a_container_s_limit_but_not_its_page_cache(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    assert available_memory(tmp_path / "meminfo", tmp_path, tmp_path / "none") == available


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage"),
    [
        ("0::/system.slice/cache.service", "system.slice/cache.service", "memory.max", "memory.current"),
        ("0::/system.slice/cache.service", "system.slice", "memory.max", "memory.current"),
        ("4:cpu,memory:/jobs/1", "memory/jobs/1", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
    ids=["a service's", "its slice's", "v1"],
)
def test_available_memory_counts_the_limit_of_a_cgroup_below_the_root(
    tmp_path: Path, line: str, folder: str, limit: str, usage: str
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "membership").write_text(f"1:name=systemd:/elsewhere\n{line}\n")
    group = tmp_path / folder
    group.mkdir(parents=True)
    for name, text in ((limit, "5000"), (usage, "2000"), ("memory.stat", "inactive_file 0")):
        (group / name).write_text(text)
    assert available_memory(tmp_path / "meminfo", tmp_path, tmp_path / "membership") == 3000


# ------------------------------------------------------------------------------------------------ other users


@pytest.mark.parametrize("size", [0, PAGE, 1 << 30], ids=["gone", "shorter", "longer"])
def test_a_client_cannot_change_the_size_under_other_processes(size: int) -> None:
    pool = ShmPool(SIZE)
    client = os.dup(pool.fd)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(client, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(client, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with mmap.mmap(client, pool.total_bytes) as mapped:
            mapped[pool.total_bytes - 1] = 1
    finally:
        os.close(client)
        pool.close()


def test_an_anonymous_pool_has_no_name(folder: Path) -> None:
    pool = ShmPool(SIZE)
    assert list(folder.iterdir()) == []
    assert os.readlink(f"/proc/self/fd/{pool.fd}").startswith("/memfd:")
    assert pool.kind == "memfd"
    pool.close()


def test_a_named_pool_is_its_owner_s_alone_and_its_name_goes_with_it(segment: Path) -> None:
    pool = ShmPool(SIZE, NAME)
    assert segment.stat().st_mode & 0o777 == 0o600
    assert pool.kind == "named"
    pool.close()
    assert not segment.exists()


def test_a_name_in_use_is_refused_and_its_owner_keeps_it(segment: Path) -> None:
    pool = ShmPool(SIZE, NAME)
    pool.view.data[0] = 7
    with pytest.raises(StartupError, match="expected a free name"):
        ShmPool(SIZE, NAME)
    assert sweep_stale_segments() == []
    assert segment.exists()
    assert PoolView(pool.fd, SIZE).data[0] == 7
    pool.close()


def test_closing_leaves_the_mappings_of_others_valid(pool: ShmPool) -> None:
    other = PoolView(pool.fd, SIZE)
    pool.view.data[1] = 3
    pool.close()
    assert other.data[1] == 3
    other.data[1] = 4


def test_closing_twice_is_harmless(pool: ShmPool) -> None:
    pool.close()
    pool.close()


# ------------------------------------------------------------------------------------------------ dead owners

SERVER = """
import pathlib, sys, time
from lmcache.v1.storage import shm_pool
shm_pool._SHM_DIR = pathlib.Path(sys.argv[1])
pool = shm_pool.ShmPool(int(sys.argv[3]), sys.argv[2])
pool.view.data[0] = 9
print(pool.fd, flush=True)
time.sleep(60)
"""


@pytest.fixture
def dead_server(folder: Path, segment: Path) -> Iterator[Callable[[bool], PoolView | None]]:
    """Starts a server with a named pool and kills it; the argument says whether we mapped the pool before."""

    def make(mapped: bool) -> PoolView | None:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), NAME, str(SIZE)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process, process.stdout:
            view = None
            fd_there = int(process.stdout.readline())
            assert sweep_stale_segments() == [], "a live server's segment is its own"
            if mapped:
                view = received(process.pid, fd_there)
            process.send_signal(signal.SIGKILL)
            process.wait(20)
        assert segment.exists()
        return view

    yield make
    segment.unlink(missing_ok=True)


def received(pid: int, fd_there: int) -> PoolView:
    """Map another process's descriptor: the very one, as if handed over, and not the file opened anew."""
    pidfd = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(438, pidfd, fd_there, 0)  # pidfd_getfd
    os.close(pidfd)
    if fd < 0:
        pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    try:
        return PoolView(fd, SIZE)
    finally:
        os.close(fd)


def test_a_dead_server_s_segment_is_swept(
    segment: Path, dead_server: Callable[[bool], PoolView | None]
) -> None:
    dead_server(False)
    assert sweep_stale_segments() == [segment]
    assert not segment.exists()


def test_a_client_that_still_maps_a_dead_server_s_segment_does_not_keep_its_name(
    segment: Path, dead_server: Callable[[bool], PoolView | None]
) -> None:
    view = dead_server(True)
    assert view is not None
    assert sweep_stale_segments() == [segment]
    ShmPool(SIZE, NAME).close()  # the name is free for the server's successor
    assert view.data[0] == 9, "the client's mapping is untouched"


def test_a_sweep_touches_nobody_else_s_files(folder: Path) -> None:
    strangers = [folder / "other", folder / "lmcache-l1-link"]
    strangers[0].write_bytes(b"x")
    strangers[1].symlink_to(strangers[0])
    try:
        assert sweep_stale_segments() == []
        assert all(path.exists() for path in strangers)
    finally:
        for path in strangers:
            path.unlink()


def test_a_segment_swept_while_it_is_being_made_is_made_again(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def lock_late(fd: int, how: int) -> None:
        if not swept:
            swept.append(fd)  # before the maker has its lock, the sweeper takes the file for a dead one
            swept.append(sweep_stale_segments())
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    pool = ShmPool(SIZE, NAME)
    assert swept[1] == [segment]
    assert segment.exists()
    monkeypatch.undo()
    assert sweep_stale_segments() == []
    pool.close()


def test_a_sweep_leaves_the_file_that_has_taken_a_dead_one_s_name(
    segment: Path, monkeypatch: pytest.MonkeyPatch, dead_server: Callable[[bool], PoolView | None]
) -> None:
    dead_server(False)
    lock, pools = fcntl.flock, []

    def lock_late(fd: int, how: int) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(shm_pool, "_SHM_DIR", segment.parent)
        segment.unlink()  # another sweep was faster, and after it a server took the name
        pools.append(ShmPool(SIZE, NAME))
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert sweep_stale_segments() == []
    assert segment.exists(), "it is a live server's"
    pools[0].close()


def test_a_pool_takes_down_its_own_name_only(segment: Path) -> None:
    first = ShmPool(SIZE, NAME)
    segment.unlink()  # by an operator
    second = ShmPool(SIZE, NAME)
    first.close()
    assert segment.exists()
    second.close()
