"""The installed wheel of the backend under test: its files, its tags, its libraries."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

from lmcache.testing.elf import Library, is_elf, read_library
from lmcache.v1.platform._records import PluginRecord

__all__ = ["GLIBC_OF", "InstalledWheel", "glibc_of"]

GLIBC_OF = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
"""The glibc that the older names of manylinux stand for."""


class InstalledWheel:
    """The distribution that a record came from."""

    def __init__(self, record: PluginRecord) -> None:
        self.distribution: Distribution = distribution(record.distribution)
        self.package = record.value.partition(":")[0].partition(".")[0]

    def files(self) -> list[Path]:
        """All files that the distribution lists, relative to where it is installed."""
        return [Path(str(path)) for path in self.distribution.files or ()]

    def packages(self) -> set[str]:
        """Top-level packages and modules that it lists."""
        tops = {path.parts[0] for path in self.files() if path.suffix in (".py", ".so", ".pyd")}
        return {top.removesuffix(".py").partition(".")[0] for top in tops if top not in ("..", "__pycache__")}

    def owners(self, package: str) -> set[str]:
        """The distributions that have a top-level package."""
        return set(packages_distributions().get(package, ()))

    def requirements(self) -> list[str]:
        """What it requires, without what only extras do."""
        return [line for line in self.distribution.requires or () if "extra ==" not in line]

    def tags(self) -> list[str]:
        """The tags of its WHEEL file, such as ``cp311-cp311-manylinux_2_28_x86_64``."""
        text = self.distribution.read_text("WHEEL") or ""
        return re.findall(r"^Tag: (\S+)$", text, re.MULTILINE)

    def libraries(self) -> Iterator[tuple[Path, Library]]:
        """Every ELF library that it has; of an editable install those in the package's folder."""
        listed = {Path(str(path.locate())) for path in self.distribution.files or ()}
        found = importlib.util.find_spec(self.package)
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            listed |= set(Path(folder).rglob("*"))
        for path in sorted({path.resolve() for path in listed}):
            if re.search(r"\.so(\.\d+)*$", path.name) and path.is_file() and is_elf(path):
                yield path, read_library(path)


def glibc_of(tag: str) -> tuple[int, ...]:
    """The glibc that a platform tag promises to be enough; empty if it promises none."""
    found = re.search(r"manylinux_(\d+)_(\d+)_", tag)
    if found:
        return int(found[1]), int(found[2])
    return next((version for name, version in GLIBC_OF.items() if f"-{name}_" in tag), ())
