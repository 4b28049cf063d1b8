"""Anonymous shared memory between processes of one host: a memfd, its mapping, and how another finds it.

Nothing has a name in a file system: the kernel frees the memory when the last process that holds or maps it
ends, however it ends. Another process reaches it through ``/proc/PID/fd/FD`` of its creator and believes no
number of the description before the kernel has confirmed it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import threading
import weakref
from typing import Annotated

import msgspec

from lmcache.errors import DeviceError

__all__ = ["FileId", "SharedFile", "create_file", "file_at", "is_running", "open_file"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ENGINE = "use engine_driven"

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class FileId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a shared file is found, and all that must be true of what is found there."""

    pid: Number
    fd: Number
    start_time: Number
    """Of the process, in clock ticks since boot: tells it from a later one of the same pid."""
    pid_namespace: Number
    dev: Number
    ino: Number
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class SharedFile(mmap.mmap):
    """A mapping of a whole shared file. It ends with the last reference, never before: tensors hold one.

    ``mmap.close()`` must not be called: a tensor on the mapping would point to nothing.
    """

    address: int
    fd: int
    """The creator's descriptor, or -1 where the file is another process's."""

    def __repr__(self) -> str:
        return f"SharedFile({len(self)} bytes at {self.address:#x}, fd {self.fd})"

    def identity(self) -> FileId:
        """How other processes find this file while this one lives."""
        if self.fd < 0:
            raise ValueError("memory that was imported from another process cannot be exported again")
        found = os.fstat(self.fd)
        pid = os.getpid()
        return FileId(
            pid, self.fd, _start_time(pid) or 0, _pid_namespace(), found.st_dev, found.st_ino, len(self)
        )


# One mapping per file and process. A key holds as long as its mapping: an inode in use is not given out again.
_BY_INODE: weakref.WeakValueDictionary[tuple[int, int], SharedFile] = weakref.WeakValueDictionary()
_BY_ADDRESS: weakref.WeakValueDictionary[int, SharedFile] = weakref.WeakValueDictionary()
_LOCK = threading.RLock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def create_file(nbytes: int, name: str) -> SharedFile:
    """New zeroed shared memory, reserved in full and sealed against a change of size.

    Raises:
        DeviceError: The memory cannot be had.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)  # what is missing is said now, not by SIGBUS later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return _mapped(fd, nbytes, own=True)
    except (OSError, AttributeError) as exc:
        if fd >= 0:
            os.close(fd)
        raise DeviceError(
            f"shared memory of {nbytes} bytes cannot be had ({exc}); free memory, or {_ENGINE}"
        ) from None


def open_file(wanted: FileId) -> SharedFile:
    """Map what another process (or this one) created.

    Raises:
        DeviceError: It is not there, is not what it was said to be, or may not be opened.
    """
    path, what = f"/proc/{wanted.pid}/fd/{wanted.fd}", f"shared memory of process {wanted.pid}"
    if wanted.pid_namespace != _pid_namespace():
        raise DeviceError(
            f"{what}: it runs in pid namespace {wanted.pid_namespace}, this process in {_pid_namespace()}; "
            f"share the namespace, or {_ENGINE}"
        )
    fd = -1
    try:
        _check(os.stat(path), wanted, what)  # before opening: to open a device or a pipe has effects
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        _check(os.fstat(fd), wanted, what)
        if not is_running(wanted.pid, wanted.start_time):
            raise DeviceError(f"{what}: it has ended, and another has its pid; export again")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise DeviceError(f"{what}: expected a memfd whose size is sealed; {_ENGINE}")
        with _LOCK:
            return _BY_INODE.get((wanted.dev, wanted.ino)) or _mapped(fd, wanted.nbytes, own=False)
    except FileNotFoundError:
        raise DeviceError(f"{what}: the process has ended or has no descriptor {wanted.fd}") from None
    except PermissionError as exc:
        raise DeviceError(f"{what}: {exc.strerror}; run both as one user, or {_ENGINE}") from None
    except OSError as exc:
        raise DeviceError(f"{what}: cannot be mapped ({exc.strerror}); {_ENGINE}") from None
    finally:
        if fd >= 0:
            os.close(fd)  # the mapping has its own


def file_at(address: int) -> SharedFile | None:
    """The mapping that begins at ``address``, if one does."""
    with _LOCK:
        return _BY_ADDRESS.get(address)


def is_running(pid: int, start_time: int) -> bool:
    """Whether the process that began at ``start_time`` still runs; a zombie does not."""
    return start_time != 0 and _start_time(pid) == start_time


def _check(found: os.stat_result, wanted: FileId, what: str) -> None:
    have = (stat.S_ISREG(found.st_mode), found.st_dev, found.st_ino, found.st_size)
    need = (True, wanted.dev, wanted.ino, wanted.nbytes)
    if have != need:
        raise DeviceError(
            f"{what}: descriptor {wanted.fd} is device {found.st_dev} inode {found.st_ino} of "
            f"{found.st_size} bytes; expected device {wanted.dev} inode {wanted.ino} of {wanted.nbytes} "
            "bytes; export again"
        )


def _mapped(fd: int, nbytes: int, own: bool) -> SharedFile:
    file = SharedFile(fd, nbytes)
    file.address = ctypes.addressof(ctypes.c_char.from_buffer(file))
    file.fd = fd if own else -1
    found = os.fstat(fd)
    with _LOCK:
        _BY_INODE[found.st_dev, found.st_ino] = _BY_ADDRESS[file.address] = file
    if own:
        weakref.finalize(file, os.close, fd).atexit = False
    return file


def _start_time(pid: int) -> int | None:
    """Field 22 of proc_pid_stat(5); None if there is no such process or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
