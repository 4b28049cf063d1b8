"""Device code inside a file: CUDA fat binaries, AMD code objects and SPIR-V, found by their magic numbers.

An image is named as compilers name its target: `sm_90`, `sm_90a` (machine code), `compute_90` (PTX), `gfx942`. A code
object that is not of version 5, which all of today's ROCm load, says so: `gfx942-v6`. SPIR-V is for no one device, so
that it has its own version: `spirv-1.4`.
A reader of its own, because `cuobjdump` is not everywhere, says nothing of AMD, and is compared with in the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["AMD_PROCESSORS", "device_images"]

_FATBIN = struct.pack("<I", 0xBA55ED50)
_FATBIN_HEAD = struct.Struct("<IHHQ")  # magic, version, size of this header, bytes behind it
_ENTRY_HEAD = struct.Struct("<HHIQ")  # kind, version, size of this header, bytes behind it
_ARCH_AT, _FLAGS_AT = 28, 40  # from an entry's beginning
_KINDS = {1: "compute_", 2: "sm_"}
_SUFFIXES = ((1 << 20, "a"), (1 << 21, "f"))  # flags: for this architecture only, for its family

_ELF64 = b"\x7fELF\x02\x01"
_EM_AMDGPU, _ABI_AT, _MACHINE_AT, _E_FLAGS_AT = 224, 8, 18, 48
_ABI_5 = 3  # EI_ABIVERSION of code object version 5

_SPIRV = struct.pack("<I", 0x07230203)
_SPIRV_HEAD = struct.Struct("<IBBBB3I")  # magic, 0, minor, major, 0, generator, bound of ids, 0

AMD_PROCESSORS = {
    0x2F: "gfx906", 0x30: "gfx908", 0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950", 0x36: "gfx1030",
    0x41: "gfx1100", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200", 0x4E: "gfx1201",
}  # fmt: skip
"""EF_AMDGPU_MACH, the low byte of a code object's e_flags."""


def device_images(data: bytes) -> Iterator[str]:
    """The target of every image in `data`.

    Raises:
        ValueError: A fat binary is cut off, or holds an entry of no known kind.
    """
    yield from _cuda(data)
    yield from _amd(data)
    yield from _spirv(data)


def _cuda(data: bytes) -> Iterator[str]:
    at = data.find(_FATBIN)
    while at >= 0:
        _, version, head, size = _unpack(_FATBIN_HEAD, data, at)
        start, end = at + head, at + head + size
        if version != 1 or end > len(data):
            raise ValueError(
                f"fat binary at {at}: version {version}, {size} bytes: expected 1, and all there"
            )
        yield from _entries(data, start, end)
        at = data.find(_FATBIN, end)


def _entries(data: bytes, at: int, end: int) -> Iterator[str]:
    while at < end:
        kind, _, head, size = _unpack(_ENTRY_HEAD, data, at)
        if kind not in _KINDS or at + head + size > end:
            raise ValueError(f"fat binary's entry at {at}: kind {kind}, {size} bytes: expected kind 1 or 2")
        (arch,) = struct.unpack_from("<I", data, at + _ARCH_AT)
        (flags,) = struct.unpack_from("<Q", data, at + _FLAGS_AT)
        suffix = next((letter for bit, letter in _SUFFIXES if flags & bit), "")
        yield f"{_KINDS[kind]}{arch}{suffix}"
        at += head + size


def _amd(data: bytes) -> Iterator[str]:
    at = data.find(_ELF64)
    while at >= 0:
        if len(data) >= at + 64:
            (machine,) = struct.unpack_from("<H", data, at + _MACHINE_AT)
            (flags,) = struct.unpack_from("<I", data, at + _E_FLAGS_AT)
            if machine == _EM_AMDGPU:
                name = AMD_PROCESSORS.get(flags & 0xFF, f"amdgpu-{flags & 0xFF:#x}")
                version = data[at + _ABI_AT] - _ABI_5 + 5
                yield name if version == 5 else f"{name}-v{version}"
        at = data.find(_ELF64, at + 1)


def _spirv(data: bytes) -> Iterator[str]:
    at = data.find(_SPIRV)
    while at >= 0:
        if len(data) >= at + _SPIRV_HEAD.size:
            _, low, minor, major, high, _, bound, schema = _SPIRV_HEAD.unpack_from(data, at)
            if (low, major, high, schema) == (0, 1, 0, 0) and bound:
                yield f"spirv-{major}.{minor}"
        at = data.find(_SPIRV, at + 1)


def _unpack(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    if at + 64 > len(data):
        raise ValueError(f"fat binary at {at}: cut off")
    return form.unpack_from(data, at)
