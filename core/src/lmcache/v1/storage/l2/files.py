"""Objects as files in a directory: what ``disk`` and ``shared_fs`` have in common.

::

    <path>/<kind>-1/            the tier's own directory; 1 is the version of the form
        4f/<128 hex digits>.kv  an object; the folder is the key's last byte, in which keys differ most
        tmp/<…>.tmp             a file that is being written

One file per object, not segments that hold many: objects are of 1 to 64 MB, so a file costs little beside them;
an object goes by one unlink and its space is free at once, with no compaction that writes what is kept again; a
rename publishes an object whole or not at all; and several servers can share the form.

What is not ours is not followed (links) and not removed (names that are not of this form).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from lmcache.v1.storage.l2.adapter import Held, Put, Want
from lmcache.v1.storage.l2.envelope import EnvelopeError, unpack
from lmcache.v1.storage.l2.file_io import file_bytes, read_header, read_object, through_cache, write_object
from lmcache.v1.storage.l2.file_root import DIRECTORY, new_file, opened, opened_folder

__all__ = [
    "DIRECT_FROM",
    "FOLDERS",
    "TOUCH_SECONDS",
    "Fsync",
    "Spoiled",
    "file_name",
    "folder_name",
    "header_in",
    "inspect",
    "key_of",
    "load_object",
    "open_file",
    "opened_object",
    "present",
    "publish",
    "remove",
    "write_temp",
]

Fsync = Literal["none", "data", "full"]

FOLDERS = [f"{i:02x}" for i in range(256)]
TOUCH_SECONDS = 600
"""How old a file's time of use may get before a load renews it: order of use, at little cost."""
DIRECT_FROM = 256 << 10
"""Payloads below go through the page cache: to wait for the device costs them more than a copy does."""
_NAME = re.compile(r"([0-9a-f]{128})\.kv")
_READ = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # not blocking: a FIFO has nobody at its end
_NO_FILE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE, errno.ENXIO})
"""Not there, a link, a link or file for a folder, gone from the server, a socket."""


class Spoiled(EnvelopeError):
    """A file that should be an object's, and is not. Its bytes are of no use to anybody."""


def file_name(key: bytes) -> str:
    return f"{key.hex()}.kv"


def folder_name(key: bytes) -> str:
    return f"{key[-1]:02x}"


def key_of(name: str) -> bytes | None:
    """The key of an object's file, None for any other name."""
    match = _NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def write_temp(tmp: int, put: Put, direct: bool, fsync: Fsync) -> tuple[str, int]:
    """Write an object to a new file in the folder ``tmp``; its name, and the bytes that it takes on the disk.

    Raises:
        OSError: as the system says, a late word at close included; no file is left then.
    """
    direct = direct and len(put.payload) >= DIRECT_FROM
    name, fd = new_file(tmp, os.O_WRONLY | (os.O_DIRECT if direct else 0))
    try:
        try:
            write_object(fd, put.header, put.payload, direct)
            if fsync != "none":
                os.fdatasync(fd) if fsync == "data" else os.fsync(fd)
        finally:
            os.close(fd)
        return name, os.stat(name, dir_fd=tmp, follow_symlinks=False).st_blocks * 512
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell; the sweep finds what stays
            os.unlink(name, dir_fd=tmp)
        raise


def open_file(folder: int, key: bytes, direct: bool = False) -> tuple[int, os.stat_result]:
    """The file of an object in its folder, open for reading, and what the system says of it.

    Raises:
        FileNotFoundError: if there is none; a link or a directory is none.
        OSError: as the system says.
    """
    try:
        fd = os.open(file_name(key), _READ | (os.O_DIRECT if direct else 0), dir_fd=folder)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            raise FileNotFoundError(errno.ENOENT, "no object's file") from None
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "no object's file")
    return fd, info


@contextmanager
def opened_object(base: int, key: bytes, direct: bool = False) -> Iterator[tuple[int, os.stat_result]]:
    """As :func:`open_file`, from the tier's directory; closed at the end. A folder that is a link is none."""
    try:
        folder = os.open(folder_name(key), DIRECTORY, dir_fd=base)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            raise FileNotFoundError(errno.ENOENT, "no object's file") from None
        raise
    try:
        fd, info = open_file(folder, key, direct)
    finally:
        os.close(folder)
    try:
        yield fd, info
    finally:
        os.close(fd)


def load_object(fd: int, want: Want, direct: bool, info: os.stat_result) -> bytes | None:
    """Fill the payload from an open file; its header. None: it is the object, but of another size.

    Raises:
        Spoiled: if it is no object.
        OSError: as the system says.
    """
    header = read_object(fd, info.st_size, want.payload, direct)
    if header is None:
        through_cache(fd)
        inspect(fd, want.key, info)
    return header


def inspect(fd: int, key: bytes, info: os.stat_result) -> Held:
    """What the open file of ``key`` holds, by its header and its length; the payload is not read.

    Raises:
        Spoiled: if it is not that object in full.
        OSError: as the system says.
    """
    header = read_header(fd)
    if header is None:
        raise Spoiled(f"{file_name(key)}: does not begin with a header")
    try:
        found = unpack(header)
    except EnvelopeError as exc:
        raise Spoiled(f"{file_name(key)}: {exc}") from None
    if found.key != key:
        raise Spoiled(f"{file_name(key)}: is the object {found.key.hex()[:16]}…")
    expected = file_bytes(len(header), found.size)
    if info.st_size != expected:
        raise Spoiled(f"{file_name(key)}: {info.st_size} bytes, expected {expected}")
    used = max(info.st_atime, info.st_mtime)
    return Held(key, len(header) + found.size, used, found.account, info.st_blocks * 512)


def header_in(base: int, key: bytes) -> bytes | None:
    """The header of an object, None if it is not there.

    Raises:
        OSError: as the system says.
    """
    try:
        with opened_object(base, key) as (fd, _):
            return read_header(fd)
    except FileNotFoundError:
        return None


def present(base: int, key: bytes) -> os.stat_result | None:
    """What the system says of an object's file, None if there is none.

    Raises:
        OSError: as the system says.
    """
    try:
        with opened(folder_name(key), at=base) as folder:
            info = os.stat(file_name(key), dir_fd=folder, follow_symlinks=False)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            return None
        raise
    return info if stat.S_ISREG(info.st_mode) else None


def publish(base: int, tmp: int, temp: str, key: bytes, fsync: Fsync) -> None:
    """Give the finished file ``temp`` its name, in the place of one that has it.

    Raises:
        OSError: as the system says; the file is gone then, under both names.
    """
    durable = fsync == "full"
    try:
        with opened_folder(folder_name(key), base, durable) as folder:
            os.rename(temp, file_name(key), src_dir_fd=tmp, dst_dir_fd=folder)
            if durable:
                try:
                    os.fsync(folder)
                except OSError:
                    os.unlink(file_name(key), dir_fd=folder)
                    raise
    except OSError:
        with suppress(OSError):  # the first error is the one to tell
            os.unlink(temp, dir_fd=tmp)
        raise


def remove(base: int, key: bytes) -> bool:
    """Remove an object's file, if it is there; True, that it is not there any more.

    Raises:
        OSError: as the system says.
    """
    try:
        with opened(folder_name(key), at=base) as folder:
            os.unlink(file_name(key), dir_fd=folder)
    except OSError as exc:
        if exc.errno not in _NO_FILE:
            raise
    return True
