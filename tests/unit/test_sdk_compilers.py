"""Compilers accept the SDK: C and C++ on the host, front ends of devices, CMake, and the module that docs show."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import lmcache
from helpers import sdk
from lmcache.errors import DeviceError

C_HEADERS = ("abi.h", "kv_formats.h", "kv_index.h", "layout.h", "transfer.h")
GCC = "install a C compiler, such as Debian's gcc"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project of the document."""
    (tmp_path / "CMakeLists.txt").write_text(sdk.example("cmake"))
    (tmp_path / "module.cpp").write_text(sdk.example("cpp"))
    (tmp_path / "native.py").write_text(sdk.example("python"))
    return tmp_path


def moves_a_page(library: Path) -> bool:
    """Whether the built module gathers block 1 of [NB, NH, BS, HS] = [2, 2, 2, 2] and refuses format 19."""
    call = ctypes.CDLL(str(library)).foo_block_transfer
    pages, chunk = (ctypes.c_ubyte * 16)(*range(16)), (ctypes.c_ubyte * 8)()
    shape = (ctypes.c_int * 8)(1, 1, 2, 2, 2, 2, 1, 0)
    page_table = (ctypes.c_ulonglong * 1)(ctypes.addressof(pages))
    chunk_table = (ctypes.c_ulonglong * 1)(ctypes.addressof(chunk))
    ids = (ctypes.c_longlong * 1)(1)
    answers = [
        call(fmt, shape, page_table, 1, chunk_table, 1, 2, 1, 0, 1, page_table, ids, None) for fmt in (19, 12)
    ]
    return answers == [sdk.FORMAT, sdk.OK] and list(chunk) == [8, 9, 12, 13, 10, 11, 14, 15]


# -------------------------------------------------------------------------------------------------- the host
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_the_c_headers_are_c(standard: str, tmp_path: Path) -> None:
    gcc = sdk.compiler("gcc", GCC)
    flags = (f"-std={standard}", "-pedantic", *sdk.STRICT)
    sdk.run(gcc, *flags, "-c", sdk.NATIVE / "check.c", "-o", tmp_path / "check.o")


@pytest.mark.parametrize("header", [*C_HEADERS, "kv_body.h"])
def test_every_header_stands_alone(header: str, tmp_path: Path) -> None:
    only = tmp_path / "only.cpp"
    only.write_text(f"#include <lmcache/{header}>\n#include <lmcache/{header}>\nint main() {{ return 0; }}\n")
    sdk.run(sdk.cxx(), "-std=c++17", "-pedantic", *sdk.STRICT, "-fsyntax-only", only)
    if header in C_HEADERS:
        gcc = sdk.compiler("gcc", GCC)
        sdk.run(gcc, "-x", "c", "-std=c99", "-pedantic", *sdk.STRICT, "-fsyntax-only", only)


@pytest.mark.parametrize("standard", ["c++14", "c++17", "c++20"])
def test_the_bodies_are_plain_cpp_without_a_library(standard: str) -> None:
    freestanding = ("-ffreestanding", "-nostdinc", "-fno-exceptions", "-fno-rtti", "-Wconversion")
    flags = (f"-std={standard}", "-pedantic", *freestanding, *sdk.STRICT)
    sdk.run(sdk.cxx(), *flags, "-fsyntax-only", sdk.NATIVE / "emulation.cpp")


# ----------------------------------------------------------------------------------------------- front ends
def test_the_bodies_are_cuda(project: Path) -> None:
    sdk.cxx()  # nvcc calls it
    nvcc = sdk.compiler(
        "nvcc", "install the CUDA toolkit, or from PyPI nvidia-cuda-nvcc, -runtime, -crt, -cccl"
    )
    flags = ("-std=c++17", "-arch=sm_80", "-Werror", "all-warnings", f"-I{sdk.INCLUDE}", "-x", "cu")
    for source in (sdk.NATIVE / "kernel.cu", project / "module.cpp"):
        built = project / "kernels.fatbin"
        sdk.run(nvcc, *flags, "-fatbin", source, "-o", built)
        assert b"sm_80" in built.read_bytes() or built.stat().st_size > 1000


def test_the_bodies_are_hip(tmp_path: Path) -> None:
    alone = ("-nogpulib", "-nogpuinc", "--cuda-device-only", "--offload-arch=gfx90a")
    built = tmp_path / "kernels.s"
    sdk.run(
        *sdk.clang(), "-x", "hip", *alone, "-O3", *sdk.STRICT, "-S", sdk.NATIVE / "kernel.cu", "-o", built
    )
    assert {"move:", "rotate:", "copy:"} <= set(re.findall(r"^\w+:", built.read_text(), re.MULTILINE))


def test_the_bodies_are_sycl() -> None:
    """The front end alone: no SYCL library is needed to have it check what a device may run."""
    flags = ("-x", "c++", "-std=c++17", "-Xclang", "-fsycl-is-device", *sdk.STRICT)
    sdk.run(*sdk.clang(), *flags, "-fsyntax-only", sdk.NATIVE / "kernel.cu")


@pytest.mark.parametrize("standard", ["CL1.2", "CL2.0"])
@pytest.mark.parametrize("target", ["", "--target=spir64-unknown-unknown"])
def test_indices_and_structures_are_opencl_c(standard: str, target: str) -> None:
    """Without the builtins' header, which not every clang brings; the kernel declares what it calls."""
    flags = ("-x", "cl", f"-cl-std={standard}", "-cl-no-stdinc", *filter(None, [target]), *sdk.STRICT)
    sdk.run(*sdk.clang(), *flags, "-fsyntax-only", sdk.NATIVE / "kernel.cl")


def test_a_front_end_refuses_what_it_must() -> None:
    """The checks above can fail: C++ is no OpenCL C."""
    with pytest.raises(AssertionError, match="error"):
        sdk.run(
            *sdk.clang(), "-x", "cl", "-cl-no-stdinc", *sdk.STRICT, "-fsyntax-only", sdk.NATIVE / "kernel.cu"
        )


# ------------------------------------------------------------------------------- CMake, and the document
def configure(project: Path, *options: str) -> str:
    cmake = sdk.compiler("cmake", "pip install cmake, or Debian's cmake")
    sdk.cxx()
    return sdk.run(cmake, "-S", project, "-B", project / "build", "-DCMAKE_BUILD_TYPE=Release", *options)


@pytest.mark.parametrize(
    "place",
    [
        f"-Dlmcache_DIR={lmcache.get_cmake_dir()}",
        f"-Dlmcache_ROOT={Path(lmcache.get_cmake_dir()).parent}",  # as scikit-build-core sets it
    ],
    ids=["by hand", "by the entry point"],
)
def test_the_documented_module_builds_with_cmake_and_moves_a_page(project: Path, place: str) -> None:
    configure(project, place, f"-DCMAKE_CXX_FLAGS={' '.join(sdk.STRICT[:3])}")
    sdk.run(sdk.compiler("cmake", ""), "--build", project / "build")
    assert moves_a_page(project / "build" / "foo.so")


@pytest.mark.parametrize(("wanted", "fits"), [("1.0", True), ("1", True), ("1.99", False), ("2.0", False)])
def test_cmake_takes_this_major_version_and_no_later_minor(project: Path, wanted: str, fits: bool) -> None:
    lists = "cmake_minimum_required(VERSION 3.20...4.4)\nproject(foo LANGUAGES NONE)\n"
    (project / "CMakeLists.txt").write_text(f"{lists}find_package(lmcache {wanted} CONFIG REQUIRED)\n")
    place = f"-Dlmcache_DIR={lmcache.get_cmake_dir()}"
    if fits:
        configure(project, place)
    else:
        with pytest.raises(AssertionError, match="compatible with requested"):
            configure(project, place)


def test_the_documented_module_is_loaded_if_its_abi_is_the_cores(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = project / "foo.so"
    sdk.run(sdk.cxx(), "-std=c++17", "-shared", "-fPIC", *sdk.STRICT, project / "module.cpp", "-o", built)
    assert moves_a_page(built)
    native = sdk.load(project / "native.py")
    assert native.FooKernels(str(built))
    monkeypatch.setattr(native, "NATIVE_ABI", 2)
    with pytest.raises(DeviceError, match="native ABI 1: expected 2"):
        native.FooKernels(str(built))
