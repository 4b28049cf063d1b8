"""Which weights is this? A fingerprint that changes when a model's files do."""

from __future__ import annotations

import os
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
    root = Path(folder)
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    seen = []
    for path in files:
        name = path.name if path == root else str(path.relative_to(root))
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        is_weights = path.suffix.lower() in _WEIGHTS
        if is_weights or path.suffix.lower() in _SAYS_HOW:
            seen.append([name, *_file_identity(path, is_weights)])
    return digest("weights", seen).hex()


def _file_identity(path: Path, is_weights: bool) -> list[int | bytes]:
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size <= _SMALL:
            return [stat.st_size, stat.st_mtime_ns if is_weights else 0, file.read()]
        step = max(_WINDOW, (stat.st_size - _WINDOW) // (_WINDOWS - 1))
        samples = []
        for at in range(0, stat.st_size, step):
            file.seek(at)
            samples.append(file.read(_WINDOW))
        return [stat.st_size, stat.st_mtime_ns, b"".join(samples)]
