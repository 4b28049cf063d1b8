"""What the native module is built from agrees with the core's headers, the driver's, and its own interface."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from native_rig import native

import lmcache

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
CSRC = PROJECT / "csrc"
STUB = PROJECT / "src" / "lmcache_cuda" / "_native.pyi"


def test_the_headers_are_those_of_the_core() -> None:
    """The sdist builds alone, so it has a copy: cp core/src/lmcache/include/lmcache/*.h csrc/sdk/lmcache/"""
    core, copy = Path(lmcache.get_include()) / "lmcache", CSRC / "sdk" / "lmcache"
    assert {path.name: path.read_text() for path in copy.iterdir()} == {
        path.name: path.read_text() for path in core.iterdir()
    }


def test_the_abi_is_the_core_s() -> None:
    from lmcache.v1.platform.base.op_contract import NATIVE_ABI

    assert native.LMCACHE_NATIVE_ABI == NATIVE_ABI


# ------------------------------------------------------------------------------------------------------ the stub
def stub() -> ast.Module:
    return ast.parse(STUB.read_text(encoding="utf-8"))


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def test_the_module_has_what_its_stub_declares_and_nothing_else() -> None:
    declared = {node.name for node in stub().body if isinstance(node, ast.FunctionDef)}
    declared |= {
        node.target.id
        for node in stub().body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    } - {"Table", "Integers"}
    assert declared == {name for name in dir(native) if not name.startswith("_")}


def test_functions_take_the_parameters_of_the_stub() -> None:
    for node in stub().body:
        if not isinstance(node, ast.FunctionDef):
            continue
        text = getattr(native, node.name).__doc__.splitlines()[0]
        inside = text[text.index("(") + 1 : text.rindex(")")]
        names = re.findall(r"(\w+): ", inside)
        assert names == parameters(node), node.name
        assert inside.count(" = ") == len(node.args.defaults) + sum(
            d is not None for d in node.args.kw_defaults
        )


# ----------------------------------------------------------------------------------------------------- the driver
def cuda_include() -> Path:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folders = [Path(nvcc).resolve().parents[1] / "include", Path("/usr/local/cuda/include")]
    found = next((folder for folder in folders if (folder / "cuda.h").is_file()), None)
    if found is None:
        pytest.skip("no cuda.h: it comes with the CUDA toolkit")
    return found


ABI = """
#include <cuda.h>
#include <type_traits>
#include "entries.h"

// The same number of arguments, each of the same size and passed in the same way.
template <typename A, typename B> struct alike {
    static constexpr bool value = sizeof(A) == sizeof(B) && std::is_class<A>::value == std::is_class<B>::value;
};
template <typename T, typename F> struct same : std::false_type {};
template <typename... A, typename... B> struct same<CUresult(A...), int(B...)> {
    template <bool equal, typename = void> struct each { static constexpr bool value = false; };
    template <typename T> struct each<true, T> { static constexpr bool value = (alike<A, B>::value && ...); };
    static constexpr bool value = each<sizeof...(A) == sizeof...(B)>::value;
};
static_assert(sizeof(CUmemAllocationProp) == sizeof(lmc_allocation), "CUmemAllocationProp");
static_assert(offsetof(CUmemAllocationProp, location) == offsetof(lmc_allocation, location), "its location");
static_assert(offsetof(CUmemAllocationProp, requestedHandleTypes) == offsetof(lmc_allocation, handle_types), "kinds");
static_assert(sizeof(CUmemAccessDesc) == sizeof(lmc_access), "CUmemAccessDesc");
static_assert(sizeof(CUmemcpyAttributes) == sizeof(lmc_copy_attributes), "CUmemcpyAttributes");
static_assert(sizeof(CUipcMemHandle) == sizeof(lmc_handle64), "CUipcMemHandle");
static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1, "the order of batched copies");
static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS == 122, "device.cpp");
static_assert(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED == 103, "device.cpp");
static_assert(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == 102, "device.cpp");
static_assert(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED == 99, "device.cpp");
static_assert(CU_DEVICE_ATTRIBUTE_INTEGRATED == 18, "device.cpp");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75, "device.cpp");
static_assert(CU_STREAM_WAIT_VALUE_GEQ == 0 && CU_STREAM_WRITE_VALUE_DEFAULT == 0, "streams.cpp");
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1, "streams.cpp, shared.cpp");
static_assert(CU_EVENT_BLOCKING_SYNC == 1 && CU_EVENT_DISABLE_TIMING == 2 && CU_EVENT_INTERPROCESS == 4, "streams.cpp");
static_assert(CUDA_ERROR_NOT_READY == LMC_NOT_READY && CUDA_ERROR_NO_DEVICE == LMC_NO_DEVICE, "entries.h");
static_assert(CUDA_ERROR_NO_BINARY_FOR_GPU == LMC_NO_BINARY, "entries.h");
static_assert(CUDA_ERROR_UNSUPPORTED_PTX_VERSION == LMC_PTX_TOO_NEW, "entries.h");
static_assert(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == LMC_HOST_ALREADY_REGISTERED, "entries.h");
"""


def entries() -> list[tuple[str, str, str]]:
    """Field, CUDA's name and arguments of every entry of the table."""
    text = (CSRC / "entries.h").read_text().replace("\\\n", " ")
    found = re.findall(r'ENTRY\((\w+), "(\w*)", "\w*", \d, +(\((?:[^()]|\([^()]*\))*\))\)', text)
    assert len(found) == text.count("ENTRY(") - 1  # that of the comment
    return [(field, name, arguments) for field, name, arguments in found if name]


def test_every_entry_is_declared_as_the_driver_s_header_declares_it(tmp_path: Path) -> None:
    include = cuda_include()
    header = (include / "cuda.h").read_text(encoding="utf-8", errors="replace")
    lines = [ABI]
    for field, name, arguments in entries():
        base = re.sub(r"_v2$", "", name)
        if name == "cuMemcpyBatchAsync":  # as it was before CUDA 13: its header is not here
            continue
        assert re.search(rf"\bCUresult CUDAAPI {base}\(", header), name
        if re.search(rf"\bCUresult CUDAAPI {name}\(", header) is None:
            assert re.search(rf"#define\s+{base}\s.*\b{name}\b", header), (
                name
            )  # what the plain name means today
        lines.append(
            f'static_assert(same<std::remove_pointer_t<decltype(&{base})>, int{arguments}>::value, "{field}");'
        )
    source = tmp_path / "abi.cpp"
    source.write_text("#include <cstddef>\n" + "\n".join(lines))
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", f"-I{CSRC}", f"-I{CSRC / 'sdk'}", str(source)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000]


# ------------------------------------------------------------------------------------------------------ the image
def test_the_module_carries_the_images_that_it_names() -> None:
    data = Path(native.__file__).read_bytes()
    assert native.IMAGES["cuda"] or native.IMAGES["rocm"]
    if native.IMAGES["cuda"]:
        assert b"\x50\xed\x55\xba" in data  # a fatbin
        assert {"sm_80", "sm_90", "compute_90"} <= set(native.IMAGES["cuda"].split())
        assert native.IMAGE_DRIVER_VERSION >= 12080
    if native.IMAGES["rocm"]:
        for target in native.IMAGES["rocm"].split():
            assert f"amdgcn-amd-amdhsa--{target}".encode() in data
    else:
        assert b"__CLANG_OFFLOAD_BUNDLE__" not in data


def test_the_module_needs_the_c_library_and_its_loader_alone() -> None:
    text = subprocess.run(
        ["readelf", "-dW", str(native.__file__)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.*)\]", text)}
    assert needed <= {
        "libc",
        "libm",
        "libstdc++",
        "libgcc_s",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
        "libdl",
        "libpthread",
    }


# ----------------------------------------------------------------------------------------------------- the builds
@pytest.mark.parametrize(
    ("targets", "environment", "words"),
    [
        ("", {}, "LMCACHE_CUDA_TARGETS is empty: expected cuda, rocm or cuda;rocm"),
        ("cuda;xpu", {}, "target 'xpu': expected cuda or rocm"),
        ("cuda", {"CUDACXX": "/bin/false"}, "/bin/false --version: answered 1: expected nvcc"),
        ("rocm", {"HIPCXX": "/bin/false"}, "/bin/false --version: expected clang 17 or later"),
    ],
)
def test_a_build_without_its_compiler_ends(
    targets: str, environment: dict[str, str], words: str, tmp_path: Any
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake on PATH")
    fake = tmp_path / "pybind11"  # no module is built here: what find_package finds must only let CMake go on
    fake.mkdir()
    (fake / "pybind11Config.cmake").write_text(
        "function(pybind11_add_module name)\n list(REMOVE_ITEM ARGN NO_EXTRAS)\n"
        " add_library(${name} MODULE ${ARGN})\nendfunction()\n"
    )
    (fake / "pybind11ConfigVersion.cmake").write_text("set(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
    command = [cmake, "-S", str(PROJECT), "-B", str(tmp_path / "build"), f"-Dpybind11_DIR={fake}"]
    done = subprocess.run(
        [*command, f"-DLMCACHE_CUDA_TARGETS={targets}"], capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
