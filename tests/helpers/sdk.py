"""The vendor SDK under test: compilers that are there, and its kernel bodies as a library in this process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import lmcache

NATIVE = Path(__file__).resolve().parents[1] / "native"
DOC = NATIVE.parents[1] / "docs" / "vendors" / "sdk.md"
INCLUDE = Path(lmcache.get_include())
STRICT = ("-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}")

i32, u32, i64, u64 = ctypes.c_int, ctypes.c_uint, ctypes.c_longlong, ctypes.c_ulonglong
Four = i32 * 4

#: Answers of the SDK's functions.
OK, VERSION, FORMAT, BLOCKS, PLANES, SHAPE, STRIDE, OBJECT, RANGE, WHOLE = range(10)


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class ShapeDesc(ctypes.Structure):
    _fields_ = fields(u32, "size version") + fields(
        i32, "kv_size nl nb bs nh hs element_size block_stride_elems"
    )


class Layout(ctypes.Structure):
    _fields_ = [
        *fields(u32, "size version"),
        *fields(i32, "format whole_pages num_layers element_size"),
        ("shape", i32 * 5),
        *fields(i32, "ptr_first ptr_layer ptr_kv row_width column reserved"),
        ("strides", i64 * 5),
        *fields(i64, "layer_stride plane_bytes"),
    ]


class Object(ctypes.Structure):
    _fields_ = [
        *fields(u32, "size version"),
        *fields(i32, "slots row_width"),
        *fields(i64, "kv_stride layer_stride slot_stride"),
    ]


class Transfer(ctypes.Structure):
    _fields_ = [
        *fields(u32, "size version"),
        *fields(i32, "direction vec planes layers units skip units_per_object units_per_block"),
        *fields(i32, "rows heads run ptr_first ptr_layer ptr_kv"),
        *fields(i64, "limit page_kv page_layer page_block page_slot page_row page_head"),
        *fields(i64, "object_first object_kv object_layer object_unit object_row object_head"),
    ]


class Request(ctypes.Structure):
    _fields_ = [
        *fields(i32, "format direction by_slot token_major"),
        ("shape", i32 * 8),
        *fields(i32, "plane planes"),
        ("widths", ctypes.POINTER(i32)),
        ("pages", ctypes.POINTER(u64)),
        *fields(i32, "num_pages num_objects"),
        ("objects", ctypes.POINTER(u64)),
        ("ids", ctypes.POINTER(i64)),
        *fields(i32, "num_ids skip object_slots"),
        ("grid", Four),
        *fields(i32, "opencl vec"),
    ]


STRUCTURES = (ShapeDesc, Layout, Object, Transfer)


class Rope(ctypes.Structure):
    _fields_ = [
        *fields(i32, "tokens heads rotated interleaved"),
        *fields(i64, "token_stride head_stride element_stride positions"),
    ]


# ------------------------------------------------------------------------------------------------- compilers
def compiler(name: str, remedy: str) -> str:
    """The compiler on PATH; the test is skipped where there is none."""
    found = shutil.which(name) or next(
        (str(p) for p in [Path("/usr/local/cuda/bin", name)] if name == "nvcc" and p.is_file()), None
    )
    if found is None:
        pytest.skip(f"no {name} on PATH: {remedy}")
    return found


def cxx() -> str:
    return compiler("g++", "install a C++ compiler, such as Debian's g++")


def clang() -> list[str]:
    """A clang with front ends for devices; the test is skipped where there is none."""
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "clang"]
    names = ["clang", *(f"clang-{version}" for version in range(25, 14, -1))]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no clang on PATH and no ziglang installed: pip install ziglang, or Debian's clang")
    return [found]


def run(*command: str | Path) -> str:
    """Run a command that must succeed; its output."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# -------------------------------------------------------------------------------------------- the document
def example(language: str) -> str:
    """The block of this language in the SDK's document, of which there is one."""
    blocks = rf"^```{language}\n(.*?)^```$"
    (found,) = re.findall(blocks, DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


def load(path: Path) -> ModuleType:
    """A module from a file, in no package and under no name that others use."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------- emulation
@functools.cache
def emulation() -> ctypes.CDLL:
    """``emulation.cpp``, built once in a session with checks for undefined behaviour, which abort."""
    checks = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "emulation.so")
        flags = ("-std=c++17", "-O1", "-g1", "-shared", "-fPIC", *checks, *STRICT)
        run(cxx(), *flags, NATIVE / "emulation.cpp", "-o", built)
        library = ctypes.CDLL(str(built))
    library.emu_error_text.restype = ctypes.c_char_p
    library.emu_size.restype = u32
    library.emu_chunk_offset.restype = i64
    library.emu_chunk_offset.argtypes = [i32, i32, i64, i32, i64, i32, i64, i32, i64]
    library.emu_copy.argtypes = [u64, u64, i64, ctypes.POINTER(i32)]
    transfers = [ctypes.POINTER(kind) for kind in (Transfer, Layout, Object)]
    library.emu_block_plan.argtypes = [*transfers, i32, i32, i32, i32, u64]
    library.emu_slot_plan.argtypes = [*transfers, i32, i32, i32, u64]
    return library


def new(kind: type[ctypes.Structure], **values: int) -> ctypes.Structure:
    """A structure as ``LMC_INIT`` makes it."""
    return kind(size=ctypes.sizeof(kind), version=1, **values)


def layout(fmt: int, shape: Sequence[int], widths: Sequence[int] = (), plane: int = 0) -> tuple[int, Layout]:
    """Answer of ``lmc_layout_init``, or of ``lmc_layout_init_plane`` where widths are given."""
    made = Layout()
    width = (i32 * len(widths))(*widths) if widths else None
    numbers = (i32 * 8)(*shape)
    answer = emulation().emu_layout(ctypes.byref(made), fmt, numbers, plane, len(widths), width)
    return answer, made


def transfer(
    fmt: int,
    direction: int,
    shape: Sequence[int],
    pages: Sequence[int],
    objects: Sequence[int],
    ids: Sequence[int],
    object_slots: int,
    *,
    skip: int = 0,
    grid: Sequence[int] = (1, 1, 1, 1),
    widths: Sequence[int] = (),
    plane: int = 0,
    by_slot: bool = False,
    token_major: bool = False,
    opencl: bool = False,
) -> int:
    """Plan a transfer and run it over an emulated grid; the width that its copies had.

    Args:
        shape: The eight numbers of ``PageBufferShapeDesc``.
        pages: Addresses of the format's tensors; likewise ``objects``.
        grid: x, y, z, and threads.
        opencl: Run the OpenCL kernel in place of the body: it gathers into one object.

    Raises:
        ValueError: The SDK refused; the argument is its answer.
    """
    request = Request(
        format=fmt,
        direction=direction,
        by_slot=by_slot,
        token_major=token_major,
        shape=(i32 * 8)(*shape),
        plane=plane,
        planes=len(widths),
        widths=(i32 * len(widths))(*widths) if widths else None,
        pages=(u64 * len(pages))(*pages),
        num_pages=len(pages),
        num_objects=len(objects),
        objects=(u64 * len(objects))(*objects),
        ids=(i64 * len(ids))(*ids),
        num_ids=len(ids),
        skip=skip,
        object_slots=object_slots,
        grid=Four(*grid),
        opencl=opencl,
    )
    answer = emulation().emu_transfer(ctypes.byref(request))
    if answer:
        raise ValueError(answer)
    return int(request.vec)
