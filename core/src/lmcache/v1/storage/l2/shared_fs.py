"""``shared_fs``: files in a directory that several servers share (docs/storage/shared-fs.md).

The form is that of ``disk``. Nothing is remembered: the directory is the truth, whoever writes to it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import msgspec

from lmcache.logging import init_logger
from lmcache.v1.storage.l2 import files
from lmcache.v1.storage.l2.adapter import Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.file_io import file_bytes
from lmcache.v1.storage.l2.file_root import (
    TMP,
    Direct,
    Root,
    check_size,
    each,
    opened_folder,
    starting,
    system_error,
    use_direct,
)
from lmcache.v1.storage.l2.index import clock_of, names, sweep
from lmcache.v1.storage.l2.options import Folder, read_options
from lmcache.v1.storage.l2.shared_limit import SharedLimit

__all__ = ["SharedFsAdapter", "SharedOptions", "make"]

logger = init_logger(__name__)

_CLOSE_SECONDS = 2.0


class SharedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``{"type": "shared_fs", …}``."""

    path: Folder
    max_gb: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """GiB below which the servers together keep the directory, about. None: somebody else sees to that."""
    check_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0
    """How often one of the servers looks how much there is."""
    sweep_hours: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Age from which an unfinished file is taken for that of a server that died."""
    direct: Direct = "off"
    """O_DIRECT. Network file systems gain nothing by it as a rule, and each has rules of its own."""
    fsync: files.Fsync = "none"
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4


def make(options: Mapping[str, Any]) -> SharedFsAdapter:
    """The adapter of an operator's options.

    Raises:
        ConfigError: for an option that cannot be used.
        StartupError: if the directory cannot be had.
    """
    return SharedFsAdapter(read_options("shared_fs", SharedOptions, options))


class SharedFsAdapter(StorageAdapter):
    """One file per object; others may store and remove it at any moment.

    Raises:
        StartupError: as :func:`make`.
    """

    shared = True

    def __init__(self, options: SharedOptions) -> None:
        self.threads = options.threads
        self._options = options
        self._sweeping = threading.Lock()
        self._ahead = 0.0
        self._limit: SharedLimit | None = None
        with starting("shared_fs", options.path):
            self._root = Root(options.path, "shared_fs")
            with self._root.open() as base:
                if options.max_gb is not None:
                    check_size(self._root, base, options.max_gb)
                self._direct = use_direct(self._root, base, options.direct)
                self._sweep(base)
        if options.max_gb is not None:
            self._limit = SharedLimit(self._root, self._capacity, options.check_seconds, self._on_clock)
            self._limit.start()

    @property
    def _capacity(self) -> int:
        return int((self._options.max_gb or 0) * (1 << 30))

    def _on_clock(self, now: float) -> None:
        self._ahead = now - time.monotonic()

    def _sweep(self, base: int) -> None:
        seconds = self._options.sweep_hours * 3600
        self._next_sweep = time.monotonic() + seconds
        now = clock_of(base)
        self._on_clock(now)
        swept = sweep(base, now - seconds)
        if swept:
            logger.info("%s: removed %d files that nobody finished", self._root.where, swept)

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._root.open() as base:
            infos = each(self._root.where, keys, call, partial(files.present, base), None)
            return [info is not None for info in infos]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        with self._root.open() as base:
            self._sweep_if_due(base)
            act = partial(self._store, base)
            return each(self._root.where, objects, call, act, False, go_on=False)

    def _sweep_if_due(self, base: int) -> None:
        if time.monotonic() < self._next_sweep or not self._sweeping.acquire(blocking=False):
            return
        try:
            self._sweep(base)
        except OSError as exc:
            logger.warning("%s", system_error(self._root.where, exc))
        finally:
            self._sweeping.release()

    def _store(self, base: int, put: Put) -> bool:
        size = file_bytes(len(put.header), len(put.payload))
        found = files.present(base, put.key)
        if found is not None and found.st_size == size and self._is_used(base, put.key):
            return True
        with opened_folder(TMP, base) as tmp:
            name, _ = files.write_temp(tmp, put, self._direct, self._options.fsync)
            try:
                files.publish(base, tmp, name, put.key, self._options.fsync)
            except FileNotFoundError:
                # An NFS server that is asked twice, its first answer lost, finds nothing to rename any more.
                found = files.present(base, put.key)
                return found is not None and found.st_size == size
        return True

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        with self._root.open() as base:
            act = partial(self._load, base)
            return each(self._root.where, wants, call, act, None)

    def _load(self, base: int, want: Want) -> bytes | None:
        direct = self._direct and len(want.payload) >= files.DIRECT_FROM
        try:
            with files.opened_object(base, want.key, direct) as (fd, info):
                header = files.load_object(fd, want, direct, info)
                self._used(fd, info)
                return header
        except FileNotFoundError:
            return None
        except files.Spoiled as exc:  # published whole, so it was damaged since
            logger.warning("%s: %s; removed", self._root.where, exc)
            files.remove(base, want.key)
            return None
        except OSError as exc:
            if exc.errno == errno.ESTALE:  # removed by another client of the NFS server
                return None
            raise

    def _is_used(self, base: int, key: bytes) -> bool:
        """Take an object for used, if it is there."""
        try:
            with files.opened_object(base, key) as (fd, info):
                self._used(fd, info)
        except FileNotFoundError:  # just removed
            return False
        return True

    def _used(self, fd: int, info: os.stat_result) -> None:
        """Renew a file's time of use, by the clock of those that date files there: ours may be another."""
        if abs(time.monotonic() + self._ahead - info.st_mtime) > files.TOUCH_SECONDS:
            with suppress(OSError):  # read-only: the order of use is all that is lost
                os.utime(fd)

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._root.open() as base:
            return each(self._root.where, keys, call, partial(files.remove, base), False)

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        with self._root.open() as base:
            act = partial(files.header_in, base)
            return each(self._root.where, keys, call, act, None)

    def clear(self, call: Call) -> int:
        """Remove every object, whoever stored it; how many."""
        removed = 0
        with self._root.open() as base:
            for folder in files.FOLDERS:
                if call.over:
                    break
                try:
                    keys, _ = names(base, folder)
                except OSError as exc:
                    raise system_error(self._root.where, exc) from None
                removed += sum(self.delete(keys, call))
        return removed

    def usage(self) -> Usage:
        found = self._limit.found if self._limit else None
        return Usage(found.nbytes, found.objects, self._capacity) if found else Usage(-1, -1, self._capacity)

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close(_CLOSE_SECONDS)

    def describe(self) -> str:
        return f"{self._root.path} (fsync {self._options.fsync})"
