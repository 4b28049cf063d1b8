"""The limit of a directory that several servers share: one of them, now and then, removes what was used longest ago.

Nobody knows what the others store, so the directory is read: once to add up sizes by the second of their last use (by
the minute, where that was long ago), and, if that is too much, once more to remove what was last used before the second
that results. No list of files is kept in memory. The time of use is a file's modification time, which loads renew: the
file server sets it, by its one clock, where access times come from clients' clocks, are switched off by mount options,
or are changed by whoever reads.

The file ``sweep`` says by its own modification time when somebody last worked at it, and holds what he found. Who works
holds a lock on it, which goes with his process. A lock that a host took with it when it died is passed over after a
while: two that work at once do no harm, they remove the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.storage.l2.adapter import AdapterError
from lmcache.v1.storage.l2.file_io import padded
from lmcache.v1.storage.l2.file_root import DIRECTORY, TMP, Root, opened, opened_folder, system_error
from lmcache.v1.storage.l2.files import FOLDERS, folder_name, key_of
from lmcache.v1.storage.l2.index import TEMP, clock_of

__all__ = ["Found", "SharedLimit"]

logger = init_logger(__name__)

_SWEEP = "sweep"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DOWN_TO = 0.90
_DUTY = 10
"""Times as long as a look takes nobody looks again: a huge directory on a slow server is not read all the time."""
_MOST_REST = 86400.0
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""File systems without locks, by mount option or altogether. The time on the file keeps servers apart as a rule."""
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_NO_FOLDER = _GONE | {errno.ENOTDIR, errno.ELOOP}
_LEASE = 2
"""Periods after which a lock is not respected whose holder does not renew the time."""
_TEXT = re.compile(rb"([0-9]{1,19}) ([0-9]{1,19}) ([0-9]{1,9})\n")


class Found(NamedTuple):
    """What a look found, and left: bytes, with those of unfinished files, objects, and the seconds that it took."""

    nbytes: int
    objects: int
    seconds: int


class _File(NamedTuple):
    name: str
    info: os.stat_result


class _Stopped(Exception):
    """The server ends."""


class SharedLimit:
    """Keeps a directory below ``limit`` bytes, in a thread of its own, together with the other servers' limits.

    Args:
        seconds: how often one of the servers is to look.
        on_clock: told the time by the file system's clock, whenever it was asked.
    """

    def __init__(self, root: Root, limit: int, seconds: float, on_clock: Callable[[float], None]) -> None:
        self._root = root
        self._limit = limit
        self._seconds = seconds
        self._on_clock = on_clock
        self._stop = threading.Event()
        self._failing = False
        self.found: Found | None = None
        """By whoever looked last."""
        self._thread = threading.Thread(target=self._run, name="lmcache-shared-fs-limit", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End; not waited for longer than so long, for its file system may hang."""
        self._stop.set()
        self._thread.join(seconds)

    # ---- the thread

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                with self._root.open() as base:
                    self.look(base)
                self._failing = False
            except _Stopped:
                return
            except (OSError, AdapterError) as exc:
                self._complain(exc)
            pause = self._seconds * random.uniform(0.9, 1.1)  # noqa: S311 -- so that servers take turns

    def _complain(self, exc: OSError | AdapterError) -> None:
        if not self._failing:  # once, not every minute
            text = system_error(self._root.where, exc) if isinstance(exc, OSError) else exc
            logger.warning("%s; max_gb is not kept by this server meanwhile", text)
        self._failing = True

    def look(self, base: int) -> bool:
        """See to the limit, if it is time and nobody else does so; whether it was done."""
        now = clock_of(base)
        self._on_clock(now)
        with opened(_SWEEP, _FLAGS, base) as fd:
            age, period = last = self._last(fd, now)
            lease = _LEASE * max(period, self._seconds)
            if 0 <= age < period or not _locked(fd, 0 <= age < lease):
                return False
            try:
                if self._last(fd, now) != last:  # somebody was at it before we had the lock
                    return False
                self._work(base, now, fd)
            finally:
                with suppress(OSError):  # closing unlocks, too, but for children that were forked meanwhile
                    fcntl.flock(fd, fcntl.LOCK_UN)
        return True

    def _last(self, fd: int, now: float) -> tuple[float, float]:
        """How long ago somebody worked at it (negative after a step of the file server's clock), and for how long
        that is enough: not at all, if nobody ever came to the end of it."""
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise AdapterError(f"{self._root.where}: {_SWEEP} is no file; move it away")
        match = _TEXT.fullmatch(os.pread(fd, 100, 0))
        age = now - info.st_mtime
        if match is None:
            return age, 0.0
        self.found = Found(*map(int, match.groups()))
        return age, max(self._seconds, min(_DUTY * self.found.seconds, _MOST_REST))

    def _work(self, base: int, now: float, fd: int) -> None:
        began = time.monotonic()
        beat = began

        def on_folder() -> None:
            nonlocal beat
            if self._stop.is_set():
                raise _Stopped
            if time.monotonic() - beat > self._seconds / 4:
                beat = time.monotonic()
                os.utime(fd)

        os.utime(fd)
        nbytes, objects = self._sweep(base, now, on_folder)
        self.found = Found(nbytes, objects, int(time.monotonic() - began))
        text = b"%d %d %d\n" % self.found
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))

    def _sweep(self, base: int, now: float, on_folder: Callable[[], None]) -> tuple[int, int]:
        """Remove what is too much; bytes and objects that are left."""
        seconds: Counter[int] = Counter()
        objects = 0
        for name in FOLDERS:
            on_folder()
            with _files_of(base, name) as (_, files):
                for file in files:
                    seconds[_second(file.info, now)] += padded(file.info.st_size)
                objects += len(files)
        nbytes = seconds.total() + _unfinished(base)
        if nbytes <= self._limit:
            return nbytes, objects
        last, some = _oldest(seconds, nbytes - int(self._limit * _DOWN_TO))
        removed = gone = 0
        for name in FOLDERS:
            on_folder()
            with _files_of(base, name) as (folder, files):
                for file in files:
                    used, size = _second(file.info, now), padded(file.info.st_size)
                    if used > last or (used == last and some <= 0) or not _remove(folder, file):
                        continue
                    some -= size if used == last else 0
                    gone += size
                    removed += 1
        logger.info(
            "%s: %.2f GiB of at most %.2f; removed %d objects, %.2f GiB",
            *(self._root.where, nbytes / 2**30, self._limit / 2**30, removed, gone / 2**30),
        )
        return nbytes - gone, objects - removed


def _oldest(seconds: Counter[int], nbytes: int) -> tuple[int, int]:
    """Up to which second what was last used makes ``nbytes``, and how much of that second's is needed for it."""
    for second in sorted(seconds):
        if seconds[second] >= nbytes:
            return second, nbytes
        nbytes -= seconds[second]
    return max(seconds, default=0), nbytes


def _second(info: os.stat_result, now: float) -> int:
    """When it was last used: to the second in the last hour, to the minute before, so that there are few of them."""
    used = info.st_mtime
    return int(used) if used > now - 3600 else int(used // 60) * 60


@contextmanager
def _files_of(base: int, folder: str) -> Iterator[tuple[int, list[_File]]]:
    """A folder, and the objects' files in it; -1 and none if there is no such folder."""
    try:
        fd = os.open(folder, DIRECTORY, dir_fd=base)
    except OSError as exc:
        if exc.errno not in _NO_FOLDER:
            raise
        yield -1, []
        return
    try:
        files = []
        with os.scandir(fd) as entries:
            for entry in entries:
                key = key_of(entry.name)
                if key is None or folder_name(key) != folder:
                    continue
                with _unless_gone():
                    info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        files.append(_File(entry.name, info))
        yield fd, files
    finally:
        os.close(fd)


def _remove(folder: int, file: _File) -> bool:
    """Remove a file, unless it was used, or made anew, since it was looked at; whether it is gone by that."""
    with _unless_gone():
        info = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
        if (info.st_ino, info.st_mtime_ns) == (file.info.st_ino, file.info.st_mtime_ns):
            os.unlink(file.name, dir_fd=folder)
            return True
    return False


def _unfinished(base: int) -> int:
    """Bytes of files that are being written. They are their writers', and the older sweep's."""
    nbytes = 0
    with opened_folder(TMP, base) as tmp:
        for name in os.listdir(tmp):
            if TEMP.fullmatch(name):
                with _unless_gone():
                    nbytes += padded(os.stat(name, dir_fd=tmp, follow_symlinks=False).st_size)
    return nbytes


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Others remove files, too."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _GONE:
            raise


def _locked(fd: int, respected: bool) -> bool:
    """Whether to go on: the lock is ours, or there are no locks here, or somebody's is not ``respected``."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return not respected
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
    return True
