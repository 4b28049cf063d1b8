"""What a directory of our own holds: read from it at start, kept up to date after that."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from lmcache.v1.storage.accounts import Accounts
from lmcache.v1.storage.l2.adapter import Held
from lmcache.v1.storage.l2.file_root import TMP, new_file, opened, opened_folder
from lmcache.v1.storage.l2.files import FOLDERS, Spoiled, folder_name, inspect, key_of, open_file, remove

__all__ = ["TEMP", "Index", "Walked", "clock_of", "names", "sweep", "walk"]

TEMP = re.compile(r"[0-9]+-[0-9a-f]+\.tmp")
"""Names of files that are being written."""

_WALKERS = 8
"""Threads that look at folders: a cold disk answers several at once sooner than one after the other."""


class _Entry(NamedTuple):
    size: int
    used: float
    blocks: int
    account: str


class Index:
    """Objects by key, and the bytes that they take on the disk. For many threads; no method does I/O.

    Args:
        quotas: what accounts may take, by their names; the caller may change it.
    """

    def __init__(self, quotas: dict[str, int] | None = None) -> None:
        self.accounts = Accounts(quotas)
        """Who has how much of :attr:`used`; all of it together."""
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._bytes = self._coming = 0
        self.of_folder = {name: threading.Lock() for name in FOLDERS}
        """Held where a file of the folder comes or goes, so that it and its entry do so as one."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Bytes on the disk, with those of files that are being written."""
        return self._bytes + self._coming

    def held(self) -> list[Held]:
        """Every object."""
        with self._lock:
            return [
                Held(key, entry.size, entry.used, entry.account, entry.blocks)
                for key, entry in self._entries.items()
            ]

    def expect(self, nbytes: int, capacity: int, account: str = "") -> bool:
        """Count ``nbytes`` that are about to be written, if they fit, also within the account's quota."""
        with self._lock:
            quota = self.accounts.quota(account)
            if self.used + nbytes > capacity:
                return False
            if quota is not None and self.accounts.used(account) + nbytes > quota:
                return False
            self._coming += nbytes
            self.accounts.take(account, nbytes)
            return True

    def settle(self, nbytes: int, account: str = "") -> None:
        """What was expected will not come."""
        with self._lock:
            self._coming -= nbytes
            self.accounts.give(account, nbytes)

    def add(self, held: Held, blocks: int, expected: int = 0) -> None:
        """An object is there, instead of ``expected`` bytes of it."""
        with self._lock:
            account = sys.intern(held.account or "")  # of millions of objects few texts
            self.accounts.take(account, blocks)
            self.accounts.published(account)
            self._bytes += blocks
            self._out(held.key)
            self._entries[held.key] = _Entry(held.size, held.used, blocks, account)
            if expected:
                self._coming -= expected
                self.accounts.give(account, expected)

    def correct(self, key: bytes, blocks: int) -> None:
        """A file's space is not always final when it is closed (delayed allocation, compression)."""
        entry = self._entries.get(key)
        if entry is None or entry.blocks == blocks:
            return
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._bytes += blocks - entry.blocks
                self.accounts.take(entry.account, blocks - entry.blocks)
                self._entries[key] = entry._replace(blocks=blocks)

    def drop(self, key: bytes) -> bool:
        """Forget an object; whether it was known."""
        with self._lock:
            return self._out(key)

    def _out(self, key: bytes) -> bool:
        """Lock held: take an object out of the books, if it is in them."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= entry.blocks
        self.accounts.removed(entry.account)
        self.accounts.give(entry.account, entry.blocks)
        return True


class Walked(NamedTuple):
    """``found``: objects with the bytes that they take. ``spoiled``: files of ours that were no objects and are
    removed. ``foreign``: what is not of our form and was left alone."""

    found: list[tuple[Held, int]]
    spoiled: int
    foreign: int


def walk(base: int) -> Walked:
    """Look at every file by its name and header. Payloads are not read.

    Raises:
        OSError: as the system says.
    """
    with ThreadPoolExecutor(_WALKERS, "lmcache-disk-walk") as pool:
        folders = list(pool.map(lambda name: _walk_folder(base, name), FOLDERS))
    found = [pair for folder in folders for pair in folder.found]
    return Walked(found, sum(f.spoiled for f in folders), sum(f.foreign for f in folders))


def _walk_folder(base: int, name: str) -> Walked:
    found: list[tuple[Held, int]] = []
    spoiled = 0
    keys, foreign = names(base, name)
    if not keys:
        return Walked(found, 0, foreign)
    with opened(name, at=base) as folder:
        for key in keys:
            try:
                fd, info = open_file(folder, key)
            except FileNotFoundError:  # somebody removed it just now
                continue
            try:
                found.append((inspect(fd, key, info), info.st_blocks * 512))
            except Spoiled:
                remove(base, key)
                spoiled += 1
            finally:
                os.close(fd)
    return Walked(found, spoiled, foreign)


def names(base: int, folder: str) -> tuple[Sequence[bytes], int]:
    """Keys of the objects' files of a folder, by their names, and how much else is there.

    Raises:
        OSError: as the system says.
    """
    keys: list[bytes] = []
    foreign = 0
    try:
        with opened(folder, at=base) as fd, os.scandir(fd) as entries:
            for entry in entries:
                key = key_of(entry.name)
                ours = key is not None and folder == folder_name(key) and entry.is_file(follow_symlinks=False)
                if ours and key is not None:
                    keys.append(key)
                else:
                    foreign += 1
    except FileNotFoundError:
        return [], 0
    except NotADirectoryError:
        return [], 1  # a file, or a link to elsewhere
    return keys, foreign


def sweep(base: int, before: float | None = None) -> int:
    """Remove files that were being written; how many. Only what was last written to before that time by the file
    system's own clock, if given.

    Raises:
        OSError: as the system says.
    """
    swept = 0
    with opened_folder(TMP, base) as tmp:
        for name in os.listdir(tmp):
            if not TEMP.fullmatch(name):
                continue
            with suppress(FileNotFoundError):  # its writer, or another server, was quicker
                info = os.stat(name, dir_fd=tmp, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and (before is None or info.st_mtime < before):
                    os.unlink(name, dir_fd=tmp)
                    swept += 1
    return swept


def clock_of(base: int) -> float:
    """What time it is where the files are: servers of one directory need not agree on it, files in it do.

    Raises:
        OSError: as the system says.
    """
    with opened_folder(TMP, base) as tmp:
        name, fd = new_file(tmp)
        try:
            os.utime(fd)  # no byte is written: there may be no room for one
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=tmp)
