"""``disk``: files of this server alone, in a directory of a local file system (docs/storage/disk.md)."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

from lmcache.errors import StartupError
from lmcache.logging import init_logger
from lmcache.v1.storage.accounts import Accounts
from lmcache.v1.storage.l2 import files
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Held, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.envelope import unpack
from lmcache.v1.storage.l2.file_io import padded
from lmcache.v1.storage.l2.file_root import (
    TMP,
    Direct,
    Root,
    check_size,
    each,
    opened,
    opened_folder,
    starting,
    system_error,
    use_direct,
)
from lmcache.v1.storage.l2.index import Index, sweep, walk
from lmcache.v1.storage.l2.options import Folder, read_options

__all__ = ["DiskAdapter", "DiskOptions", "make"]

logger = init_logger(__name__)

_LOCK = "lock"
_ACCOUNT = re.compile(r"([0-9a-f]{16})?")
_locks: set[int] = set()
"""Open lock files of this process."""


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``{"type": "disk", …}``."""

    path: Folder
    max_gb: Annotated[float, msgspec.Meta(gt=0)]
    """GiB on the disk. Required: there is no size that fits everybody, and a full disk hurts others."""
    direct: Direct = "auto"
    """O_DIRECT. auto: where the file system has it."""
    fsync: files.Fsync = "none"
    """none: a crash of the machine may cost objects, which their checksums tell. data: they are on the device when
    their store returns. full: their names, too."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    quotas_gb: dict[str, float] = {}
    """GiB that an account may take, by its id as ``lmcache quota list`` shows it; "": requests without salt."""

    def __post_init__(self) -> None:
        for account, gib in self.quotas_gb.items():
            if not _ACCOUNT.fullmatch(account):
                raise ValueError(
                    f"quotas_gb {account[:40]!r}: expected an account's id of 16 hex digits, as lmcache quota get SALT"
                    ' shows it, or "" for requests without salt'
                )
            if not (math.isfinite(gib) and 0 <= gib <= 1 << 30):
                raise ValueError(f"quotas_gb {account!r}: {gib:g}: expected a number of GiB from 0 on")

    @property
    def capacity(self) -> int:
        return int(self.max_gb * (1 << 30))


def make(options: Mapping[str, Any]) -> DiskAdapter:
    """The adapter of an operator's options.

    Raises:
        ConfigError: for an option that cannot be used.
        StartupError: if the directory cannot be had, or another process has it.
    """
    return DiskAdapter(read_options("disk", DiskOptions, options))


class _Owned(NamedTuple):
    """A directory that is ours: which one it is, the lock on it, and what it holds."""

    identity: tuple[int, int]
    lock: int
    held: Index


class DiskAdapter(StorageAdapter):
    """One file per object. An index in memory says what is there; the files' names and headers make it at start.

    Raises:
        ConfigError, StartupError: as :func:`make`.
    """

    def __init__(self, options: DiskOptions) -> None:
        self.threads = options.threads
        self._options = options
        self._quotas = {account: int(gib * (1 << 30)) for account, gib in options.quotas_gb.items()}
        self._adopting = threading.Lock()
        self._swapping = threading.Lock()  # never held over I/O: closing must not wait for a disk that hangs
        self._owned: _Owned | None = None
        self._closed = False
        with starting("disk", options.path):
            self._root = Root(options.path, "disk")
            with self._root.open() as base:
                check_size(self._root, base, options.max_gb)
                self._adopt(base)
                try:
                    self._direct = use_direct(self._root, base, options.direct)
                except BaseException:
                    self.close()
                    raise

    # ---- the directory

    def _adopt(self, base: int) -> _Owned:
        """Take the directory for ours: lock it, sweep it, read what it holds."""
        lock = _locked(base, self._root.where)
        try:
            swept = sweep(base)
            walked = walk(base)
            index = Index(self._quotas)
            for held, blocks in walked.found:
                index.add(held, blocks)
        except BaseException:
            _let_go(lock)
            raise
        logger.info(
            "%s: %d objects, %.1f GiB; removed %d unfinished and %d damaged files; left %d that are not ours",
            *(self._root.where, len(index), index.used / 2**30, swept, walked.spoiled, walked.foreign),
        )
        owned = _Owned(_identity(base), lock, index)
        with self._swapping:
            if self._closed:
                _let_go(lock)
                raise AdapterError(f"{self._root.where}: closed")
            old, self._owned = self._owned, owned
        if old is not None:
            _let_go(old.lock)
        return owned

    @contextmanager
    def _open(self) -> Iterator[tuple[int, Index]]:
        """Our directory and its index, made anew if another directory has come to its place."""
        with self._root.open() as base:
            owned, identity = self._owned, _identity(base)
            if owned is None or owned.identity != identity:
                with self._adopting:
                    owned = self._owned
                    if self._closed:
                        raise AdapterError(f"{self._root.where}: closed")
                    if owned is None or owned.identity != identity:
                        owned = self._readopt(base)
            yield base, owned.held

    def _readopt(self, base: int) -> _Owned:
        logger.warning("%s: the directory is another one than before; reading it", self._root.where)
        try:
            owned = self._adopt(base)
            self.scans += 1
            return owned
        except StartupError as exc:
            raise AdapterError(str(exc)) from None
        except OSError as exc:
            raise system_error(self._root.where, exc) from None

    @property
    def _index(self) -> Index:
        owned = self._owned
        if owned is None:
            raise AdapterError(f"{self._root.where}: closed")
        return owned.held

    # ---- the contract

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._open() as (
            _,
            index,
        ):  # also a probe's question: a directory that is gone must not look well
            return [key in index for key in keys]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """As the contract says. What does not fit ``max_gb`` is answered with False; that makes no error."""
        with self._open() as (base, index):
            # After a failure the next would fail likewise, having written until the disk is full again.
            act = partial(self._store, base, index)
            return each(self._root.where, objects, call, act, False, go_on=False)

    def _store(self, base: int, index: Index, put: Put) -> bool:
        if put.key in index:
            return True
        expected, account = self.takes(len(put.header), len(put.payload)), unpack(put.header).account
        if not index.expect(expected, self._options.capacity, account):
            return False
        fsync, coming = self._options.fsync, expected
        try:
            with opened_folder(TMP, base) as tmp:
                name, blocks = files.write_temp(tmp, put, self._direct, fsync)
                held = Held(put.key, len(put.header) + len(put.payload), time.time(), account)
                with index.of_folder[files.folder_name(put.key)]:
                    files.publish(base, tmp, name, put.key, fsync)
                    index.add(held, blocks, coming)
                    coming = 0
        finally:
            if coming:
                index.settle(coming, account)
        return True

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        with self._open() as (base, index):
            act = partial(self._load, base, index)
            return each(self._root.where, wants, call, act, None)

    def _load(self, base: int, index: Index, want: Want) -> bytes | None:
        direct = self._direct and len(want.payload) >= files.DIRECT_FROM
        try:
            with files.opened_object(base, want.key, direct) as (fd, info):
                header = files.load_object(fd, want, direct, info)
                if time.time() - info.st_atime > files.TOUCH_SECONDS:
                    with suppress(OSError):  # read-only: the order of use is all that is lost
                        os.utime(fd, ns=(time.time_ns(), info.st_mtime_ns))
        except FileNotFoundError:
            with index.of_folder[files.folder_name(want.key)]:
                there = files.present(base, want.key)
                if there is None or not stat.S_ISREG(there.st_mode):  # nor by now: somebody else removed it
                    index.drop(want.key)
            return None
        except files.Spoiled as exc:
            logger.warning("%s: %s; removed", self._root.where, exc)
            self._delete(base, index, want.key)
            return None
        index.correct(want.key, info.st_blocks * 512)
        return header

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._open() as (base, index):
            act = partial(self._delete, base, index)
            return each(self._root.where, keys, call, act, False)

    def _delete(self, base: int, index: Index, key: bytes) -> bool:
        with index.of_folder[files.folder_name(key)]:
            files.remove(base, key)
            index.drop(key)
        return True

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        with self._open() as (base, _):
            act = partial(files.header_in, base)
            return each(self._root.where, keys, call, act, None)

    def scan(self) -> Iterator[Held]:
        """From memory: what the directory held at start, and what came and went since."""
        return iter(self._index.held())

    def usage(self) -> Usage:
        owned = self._owned
        capacity = self._options.capacity
        return Usage(owned.held.used, len(owned.held), capacity) if owned else Usage(-1, -1, capacity)

    def accounts(self) -> Accounts | None:
        owned = self._owned
        return owned.held.accounts if owned else None

    def takes(self, header: int, payload: int) -> int:
        return padded(header) + padded(payload)

    def describe(self) -> str:
        return (
            f"{self._root.path} ({'direct' if self._direct else 'page cache'}, fsync {self._options.fsync})"
        )

    def close(self) -> None:
        with self._swapping:
            self._closed = True
            owned, self._owned = self._owned, None
        if owned is not None:
            _let_go(owned.lock)


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _let_go(lock: int) -> None:
    """Unlock and close: closing alone would leave the lock to children that were forked meanwhile."""
    _locks.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _locked(base: int, where: str) -> int:
    """The open lock file of a directory; the lock goes with it, also when the process is killed.

    Raises:
        StartupError: if another process, or another adapter of this one, has it.
        OSError: as the system says.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO of that name: nobody is at its end
    fd = os.open(
        _LOCK, os.O_RDONLY | os.O_CREAT | flags, 0o600, dir_fd=base
    )  # not open for writing: that forbids remounting
    _locks.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = f"process {os.getpid()} on {socket.gethostname()}\n"
        with opened(_LOCK, os.O_WRONLY | os.O_TRUNC | flags, base) as writable:
            try:
                os.write(writable, owner.encode("ascii", "replace"))
            except OSError as exc:  # a full disk can be read, and emptied
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
    except BlockingIOError:
        owner = os.pread(fd, 200, 0).decode("ascii", "replace").strip() or "another process"
        _let_go(fd)
        raise StartupError(
            f"{where}: in use by {owner}; give every server a directory of its own, or use type shared_fs"
        ) from None
    except BaseException:
        _let_go(fd)
        raise
    return fd


def _not_ours() -> None:
    """In a forked child: keep no lock that was the parent's, or the directory stays locked after its death."""
    if _locks:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for fd in _locks:
            os.dup2(null, fd, inheritable=False)  # so that the number stays taken, for whoever closes it
        os.close(null)
        _locks.clear()


os.register_at_fork(after_in_child=_not_ours)
