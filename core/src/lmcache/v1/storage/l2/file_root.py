"""The directory of a tier of files: found anew for every call, with what the system says about it in one line."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, TypeVar

from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2.adapter import AdapterError, AdapterFull, Call

__all__ = [
    "DIRECTORY",
    "TMP",
    "Direct",
    "Root",
    "check_size",
    "each",
    "new_file",
    "opened",
    "opened_folder",
    "starting",
    "system_error",
    "use_direct",
]

T = TypeVar("T")
A = TypeVar("A")
Direct = Literal["auto", "on", "off"]

TMP = "tmp"
"""The folder of files that are being written."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How to open a directory that is no link."""
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_THE_WAY = "something that is no directory is in its place; move that away, or name another path"
_REMEDY = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.ELOOP), _IN_THE_WAY),
    errno.ENOSPC: "free space there, or lower max_gb",
    errno.EDQUOT: "raise the user's quota, or lower max_gb",
    errno.EROFS: "mount it writable; a file system turns read-only after errors of the device",
    errno.EACCES: "let the server's user read and write there",
    errno.ENOENT: "create or mount it; it is then used again",
    errno.EIO: "look for errors of the device in the kernel's log",
}


def system_error(where: str, exc: OSError) -> AdapterError:
    """What the system said, in one line."""
    code = exc.errno or 0
    text = f"{where}: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    kind = AdapterFull if code in (errno.ENOSPC, errno.EDQUOT) else AdapterError
    return kind(f"{text}; {_REMEDY[code]}" if code in _REMEDY else text)


def each(
    where: str, items: Sequence[T], call: Call, act: Callable[[T], A], otherwise: A, go_on: bool = True
) -> list[A]:
    """``act`` on every item in turn; ``otherwise`` for those that the system failed or for which it is too late.

    Args:
        go_on: after a failure, too. Not where the next item is sure to fail likewise.

    Raises:
        AdapterError: if the system failed an item, and no other was answered.
    """
    answers: list[A] = []
    failure: OSError | None = None
    answered = False
    for item in items:
        if call.over or (failure and not go_on):
            answers.append(otherwise)
            continue
        try:
            answers.append(act(item))
            answered = True
        except OSError as exc:
            failure = failure or exc
            answers.append(otherwise)
    if failure and not answered:
        raise system_error(where, failure)
    return answers


@contextmanager
def opened(name: str | os.PathLike[str], flags: int = DIRECTORY, at: int | None = None) -> Iterator[int]:
    """An open file or directory, closed at the end."""
    fd = os.open(name, flags, 0o600, dir_fd=at)  # if it makes one
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_folder(name: str, at: int, durable: bool = False) -> Iterator[int]:
    """A folder below the directory ``at``, made if it is not there; ``durable``: synced then."""
    try:
        fd = os.open(name, DIRECTORY, dir_fd=at)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another thread was first
            os.mkdir(name, 0o700, dir_fd=at)
        if durable:
            try:
                os.fsync(at)
            except OSError:
                with suppress(OSError):  # so that it is synced by who makes it next; not empty: somebody has
                    os.rmdir(name, dir_fd=at)
                raise
        fd = os.open(name, DIRECTORY, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


class Root:
    """The operator's directory and ours in it. Looked up anew for every call, so that one that comes back is found.

    Raises:
        OSError: if it cannot be made or opened.
    """

    def __init__(self, path: str, kind: str) -> None:
        self.kind = kind
        self.path = os.path.abspath(path)
        self.base = os.path.join(self.path, f"{kind}-1")
        self.where = f"{kind} {self.path}"
        os.makedirs(self.path, 0o700, exist_ok=True)
        self._device = os.stat(self.path).st_dev
        with suppress(FileExistsError):
            os.mkdir(self.base, 0o700)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Our directory. If it is gone it is made again, unless something else is mounted there now: what an
        unmounted tier leaves behind is somebody else's file system.

        Raises:
            AdapterError: if there is none.
        """
        try:
            fd = self._open()
        except OSError as exc:
            raise system_error(self.where, exc) from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.base, DIRECTORY)
        except FileNotFoundError:
            if os.stat(self.path).st_dev != self._device:
                raise AdapterError(
                    f"{self.where}: not the file system that was there at start; mount that one again"
                ) from None
            with suppress(FileExistsError):
                os.mkdir(self.base, 0o700)
            return os.open(self.base, DIRECTORY)


@contextmanager
def starting(kind: str, path: str) -> Iterator[None]:
    """What the system refuses at start is a StartupError."""
    try:
        yield
    except OSError as exc:
        raise StartupError(str(system_error(f"{kind} {path}", exc))) from None
    except AdapterError as exc:
        raise StartupError(str(exc)) from None


def check_size(root: Root, base: int, max_gb: float) -> None:
    """
    Raises:
        ConfigError: ``max_gb`` is more than the file system has.
    """
    total = os.fstatvfs(base)
    have = total.f_blocks * total.f_frsize
    if have and max_gb * (1 << 30) > have:
        raise ConfigError(
            f"--l2-adapter {root.kind}: max_gb={max_gb:g}: expected at most the size of the file system of"
            f" {root.path}, {have / 2**30:.1f} GiB"
        )


def use_direct(root: Root, base: int, wanted: Direct) -> bool:
    """Whether to use O_DIRECT.

    Raises:
        StartupError: if it must be, and the file system has none.
        OSError: if no file can be made there at all.
    """
    has_direct = _has_direct(base)
    if wanted == "on" and not has_direct:
        raise StartupError(
            f"{root.where}: direct=on, but the file system has no O_DIRECT; set direct to auto or off"
        )
    return has_direct and wanted != "off"


def _has_direct(base: int) -> bool:
    with opened_folder(TMP, base) as tmp:
        name, fd = new_file(tmp)
        os.close(fd)
        try:
            with opened(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, tmp):
                return True
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=tmp)


def new_file(tmp: int, flags: int = os.O_WRONLY) -> tuple[str, int]:
    """A new file in the folder of unfinished ones: its name, and the open file.

    Raises:
        OSError: as the system says.
    """
    name = f"{os.getpid()}-{secrets.token_hex(8)}.tmp"
    return name, os.open(name, flags | _NEW, 0o600, dir_fd=tmp)
