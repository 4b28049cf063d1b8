"""The fake runtime: built once for what is in this folder, and loaded under the name that the real one has."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["NAME", "folder", "load"]

NAME = "libnrt.so.1"
_SOURCE = Path(__file__).resolve().with_name("nrt.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}")


def folder(*defines: str) -> Path:
    """Where the fake lies, alone; built if it is not there yet."""
    read = b"".join(path.read_bytes() for path in (_SOURCE, Path(__file__))) + repr(defines).encode()
    kept = Path(
        tempfile.gettempdir(), f"lmcache-fake-{os.getuid()}", f"nrt-{hashlib.sha256(read).hexdigest()[:16]}"
    )
    if (kept / NAME).exists():
        return kept
    kept.mkdir(parents=True, exist_ok=True)
    fresh = kept / f"{NAME}.{os.getpid()}"  # two that build at once do not read half of each other's
    command = [os.environ.get("CXX", "g++"), *_FLAGS, *defines, str(_SOURCE), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the fake runtime does not build:\n{done.stderr}")
    fresh.rename(kept / NAME)
    return kept


def load() -> ctypes.CDLL:
    """Put it into this process under its name: a later dlopen of that finds it."""
    fake = ctypes.CDLL(str(folder() / NAME))
    fake.fake_tensor.restype = fake.fake_data.restype = ctypes.c_void_p
    fake.fake_tensor.argtypes = [ctypes.c_size_t]
    for name in ("fake_data", "fake_free"):
        getattr(fake, name).argtypes = [ctypes.c_void_p]
    return fake
