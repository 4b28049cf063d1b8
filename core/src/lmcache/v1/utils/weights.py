"""Which weights is this? A fingerprint that changes when a model's files do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lmcache.v1.keys import digest

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tensors", ".gguf", ".npz", ".msgpack", ".h5")
_SAYS_HOW = (".json", ".py")
"""Configuration, and the code that models bring along (trust_remote_code)."""
_SMALL = 1 << 20
_WINDOW = 64 << 10
_WINDOWS = 16


def weights_fingerprint(folder: str | Path) -> str:
    """Hex fingerprint of a local model or adapter folder (or of a single weights file).

    Small files (configuration, code) count with all their bytes; weight files with name, size, modification time and
    bytes sampled over the whole file, since reading hundreds of gigabytes at start is not an option. A copy with
    other modification times is another revision: a miss, never a wrong hit.

    Raises:
        OSError: if the folder cannot be read.
    """
    seen = [[name, *_file_identity(path, path.suffix.lower() in _WEIGHTS)] for name, path in _files(folder)]
    return digest("weights", seen).hex()


def folder_state(folder: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of each file that counts: changes when the files do, and is quick.

    Raises:
        OSError: if the folder cannot be read.
    """
    stats = [(name, path.stat()) for name, path in _files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files(folder: str | Path) -> Iterator[tuple[str, Path]]:
    """The files that count, with their names below the folder."""
    root = Path(folder)
    if root.is_file():
        yield root.name, root
        return
    next(root.iterdir(), None)  # rglob keeps quiet about a folder that is not there or may not be read
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and path.suffix.lower() in (*_WEIGHTS, *_SAYS_HOW) and path.is_file():
            yield str(name), path


def _file_identity(path: Path, is_weights: bool) -> list[int | bytes]:
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size <= _SMALL:
            return [stat.st_size, stat.st_mtime_ns if is_weights else 0, file.read()]
        samples = []
        for i in range(_WINDOWS):  # from the first bytes to the last
            file.seek((stat.st_size - _WINDOW) * i // (_WINDOWS - 1))
            samples.append(file.read(_WINDOW))
        return [stat.st_size, stat.st_mtime_ns, b"".join(samples)]
