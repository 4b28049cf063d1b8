"""A wheel file, unpacked for looking at."""

from __future__ import annotations

import email.message
import email.parser
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lmcache.testing.elf import Library, is_elf, read_library

__all__ = ["OpenedWheel", "opened"]

_NAME = re.compile(
    r"(?P<dist>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<py>[^-]+)-(?P<abi>[^-]+)-(?P<plat>[^-]+)\.whl"
)


@dataclass(frozen=True)
class OpenedWheel:
    """What a wheel holds. `files` are the names in the archive, `folder` where they lie unpacked."""

    path: Path
    folder: Path
    files: tuple[str, ...]
    version: str
    python: str
    platforms: tuple[str, ...]
    """The last part of the file's name, which may list several."""
    unpacked: int
    """Bytes of all files together."""
    info: str
    """The name of the .dist-info folder."""
    metadata: email.message.Message
    libraries: dict[str, Library] = field(default_factory=dict)
    """Every ELF file with a dynamic section, by its name in the archive."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """ELF files that could not be read, and why."""

    def read(self, name: str) -> bytes:
        """A file's bytes; none if it is not there."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else b""

    def text(self, name: str) -> str:
        """A file of the .dist-info folder; empty if it is not there."""
        return self.read(f"{self.info}/{name}").decode("utf-8", "replace")

    def tags(self) -> set[str]:
        """The tags of the WHEEL file."""
        return set(re.findall(r"^Tag: (\S+)$", self.text("WHEEL"), re.MULTILINE))

    def natives(self, stem: str) -> list[str]:
        """The compiled modules called `stem`, whatever Python they are for."""
        return [name for name in self.files if re.fullmatch(rf"{re.escape(stem)}(\.[\w-]+)?\.so", name)]


@contextmanager
def opened(path: Path) -> Iterator[OpenedWheel]:
    """Unpack a wheel into a folder that goes away again.

    Raises:
        ValueError: It is no wheel: not an archive, or its name or its .dist-info is not one of a wheel.
    """
    name = _NAME.fullmatch(path.name)
    if name is None or not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a wheel, NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="audit-") as scratch:
        archive.extractall(scratch)
        rows = [row for row in archive.infolist() if not row.is_dir()]
        infos = {row.filename.partition("/")[0] for row in rows if ".dist-info/" in row.filename}
        if len(infos) != 1:
            raise ValueError(f"{path.name}: {sorted(infos)}: expected one .dist-info folder")
        wheel = OpenedWheel(
            path, Path(scratch), tuple(row.filename for row in rows), name["version"], name["py"],
            tuple(name["plat"].split(".")), sum(row.file_size for row in rows), infos.pop(), email.message.Message(),
        )  # fmt: skip
        yield _read(wheel)


def _read(wheel: OpenedWheel) -> OpenedWheel:
    parsed = email.parser.Parser().parsestr(wheel.text("METADATA"), headersonly=True)
    for name, value in parsed.items():
        wheel.metadata[name] = value
    for name in wheel.files:
        path = wheel.folder / name
        if path.is_file() and is_elf(path):
            try:
                wheel.libraries[name] = read_library(path)
            except ValueError as exc:
                wheel.unreadable[name] = str(exc).replace(str(path), name)
    return wheel
