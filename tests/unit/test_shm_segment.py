"""Named shared memory by address: who may map it, when its name goes, what is replaced and what is not."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache.v1.platform.torch_ops import memory, shm_segment
from lmcache.v1.platform.torch_ops.memory import alloc_shm_pinned_ptr, free_shm_pinned_ptr

ALLOC = """
import ctypes, os, sys
from lmcache.v1.platform.torch_ops.memory import alloc_shm_pinned_ptr
ptr = alloc_shm_pinned_ptr(5000, sys.argv[1])
ctypes.memset(ptr, 0x55, 5000)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm") / f"lmcache-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def run(code: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", ALLOC + code, path.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_a_segment_is_private_zeroed_and_seen_by_its_name(path: Path) -> None:
    umask = os.umask(0)
    try:
        ptr = alloc_shm_pinned_ptr(5000, "/" + path.name)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ctypes.string_at(ptr, 5000) == bytes(5000)
    ctypes.memset(ptr, 7, 5000)
    assert path.read_bytes()[:5000] == b"\x07" * 5000
    assert path.stat().st_blocks * 512 >= 5000  # reserved, not sparse
    free_shm_pinned_ptr(ptr, 5000, path.name)
    assert not path.exists()


def test_another_process_keeps_its_mapping_when_the_name_goes(path: Path) -> None:
    ptr = alloc_shm_pinned_ptr(4096, path.name)
    ctypes.memset(ptr, 9, 4096)
    with path.open("rb") as peer:
        free_shm_pinned_ptr(ptr, 4096, path.name)
        assert peer.read(4096) == b"\x09" * 4096


@pytest.mark.parametrize("name", ["", "/", ".", "..", "a/b", "//a", "a\0b", "x" * 256])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"alloc_shm_pinned_ptr: name=.*: expected a file name"):
        alloc_shm_pinned_ptr(4096, name)


def test_a_name_that_is_no_text_and_a_size_of_nothing_are_refused(path: Path) -> None:
    with pytest.raises(TypeError, match="expected a str"):
        alloc_shm_pinned_ptr(4096, 7)  # type: ignore[arg-type]
    for size in (0, -4096):
        with pytest.raises(ValueError, match="expected 1 byte or more"):
            alloc_shm_pinned_ptr(size, path.name)
    assert not path.exists()


def test_the_wrong_size_or_name_frees_nothing(path: Path) -> None:
    ptr = alloc_shm_pinned_ptr(5000, path.name)
    for arguments in ((5001, path.name), (5000, path.name + "x"), (5000, "a/b")):
        with pytest.raises(ValueError, match="free_shm_pinned_ptr"):
            free_shm_pinned_ptr(ptr, *arguments)
    assert path.exists()
    free_shm_pinned_ptr(ptr, 0, "")
    with pytest.raises(ValueError, match="it is not allocated, or freed already"):
        free_shm_pinned_ptr(ptr, 5000, path.name)


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 70])
def test_what_does_not_fit_is_said_in_one_line_and_leaves_no_name(size: int, path: Path) -> None:
    with pytest.raises(MemoryError) as caught:
        alloc_shm_pinned_ptr(size, path.name)
    assert f"{size} bytes in {path}: " in str(caught.value)
    assert "are free there" in str(caught.value)
    assert not path.exists()


def test_a_name_in_use_by_this_process_is_refused_and_left_alone(path: Path) -> None:
    ptr = alloc_shm_pinned_ptr(4096, path.name)
    ctypes.memset(ptr, 3, 4096)
    with pytest.raises(DeviceError, match=f"{path} is in use by a living process"):
        alloc_shm_pinned_ptr(4096, path.name)
    assert path.read_bytes()[:4096] == b"\x03" * 4096
    free_shm_pinned_ptr(ptr, 4096, path.name)


def test_a_segment_of_a_living_process_is_kept_and_that_of_a_killed_one_replaced(path: Path) -> None:
    owner = run("print('ready', flush=True); sys.stdin.read()", path)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    with pytest.raises(DeviceError, match="in use by a living process"):
        alloc_shm_pinned_ptr(100, path.name)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)
    assert path.read_bytes()[:5000] == b"\x55" * 5000  # it left it behind
    ptr = alloc_shm_pinned_ptr(100, path.name)
    assert ctypes.string_at(ptr, 100) == bytes(100)
    free_shm_pinned_ptr(ptr, 100, path.name)


def test_a_process_that_ends_takes_its_names_along(path: Path) -> None:
    done = run("", path)
    done.communicate(timeout=30)
    assert done.returncode == 0
    assert not path.exists()


def test_a_forked_process_that_ends_leaves_its_parent_s_name(path: Path) -> None:
    code = """
child = os.fork()
if not child:
    sys.exit(0)  # runs what is registered for exit
os.waitpid(child, 0)
print(os.path.exists("/dev/shm/" + sys.argv[1]))
"""
    out, _ = run(code, path).communicate(timeout=30)
    assert out == b"True\n"
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"somebody's data" * 1000])
def test_what_another_program_made_is_never_replaced(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(DeviceError, match="was not made by this op, so it may be in use"):
        alloc_shm_pinned_ptr(4096, path.name)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to(f"{path}-is-not-there"), os.mkfifo]
)
def test_what_is_no_file_is_never_replaced(make: Any, path: Path) -> None:
    make(path)
    try:
        with pytest.raises(DeviceError, match=f"{path}"):
            alloc_shm_pinned_ptr(4096, path.name)
        assert path.is_symlink() or path.exists()
    finally:
        if path.is_dir():
            path.rmdir()


def test_a_name_that_another_took_meanwhile_is_not_removed(path: Path) -> None:
    ptr = alloc_shm_pinned_ptr(4096, path.name)
    path.unlink()
    path.write_bytes(b"another's")
    free_shm_pinned_ptr(ptr, 4096, path.name)
    assert path.read_bytes() == b"another's"


def test_a_stale_segment_that_another_replaces_meanwhile_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("os._exit(0)", path).communicate(timeout=30)
    real, again = shm_segment._is_marked, path.with_name(path.name + "-2")

    def judged_late(fd: int) -> bool:
        marked = real(fd)
        again.write_bytes(b"the winner's")
        again.rename(path)
        return marked

    monkeypatch.setattr(shm_segment, "_is_marked", judged_late)
    with pytest.raises(DeviceError, match="made by another meanwhile"):
        alloc_shm_pinned_ptr(4096, path.name)
    assert path.read_bytes() == b"the winner's"
    assert not [a for a in memory._live.values() if a.segment is not None]
