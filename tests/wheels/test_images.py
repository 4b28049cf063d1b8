"""The reader of device code, against what compilers write and against bytes that are cut anywhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from audit.images import device_images
from helpers.made_wheels import CODE_OBJECTS, CUBINS, code_object, fatbin

KERNEL = 'extern "C" __global__ void one(int *at) { at[threadIdx.x] = 1; }\n'


def test_every_kind_of_image_is_named_as_its_compiler_names_the_target() -> None:
    data = b"x" * 7 + CUBINS + b"y" * 9 + fatbin((2, 90, 1 << 20), (2, 100, 1 << 21)) + CODE_OBJECTS
    want = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_90", "sm_90a", "sm_100f", "gfx90a", "gfx942"]
    assert list(device_images(data)) == want


def test_code_for_an_unknown_amd_processor_is_not_passed_over() -> None:
    assert list(device_images(code_object(0x99))) == ["amdgpu-0x99"]


def test_a_code_object_of_another_version_says_so() -> None:
    assert list(device_images(code_object(0x4C, abi=4) + code_object(0x3F, abi=2))) == [
        "gfx942-v6",
        "gfx90a-v4",
    ]


def test_spirv_is_named_by_its_version_and_its_magic_number_alone_is_none() -> None:
    head = bytes.fromhex("03022307 00040100 0e000600 09040000 00000000")
    assert list(device_images(b"abc" + head + b"rest" + head.replace(b"\4\1", b"\6\1"))) == [
        "spirv-1.4",
        "spirv-1.6",
    ]
    assert list(device_images(head[:4] * 8)) == []
    assert list(device_images(head[:-1])) == []


def test_libraries_of_the_host_and_text_are_no_device_code() -> None:
    host = bytearray(code_object(0x3F))
    host[18] = 62  # x86-64
    assert list(device_images(bytes(host))) == []
    assert list(device_images(b"")) == []


def test_a_fat_binary_that_is_cut_off_is_refused() -> None:
    for length in range(16, len(CUBINS)):
        with pytest.raises(ValueError, match="fat binary"):
            list(device_images(CUBINS[:length]))


def test_an_entry_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 64"):
        list(device_images(fatbin((64, 90, 0))))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to compare with")
@pytest.mark.parametrize("more", [(), ("-Xfatbin=-compress-all",)])
def test_what_nvcc_writes_is_read(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "one.cu").write_text(KERNEL)
    codes = {"80": ("sm_80",), "90": ("sm_90", "compute_90"), "90a": ("sm_90a",)}
    flags = [f"-gencode=arch=compute_{arch},code={code}" for arch, list_ in codes.items() for code in list_]
    command = ["nvcc", "-fatbin", *flags, *more, "one.cu", "-o", "one.fatbin"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = device_images((tmp_path / "one.fatbin").read_bytes())
    assert sorted(found) == ["compute_90", "sm_80", "sm_90", "sm_90a"]
