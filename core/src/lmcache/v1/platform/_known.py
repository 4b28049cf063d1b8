"""Hints for what is not here: the wheel of a known backend, hardware without its wheel, a misspelt name.

The core names no vendor in its code: which wheels exist, and by which device nodes their hardware shows, is
data in ``known_wheels.json``. It is read only when a hint is due.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KnownWheel", "did_you_mean", "hardware_hint", "install_hint", "known_wheels"]

_DATA = Path(__file__).with_name("known_wheels.json")


@dataclass(frozen=True)
class KnownWheel:
    """A published device wheel, and the files by which its hardware shows without importing anything."""

    backend: str
    device_type: str
    wheel: str
    nodes: tuple[str, ...]
    """Patterns below the root of the file system."""
    pci_vendor: str = ""
    """Where nodes of several vendors look alike: what ``pci_file`` must hold."""
    pci_file: str = ""

    def visible(self, root: Path) -> str:
        """The device node that shows this hardware; empty if none does."""
        for pattern in self.nodes:
            for node in sorted(root.glob(pattern)):
                if not self.pci_file or self.pci_vendor == _read(root / self.pci_file.format(node=node.name)):
                    return f"/{node.relative_to(root)}"
        return ""


@functools.cache
def known_wheels() -> tuple[KnownWheel, ...]:
    """The table. Without its file there are no hints, and nothing else is lost."""
    try:
        rows = json.loads(_DATA.read_text(encoding="utf-8"))
    except OSError:
        return ()
    return tuple(KnownWheel(**{**row, "nodes": tuple(row["nodes"])}) for row in rows)


def install_hint(name: str) -> str:
    """What to install for a known backend or device type called ``name``; empty if it is not known."""
    wheels = sorted({known.wheel for known in known_wheels() if name in (known.backend, known.device_type)})
    return f"; {name} is known but not installed: pip install {wheels[0]}" if wheels else ""


def did_you_mean(name: str, names: Iterable[str], known: Iterable[str] = ()) -> str:
    """The closest of ``names`` and ``known`` as a question in parentheses; empty if none is close."""
    close = difflib.get_close_matches(name, dict.fromkeys([*names, *known]), 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def hardware_hint(installed: Iterable[str], root: Path | None = None) -> str:
    """Hardware that is visible and whose wheel is not among the ``installed`` backends, and the remedy."""
    have = set(installed)
    found: dict[str, str] = {}
    for known in known_wheels():
        node = "" if known.backend in have else known.visible(root or Path("/"))
        if node:
            found.setdefault(known.wheel, node)
    return "; ".join(
        f"{node} is here but no backend for it: pip install {wheel}" for wheel, node in found.items()
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except OSError:
        return ""
