"""What a shared library asks of the system it is loaded on, read from its dynamic section (System V ABI, ELF)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MACHINES", "Library", "is_elf", "read_library"]

MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}
"""``e_machine`` to the name that wheel tags use."""

_MAGIC = b"\x7fELF"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_VERNEED, _VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF


@dataclass(frozen=True)
class Library:
    """One library. ``versions`` are the symbol versions that it needs, such as ``GLIBC_2.17``."""

    machine: str
    needed: tuple[str, ...]
    search: tuple[str, ...]
    """Folders of RPATH or RUNPATH."""
    versions: tuple[str, ...]

    def newest(self, family: str) -> tuple[int, ...]:
        """The newest version of a family, such as ``GLIBC``, that it needs; empty if none."""
        found = [re.fullmatch(rf"{family}_(\d+(?:\.\d+)*)", version) for version in self.versions]
        return max((tuple(map(int, one[1].split("."))) for one in found if one), default=())


def is_elf(path: Path) -> bool:
    """Whether a file is ELF, whatever it is called."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_library(path: Path) -> Library:
    """What the library at ``path`` needs.

    Raises:
        ValueError: The file is no 64-bit ELF file with a dynamic section, or is damaged.
    """
    try:
        return _Reader(path.read_bytes()).library()
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: a damaged ELF file ({exc})") from None
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        if data[:4] != _MAGIC or data[4] != 2:
            raise ValueError("expected a 64-bit ELF file")
        self._data = data
        self._order = "<" if data[5] == 1 else ">"
        (self._machine,) = self._unpack("H", 18)
        (start,) = self._unpack("Q", 32)
        size, count = self._unpack("HH", 54)
        self._segments = [self._unpack("IIQQQQQQ", start + i * size) for i in range(count)]

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(self._order + form, self._data, offset)

    def library(self) -> Library:
        entries = list(self._entries())
        tags = dict(entries)
        if _STRTAB not in tags:
            raise ValueError("no dynamic section: it is linked statically, or no library")
        self._strings = self._offset(tags[_STRTAB])
        search = [
            part for tag, at in entries if tag in (_RPATH, _RUNPATH) for part in self._text(at).split(":")
        ]
        return Library(
            MACHINES.get(self._machine, str(self._machine)),
            tuple(self._text(at) for tag, at in entries if tag == _NEEDED),
            tuple(search),
            tuple(self._versions(tags.get(_VERNEED, 0), tags.get(_VERNEEDNUM, 0))),
        )

    def _entries(self) -> Iterator[tuple[int, int]]:
        for kind, _, offset, _, _, size, _, _ in self._segments:
            if kind == _PT_DYNAMIC:
                for at in range(offset, offset + size, 16):
                    tag, value = self._unpack("QQ", at)
                    if not tag:
                        return
                    yield tag, value

    def _offset(self, address: int) -> int:
        """Where in the file the byte of a virtual address lies."""
        for kind, _, offset, start, _, size, _, _ in self._segments:
            if kind == _PT_LOAD and start <= address < start + size:
                return offset + address - start
        raise ValueError(f"address {address:#x} is in no segment")

    def _text(self, at: int) -> str:
        start = self._strings + at
        return self._data[start : self._data.index(0, start)].decode()

    def _versions(self, address: int, count: int) -> Iterator[str]:
        """Of the version-need section: per library a record, and per version one behind it."""
        at = self._offset(address) if count else 0
        for _ in range(count):
            _, versions, _, first, following = self._unpack("HHIII", at)
            inner = at + first
            for _ in range(versions):
                _, _, _, name, step = self._unpack("IHHII", inner)
                yield self._text(name)
                inner += step
            at += following
