"""Wheels made by hand for the tests of the audit: a sound one of `lmcache-cuda`, and changes that break it."""

from __future__ import annotations

import base64
import hashlib
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_28_x86_64"
INFO = "lmcache_cuda-1.0.0.dist-info"
MODULE = "lmcache_cuda/_native.cpython-311-x86_64-linux-gnu.so"

METADATA = """Metadata-Version: 2.4
Name: lmcache-cuda
Version: 1.0.0
Requires-Python: >=3.10
Requires-Dist: lmcache<2,>=1.0
Requires-Dist: torch>=2.6
Requires-Dist: pytest; extra == "test"
License-Expression: Apache-2.0
License-File: LICENSE

Text that is no header: Name: other
"""
POINTS = """[lmcache.device_plugins]
cuda = lmcache_cuda.spec:CudaDeviceSpec
rocm = lmcache_cuda.spec:RocmDeviceSpec
"""


def fatbin(*targets: tuple[int, int, int]) -> bytes:
    """A fat binary of entries (kind, architecture, flags) with 16 bytes of image each."""
    body = b""
    for kind, arch, flags in targets:
        head = struct.pack("<HHIQ", kind, 0x101, 64, 16) + bytes(12) + struct.pack("<I", arch)
        head += bytes(8) + struct.pack("<Q", flags)
        body += head.ljust(64, b"\0") + b"image".ljust(16, b".")
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def code_object(processor: int, abi: int = 3) -> bytes:
    """The head of an AMD code object; `abi` 3 is code object version 5."""
    head = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    head[8] = abi
    struct.pack_into("<H", head, 18, 224)
    struct.pack_into("<I", head, 48, 0x500 | processor)
    return bytes(head)


CUBINS = fatbin(*((2, arch, 0x11) for arch in (80, 90, 100, 120)), (1, 90, 0x11))
CODE_OBJECTS = code_object(0x3F) + code_object(0x4C)


def compiled(
    folder: Path, name: str, *flags: str, images: bytes = CUBINS + CODE_OBJECTS, init: str = "PyInit__native"
) -> bytes:
    """A library as an extension module is one: an init function, and device code in its read-only data."""
    numbers = ",".join(map(str, images)) or "0"
    text = "#include <string.h>\n__attribute__((aligned(16), used)) "
    text += f"static const unsigned char code[] = {{{numbers}}};\n"
    text += f"void *{init}(void *a, void *b, int n) {{ return memcpy(a, n ? b : code, n); }}\n"
    source, target = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(text)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler: found neither cc nor gcc on PATH"
    # Not the linker's default, which differs between systems: no RPATH, and libc by its name.
    command = [compiler, "-shared", "-fPIC", "-fno-builtin", "-o", str(target), str(source), *flags]
    subprocess.run(command, check=True, capture_output=True)
    return target.read_bytes()


@dataclass
class MadeWheel:
    """Files of a wheel, and its tags. `write` makes RECORD unless one was put there."""

    module: bytes
    python: str = "cp311"
    platform: str = PLATFORM
    told_platform: str = ""
    files: dict[str, bytes | None] = field(default_factory=dict)
    """More files, or others; None takes one out."""
    twice: str = ""
    """A file that is in the archive twice."""

    def contents(self) -> Mapping[str, bytes]:
        wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {self.python}-{self.python}-"
        whole: dict[str, bytes | None] = {
            "lmcache_cuda/__init__.py": b"",
            "lmcache_cuda/spec.py": b"class CudaDeviceSpec: ...\nclass RocmDeviceSpec: ...\n",
            "lmcache_cuda/_native.pyi": b"",
            "lmcache_cuda/py.typed": b"",
            MODULE: self.module,
            f"{INFO}/METADATA": METADATA.encode(),
            f"{INFO}/WHEEL": f"{wheel}{self.told_platform or self.platform}\n".encode(),
            f"{INFO}/entry_points.txt": POINTS.encode(),
            f"{INFO}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
            **self.files,
        }
        return {name: data for name, data in whole.items() if data is not None}

    def write(self, folder: Path) -> Path:
        path = folder / f"lmcache_cuda-1.0.0-{self.python}-{self.python}-{self.platform}.whl"
        contents = dict(self.contents())
        rows = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in contents.items()]
        contents.setdefault(f"{INFO}/RECORD", "\n".join([*rows, f"{INFO}/RECORD,,", ""]).encode())
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in contents.items():
                archive.writestr(name, data)
            if self.twice:
                archive.writestr(self.twice, contents[self.twice])
        return path


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
