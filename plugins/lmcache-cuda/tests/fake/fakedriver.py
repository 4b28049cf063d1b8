"""The fake drivers: built once for what is in this folder, loaded by whoever needs them.

folder = fakedriver.folder("cuda")          # has libcuda.so.1; put it into LD_LIBRARY_PATH of a new process
fake = fakedriver.load("cuda")              # or load it into this one, before the driver is first used
fake.fail("cuMemAlloc_v2", 2)               # the next call fails with code 2
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Fake", "folder", "load"]

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
#: Of each kind: the library's name, and how it is compiled. "old" is a CUDA driver without batched copies.
KINDS = {
    "cuda": ("libcuda.so.1", ()),
    "old": ("libcuda.so.1", ("-DFAKE_OLD",)),
    "rocm": ("libamdhip64.so", ("-DFAKE_HIP",)),
}
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fsanitize=undefined",  # kernels run here as on no device: what is undefined ends the process
    "-fno-sanitize-recover=undefined",
    "-Wall",
    "-Wextra",
    "-Werror",
)


def folder(kind: str) -> Path:
    """Where the fake driver of a kind lies, alone; built if it is not there yet."""
    name, defines = KINDS[kind]
    sources = sorted(HERE.glob("*.cpp"))
    read = [Path(__file__), *sources, HERE / "fake.h", *sorted(CSRC.rglob("*.h"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()[:16]
    kept = Path(tempfile.gettempdir(), f"lmcache-fake-{os.getuid()}", f"{kind}-{digest}")
    if (kept / name).exists():
        return kept
    kept.mkdir(parents=True, exist_ok=True)
    fresh = kept / f"{name}.{os.getpid()}"  # two that build at once do not read half of each other's
    command = [os.environ.get("CXX", "g++"), *FLAGS, *defines, f"-I{CSRC / 'sdk'}", *map(str, sources)]
    command += [f"-Wl,-soname,{name}"]  # so that a later dlopen of the name finds one that is loaded
    done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the fake driver does not build:\n{done.stderr}")
    fresh.rename(kept / name)
    return kept


class Fake:
    """The controls of a fake driver that is loaded; see control.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_launches.restype = ctypes.c_char_p
        library.fake_calls.restype = ctypes.c_long
        library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        library.fake_delay.argtypes = [ctypes.c_long]

    def fail(self, call: str, code: int, after: int = 0, times: int = 1) -> None:
        """Let a call fail, once so many went well; ``times`` -1 is from then on."""
        self._library.fake_fail(call.encode(), code, after, times)

    def calls(self, name: str) -> int:
        """How often an entry was called since the last reset."""
        return int(self._library.fake_calls(name.encode()))

    def launches(self) -> list[tuple[str, tuple[int, int, int], int, int]]:
        """Name, grid, threads and stream of each launch since it was last asked."""
        lines = self._library.fake_launches().decode().splitlines()
        parts = [(name, [int(number) for number in rest]) for name, *rest in map(str.split, lines)]
        return [(name, (x, y, z), threads, stream) for name, (x, y, z, threads, stream) in parts]

    def reset(self) -> None:
        """No faults, counts, delays or held streams."""
        self._library.fake_reset()

    def delay(self, microseconds: int) -> None:
        """Let every piece of work on a stream take so much longer."""
        self._library.fake_delay(microseconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No stream begins anything within."""
        self._library.fake_hold(1)
        try:
            yield
        finally:
            self._library.fake_hold(0)


def load(kind: str = "cuda") -> Fake:
    """Put it into this process under the name that the driver is looked for: a later dlopen finds it."""
    name, _ = KINDS[kind]
    return Fake(ctypes.CDLL(str(folder(kind) / name), mode=ctypes.RTLD_GLOBAL))


if __name__ == "__main__":
    print(folder(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
