"""The ELF reader of the conformance kit, against libraries that are compiled for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.testing.elf import MACHINES, is_elf, read_library
from lmcache.testing.wheel import glibc_of

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs a C compiler on Linux"
)


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    (folder / f"{name}.c").write_text(source)
    target = folder / f"lib{name}.so"
    command = [str(COMPILER), "-shared", "-fPIC", "-o", str(target), str(folder / f"{name}.c"), *flags]
    subprocess.run(command, check=True, capture_output=True)
    return target


@needs_compiler
def test_needed_libraries_search_path_and_versions_are_read(tmp_path: Path) -> None:
    stub = compiled(tmp_path, "torch_cpu", "int torch_one(void) { return 1; }\n")
    source = "#include <string.h>\nint torch_one(void);\n"
    source += "int f(char *a, char *b, int n) { memcpy(a, b, n); return torch_one(); }\n"
    flags = [f"-L{stub.parent}", "-ltorch_cpu", "-Wl,-rpath,$ORIGIN/libs:/usr/lib/foo", "-fno-builtin"]
    library = read_library(compiled(tmp_path, "user", source, *flags))
    assert "libtorch_cpu.so" in library.needed
    assert "libc.so.6" in library.needed
    assert library.search == ("$ORIGIN/libs", "/usr/lib/foo")
    assert library.machine in MACHINES.values()
    assert library.newest("GLIBC") >= (2, 2)
    assert library.newest("CXXABI") == ()


@needs_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf to compare with")
def test_the_interpreter_s_own_libraries_read_as_readelf_reads_them() -> None:
    done = subprocess.run(["ldd", sys.executable], capture_output=True, text=True, check=False)
    paths = [Path(word) for word in done.stdout.split() if word.startswith("/")]
    checked = 0
    for path in [*paths, Path(sys.executable).resolve()]:
        try:
            library = read_library(path)
        except ValueError:
            continue  # an interpreter that is linked statically
        text = subprocess.run(
            ["readelf", "-dW", str(path)], capture_output=True, text=True, check=True
        ).stdout
        needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
        assert list(library.needed) == needed
        checked += 1
    assert checked


@pytest.mark.parametrize(
    "data", [b"", b"text", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(60), b"\x7fELF\x02\x01" + bytes(100)]
)
def test_what_is_no_library_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.so"
    path.write_bytes(data)
    assert is_elf(path) == data.startswith(b"\x7fELF")
    with pytest.raises(ValueError, match=r"odd\.so"):
        read_library(path)


@needs_compiler
def test_a_library_that_is_cut_anywhere_is_refused_and_never_anything_else(tmp_path: Path) -> None:
    data = compiled(tmp_path, "whole", "int f(void) { return 1; }\n").read_bytes()
    path = tmp_path / "cut.so"
    refused = 0
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        try:
            read_library(path)
        except ValueError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    ("tag", "promised"),
    [
        ("cp311-cp311-manylinux_2_28_x86_64", (2, 28)),
        ("cp311-cp311-manylinux2014_aarch64", (2, 17)),
        ("cp310-cp310-manylinux1_x86_64", (2, 5)),
        ("cp311-cp311-linux_x86_64", ()),
        ("py3-none-any", ()),
    ],
)
def test_a_platform_tag_promises_a_glibc(tag: str, promised: tuple[int, ...]) -> None:
    assert glibc_of(tag) == promised
