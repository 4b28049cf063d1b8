"""Named shared memory that dies with its maker. Linux; needs no torch.

A segment is ``/dev/shm/NAME``: the bytes asked for, then one page with the mark of this module. Its maker holds
an flock on it, which the kernel drops when the process and all that were forked from it are gone. So a segment
with the mark and without a lock is stale, and nothing else is: another program's may live without a lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from pathlib import Path

from lmcache.errors import DeviceError

__all__ = ["Segment", "segment_name"]

_SHM_DIR = Path("/dev/shm")
_MARK = b"LMCache shm segment, version 1\n"
_NAME_MAX = 255


def segment_name(op: str, name: str) -> str:
    """``name`` as a file name.

    Raises:
        TypeError: It is no str.
        ValueError: It is no plain file name.
    """
    if not isinstance(name, str):
        raise TypeError(f"{op}: name={name!r}: expected a str")
    plain = name[1:] if name.startswith("/") else name
    if plain in ("", ".", "..") or {"/", "\0"} & {*plain} or len(os.fsencode(plain)) > _NAME_MAX:
        raise ValueError(f"{op}: name={name!r}: expected a file name of at most {_NAME_MAX} bytes")
    return plain


class Segment:
    """A segment of this process.

    Args:
        op: Who asks, for messages.
        name: From :func:`segment_name`.
        size: Bytes, 1 or more.

    Raises:
        DeviceError: One of that name is there, and nothing proves that it is stale.
        MemoryError: There is not enough room.
    """

    def __init__(self, op: str, name: str, size: int) -> None:
        self.path = _SHM_DIR / name
        self._pid = os.getpid()
        self._lock_fd = _create(op, self.path)
        try:
            self.memory = self._map(op, size)
        except BaseException:
            self.remove_name()
            raise

    def _map(self, op: str, size: int) -> mmap.mmap:
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            # Reserved in full, or the first touch of a page that is not there would be SIGBUS.
            os.posix_fallocate(self._lock_fd, 0, whole + mmap.PAGESIZE)
            os.pwrite(self._lock_fd, _MARK, whole)
            return mmap.mmap(self._lock_fd, size, mmap.MAP_SHARED)
        except (OSError, OverflowError) as exc:
            room = os.statvfs(_SHM_DIR)
            raise MemoryError(
                f"{op}: {size} bytes in {self.path}: {exc}; {room.f_bavail * room.f_frsize} are free there"
            ) from None

    def remove_name(self) -> None:
        """Remove the name if it is still this segment's; a forked process only closes the file."""
        if self._lock_fd < 0:
            return
        if os.getpid() == self._pid and _names(self.path, self._lock_fd):
            self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _create(op: str, path: Path) -> int:
    """A new file, locked; what holds the name is removed first if it is stale."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            _remove_stale(op, path)
            fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise DeviceError(
            f"{op}: segment {path} was made by another meanwhile; choose another name"
        ) from None
    except OSError as exc:
        raise DeviceError(
            f"{op}: segment {path} cannot be made: {exc.strerror}; is /dev/shm mounted?"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # at most until somebody has seen that it has no mark yet
    except OSError as exc:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise DeviceError(f"{op}: segment {path} cannot be locked: {exc.strerror}") from None
    return fd


def _remove_stale(op: str, path: Path) -> None:
    """Remove the segment at ``path`` if it is provably stale.

    Raises:
        DeviceError: It is not; nothing was touched.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise DeviceError(f"{op}: {path} is in the way: {exc.strerror}; choose another name") from None
    try:
        if not _is_marked(fd):
            raise DeviceError(
                f"{op}: segment {path} is there and was not made by this op, so it may be in use; choose "
                "another name, or remove it if nothing uses it"
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DeviceError(
                f"{op}: segment {path} is in use by a living process; choose another name"
            ) from None
        if _names(path, fd):  # else somebody else removed it, and may have made a new one
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _is_marked(fd: int) -> bool:
    found = os.fstat(fd)
    last_page = found.st_size - mmap.PAGESIZE
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and last_page > 0
        and os.pread(fd, len(_MARK), last_page) == _MARK
    )


def _names(path: Path, fd: int) -> bool:
    """Whether ``path`` is the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
