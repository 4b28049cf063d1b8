"""The driver: what is said where it is missing, old or without a device; devices, memory and copies."""

from __future__ import annotations

import mmap
import subprocess
import sys
from typing import Any

import pytest
from native_rig import (
    D2H,
    H2D,
    KIND,
    ROCM,
    device_memory,
    entry,
    environment,
    fake,
    native,
    read,
    refused,
    stream,
    write,
)

from lmcache.errors import DeviceError

SAY = """
import sys
from lmcache.errors import DeviceError
from lmcache_cuda import _native
_native.set_error_type(DeviceError)
_native.use(sys.argv[1])
try:
    print(eval(sys.argv[2]))
except DeviceError as error:
    print(f"{error.code}|{error.call}|{error}")
"""


@pytest.fixture(autouse=True)
def fresh() -> None:
    fake.reset()


def say(what: str, kind: str = "cuda", fakes: str | None = None, **more: str) -> str:
    """What a new process answers, or says in one line."""
    done = subprocess.run(
        [sys.executable, "-c", SAY, kind, what], env=environment(fakes, **more), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------ no such driver
@pytest.mark.parametrize(
    "call", ["driver_version()", "device_count()", "mem_alloc(0, 8)", "stream_create(0)"]
)
def test_without_a_driver_every_call_says_so_in_the_loader_s_words(call: str) -> None:
    assert say(f"_native.{call}").startswith(
        "0|dlopen|no CUDA driver: libcuda.so.1: cannot open shared object file"
    )
    assert say(f"_native.{call}", "rocm").startswith(
        "0|dlopen|no ROCm runtime: libamdhip64.so.7: cannot open"
    )


def test_importing_and_choosing_touches_no_driver() -> None:
    assert say("_native.IMAGES", fakes="cuda", FAKE_FAIL="cuInit=999").startswith("{'cuda'")


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        (
            "cuda",
            {"FAKE_DEVICES": "0"},
            "100|cuInit|cuInit: no device is there, or none is visible to this process",
        ),
        (
            "cuda",
            {"FAKE_FAIL": "cuInit=999"},
            "999|cuInit|cuInit: the CUDA driver does not start (code 999); see",
        ),
        (
            "cuda",
            {"FAKE_DRIVER_VERSION": "11040"},
            "0|cuDriverGetVersion|CUDA driver 11.4 is too old: expected 11.7",
        ),
        ("rocm", {"FAKE_DEVICES": "0"}, "100|hipInit|hipInit: no device is there"),
        (
            "rocm",
            {"FAKE_FAIL": "hipInit=3"},
            "3|hipInit|hipInit: the ROCm runtime does not start (code 3); see",
        ),
    ],
)
def test_a_driver_that_does_not_serve_says_why(kind: str, fault: dict[str, str], words: str) -> None:
    assert say("_native.device_count()", kind, kind, **fault).startswith(words)


def test_a_device_that_there_is_no_kernel_for_is_named_with_what_there_is() -> None:
    said = say("_native.copy_kernel(4096, 8192, 16, 0, 0)", fakes="cuda", FAKE_FAIL="cuModuleLoadData=2")
    assert "no memory is left for the kernels" in said
    assert "build" not in said
    said = say("_native.copy_kernel(4096, 8192, 16, 0, 0)", fakes="cuda", FAKE_FAIL="cuModuleLoadData=209")
    assert said.startswith("209|cuModuleLoadData|cuModuleLoadData: no kernel image is available")
    assert "device 0: this wheel has kernels for sm_80 sm_90" in said


def test_a_driver_older_than_the_kernels_is_told_by_both_versions() -> None:
    said = say(
        "_native.copy_kernel(4096, 8192, 16, 0, 0)", fakes="cuda", FAKE_FAIL="cuModuleLoadData=222",
        FAKE_DRIVER_VERSION="12080",
    )  # fmt: skip
    need = native.IMAGE_DRIVER_VERSION
    assert (
        f"kernels need a driver for CUDA {need // 1000}.{need % 1000 // 10} or later, and this one is for 12.8"
        in said
    )


def test_an_old_driver_has_copies_but_no_batches() -> None:
    assert say("_native.batch_memcpy_native()", fakes="old") == "False"
    assert say("_native.batch_memcpy_native()", fakes="cuda") == "True"


def test_a_process_has_one_driver() -> None:
    native.driver_version()
    other = "cuda" if ROCM else "rocm"
    with pytest.raises(DeviceError, match=f"'{other}': this process uses"):
        native.use(other)
    native.use("rocm" if ROCM else "cuda")  # what it has already
    with pytest.raises(ValueError, match="expected cuda or rocm"):
        native.use("metal")


# --------------------------------------------------------------------------------------------------------- devices
def test_a_device_tells_what_it_is() -> None:
    assert native.device_count() == 2
    info = native.device_info(1)
    assert info["name"] == "Fake GPU 1"
    assert info["pci_bus_id"] == "0000:1C:00.0"
    assert (len(info["uuid"]), info["uuid"][0]) == (16, 0xF1)
    assert info["capability"] == (9, 0)
    assert info["arch"] == ("gfx942" if ROCM else "sm_90")
    assert info["total_memory"] == 8 << 30
    assert [info[name] for name in ("vmm", "fd_handles", "mem_ops", "host_register", "integrated")] == [
        True
    ] * 4 + [False]


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_device_that_is_not_there_is_refused(ordinal: int) -> None:
    with pytest.raises(ValueError, match=f"device {ordinal}: expected 0 to 1"):
        native.device_info(ordinal)


def test_what_was_current_before_a_call_is_current_after_it() -> None:
    before = native.current_device()
    with device_memory(64, 1) as there, stream(1) as queue:
        native.memset_async(there, 7, 64, queue, 1)
        native.stream_synchronize(queue, 1)
        assert read(there, 64) == b"\7" * 64
    fake.fail(entry("cuMemAlloc_v2"), 2)
    refused(lambda: native.mem_alloc(1, 64))
    assert native.current_device() == before


# ---------------------------------------------------------------------------------------------------------- memory
def test_memory_knows_where_it_begins_and_how_large_it_is() -> None:
    left, total = native.mem_info(0)
    with device_memory(5000) as ptr:
        assert native.address_range(ptr + 4999) == (ptr, 5000)
        assert native.mem_info(0) == (left - 5000, total)
    assert native.mem_info(0) == (left, total)


def test_memory_that_is_not_there_is_told_with_what_is() -> None:
    error = refused(lambda: native.mem_alloc(0, 9 << 30))
    assert (error.code, error.call) == (2, entry("cuMemAlloc_v2"))
    assert f"out of memory (code 2); {9 << 30} bytes asked for, " in str(error)
    assert f"of {8 << 30} free on device 0" in str(error)
    with pytest.raises(ValueError, match="expected 1 or more"):
        native.mem_alloc(0, 0)


def test_pinning_beyond_the_limit_names_the_limit() -> None:
    with mmap.mmap(-1, 8192) as room:
        import ctypes

        at = ctypes.addressof(ctypes.c_char.from_buffer(room))
        fake.fail(entry("cuMemHostRegister_v2"), 2)
        error = refused(lambda: native.host_register(at, 8192))
        assert (error.code, "ulimit -l" in str(error)) == (2, True)
        native.host_register(at, 8192)
        error = refused(lambda: native.host_register(at + 4096, 4096))
        assert (error.code, "is pinned already" in str(error)) == (712, True)
        native.host_unregister(at)
        assert refused(lambda: native.host_unregister(at)).code == 713
        del error


def test_page_locked_memory_is_given_and_taken_back() -> None:
    ptr = native.host_alloc(10_000, 1)
    write(ptr, b"a" * 10_000)
    native.host_free(ptr)
    assert refused(lambda: native.host_free(ptr)).code == 1


# ---------------------------------------------------------------------------------------------------------- copies
@pytest.mark.parametrize(
    ("way", "offset", "pieces"), [(H2D, 0, 2), (D2H, 4096, 3), (H2D, 100, 3), (D2H, 8191, 3)]
)
def test_a_copy_is_cut_where_pinned_pieces_end(way: int, offset: int, pieces: int) -> None:
    size, step = 16384, 8192
    room = mmap.mmap(-1, offset + size)
    import ctypes

    host = ctypes.addressof(ctypes.c_char.from_buffer(room)) + offset
    data = bytes(range(256)) * (size // 256)
    with device_memory(size) as there, stream() as queue:
        to, source = (there, host) if way == H2D else (host, there)
        write(source, data)
        native.memcpy_split_async(to, source, size, offset, step, way, queue, 0)
        native.stream_synchronize(queue)
        assert read(to, size) == data
    assert fake.calls(entry("cuMemcpyAsync")) == pieces


def test_an_alignment_below_a_page_cuts_nothing() -> None:
    with device_memory(9000) as there, device_memory(9000) as here, stream() as queue:
        native.memcpy_split_async(there, here, 9000, 0, 1, H2D, queue, 0)
        native.memcpy_split_async(there, here, 0, 0, 4096, H2D, queue, 0)
        native.stream_synchronize(queue)
    assert fake.calls(entry("cuMemcpyAsync")) == 1


@pytest.mark.parametrize("alignment", [0, 3, 12288])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment {alignment}: expected a power of two"):
        native.memcpy_split_async(1, 1, 1, 0, alignment, H2D, 0, 0)


@pytest.mark.parametrize("own_stream", [True, False])
def test_batches_move_every_piece(own_stream: bool) -> None:
    with device_memory(4096) as there, device_memory(4096) as here, stream() as made:
        queue = made if own_stream else 0  # the driver takes no batch on the default stream
        write(there, b"b" * 4096)
        write(here, bytes(range(256)) * 16)
        to, source, sizes = [there + 2048, there, there], [here, here + 300, here], [100, 50, 0]
        native.memcpy_batch_async(to, source, sizes, queue, 0)
        native.stream_synchronize(queue, 0)
        assert read(there + 2048, 100) == read(here, 100)
        assert read(there, 51) == read(here + 300, 50) + b"b"
    batches = fake.calls("cuMemcpyBatchAsync_v2")
    assert batches == (1 if own_stream and KIND == "cuda" else 0)


def test_memory_that_no_batch_takes_is_copied_piece_by_piece() -> None:
    fake.fail("cuMemcpyBatchAsync_v2", 801)
    with device_memory(64) as there, device_memory(64) as here, stream() as queue:
        write(here, bytes(range(64)))
        native.memcpy_batch_async([there, there + 32], [here, here + 32], [32, 32], queue, 0)
        native.stream_synchronize(queue)
        assert read(there, 64) == bytes(range(64))
    assert fake.calls(entry("cuMemcpyAsync")) == 2


def test_a_batch_that_the_driver_fails_is_a_device_error() -> None:
    if not native.batch_memcpy_native():
        fake.fail(entry("cuMemcpyAsync"), 1)
    fake.fail("cuMemcpyBatchAsync_v2", 1)
    with device_memory(64) as there, stream() as queue:
        error = refused(lambda: native.memcpy_batch_async([there, there], [there + 8] * 2, [8, 8], queue, 0))
    assert error.code == 1


@pytest.mark.parametrize(
    ("dsts", "sizes", "words"), [([1], [1, 2], "1 dsts, 2 srcs"), ([1, 2], [3, -1], "copy 1")]
)
def test_a_batch_that_makes_no_sense_is_refused(dsts: list[int], sizes: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        native.memcpy_batch_async(dsts, [1, 2], sizes, 0, 0)


# ------------------------------------------------------------------------------------------- every call may fail
CALLS: list[tuple[str, str, Any]] = [
    ("cuDevicePrimaryCtxRetain", "", "mem_alloc(0, 8)"),
    ("cuCtxSetCurrent", "hipSetDevice", "mem_alloc(1, 8)"),
    ("cuDeviceGetCount", "hipGetDeviceCount", "device_count()"),
    ("cuDeviceGetUuid_v2", "hipDeviceGetUuid", "device_info(0)"),
    ("cuDeviceGetName", "hipDeviceGetName", "device_info(0)"),
    ("cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", "device_info(0)"),
    ("cuDeviceTotalMem_v2", "hipDeviceTotalMem", "device_info(0)"),
    ("cuMemGetInfo_v2", "hipMemGetInfo", "mem_info(0)"),
    ("cuMemFree_v2", "hipFree", "mem_free(0, 8)"),
    ("cuMemGetAddressRange_v2", "hipMemGetAddressRange", "address_range(8)"),
    ("cuMemsetD8Async", "hipMemsetD8Async", "memset_async(8, 0, 1, 0, 0)"),
    ("cuMemcpyAsync", "hipMemcpyAsync", "memcpy_async(8, 16, 1, 0, 0)"),
    ("cuMemcpyAsync", "hipMemcpyAsync", "memcpy_split_async(8, 16, 1, 0, 4096, 0, 0, 0)"),
    ("cuMemcpyAsync", "hipMemcpyAsync", "memcpy_batch_async([8], [16], [1], 0, 0)"),
    ("cuMemHostUnregister", "hipHostUnregister", "host_unregister(8)"),
    ("cuMemHostAlloc", "hipHostMalloc", "host_alloc(8)"),
    ("cuMemFreeHost", "hipHostFree", "host_free(8)"),
    ("cuStreamCreateWithPriority", "hipStreamCreateWithPriority", "stream_create(0)"),
    ("cuStreamDestroy_v2", "hipStreamDestroy", "stream_destroy(8)"),
    ("cuStreamSynchronize", "hipStreamSynchronize", "stream_synchronize(0)"),
    ("cuStreamQuery", "hipStreamQuery", "stream_query(0)"),
    ("cuStreamWaitEvent", "hipStreamWaitEvent", "stream_wait_event(0, 8)"),
    ("cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange", "stream_priority_range(0)"),
    ("cuStreamWriteValue64_v2", "hipStreamWriteValue64", "stream_write_u64(0, 8, 1)"),
    ("cuStreamWaitValue64_v2", "hipStreamWaitValue64", "stream_wait_u64_geq(0, 8, 1)"),
    ("cuLaunchHostFunc", "hipLaunchHostFunc", "record_completion_on_stream(0, 'k', b'')"),
    ("cuLaunchHostFunc", "hipLaunchHostFunc", "record_event_on_stream(0, 't', 's', {}, {})"),
    ("cuEventCreate", "hipEventCreateWithFlags", "event_create(0)"),
    ("cuEventDestroy_v2", "hipEventDestroy", "event_destroy(8)"),
    ("cuEventRecord", "hipEventRecord", "event_record(8, 0)"),
    ("cuEventQuery", "hipEventQuery", "event_query(8)"),
    ("cuEventSynchronize", "hipEventSynchronize", "event_synchronize(8)"),
    ("cuEventElapsedTime", "hipEventElapsedTime", "event_elapsed_ms(8, 8)"),
    ("cuIpcGetEventHandle", "hipIpcGetEventHandle", "event_export(8)"),
    ("cuIpcOpenEventHandle", "hipIpcOpenEventHandle", "event_open(0, bytes(64))"),
    ("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", "ipc_open(0, bytes(64))"),
    ("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", "ipc_close(0, 8)"),
    ("cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity", "vmm_alloc(0, 8)"),
    ("cuMemCreate", "hipMemCreate", "vmm_alloc(0, 8)"),
    ("cuMemAddressReserve", "hipMemAddressReserve", "vmm_alloc(0, 8)"),
    ("cuMemMap", "hipMemMap", "vmm_alloc(0, 8)"),
    ("cuMemSetAccess", "hipMemSetAccess", "vmm_alloc(0, 8)"),
    ("cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle", "vmm_import_fd(0, 0, 1 << 21)"),
    ("cuModuleLoadData", "hipModuleLoadData", "copy_kernel(4096, 8192, 16, 0, 0)"),
    ("cuModuleGetFunction", "hipModuleGetFunction", "copy_kernel(4096, 8192, 16, 0, 0)"),
    ("cuLaunchKernel", "hipModuleLaunchKernel", "copy_kernel(4096, 8192, 16, 0, 0)"),
    ("cuLaunchKernel", "hipModuleLaunchKernel", "rotary(0, 0, 8, 8, 'int32', 8, 'float16', 8, 'float32', *[2] * 7)"),
    ("cuLaunchKernel", "hipModuleLaunchKernel", "cachegen_cdf(0, 0, 8, 'int8', 1, 1, 1, 2, 8, 8, 8)"),
]  # fmt: skip

ALL = """
import json, sys, os
sys.path.insert(0, os.environ["FAKE_FOLDER"])
import fakedriver
from lmcache.errors import DeviceError
from lmcache_cuda import _native
fake = fakedriver.load(os.environ["LMCACHE_FAKE_KIND"])
_native.set_error_type(DeviceError)
rocm = os.environ["LMCACHE_FAKE_KIND"] == "rocm"
_native.use("rocm" if rocm else "cuda")
_native.driver_version()
for cuda, hip, call in json.load(sys.stdin):
    name = hip if rocm else cuda
    if not name:
        continue
    fake.fail(name, 801)
    try:
        eval("_native." + call)
        print(name, call, "did not fail")
    except DeviceError as error:
        if error.code != 801 or error.call != name or not str(error).startswith(name + ": ") or chr(10) in str(error):
            print(name, call, error.code, error.call, error)
    fake.reset()
"""


def test_what_the_driver_fails_is_a_device_error_with_its_name_and_number() -> None:
    """In a process of its own, so that a context and an image are still to be made."""
    import json

    from native_rig import fakedriver

    done = subprocess.run(
        [sys.executable, "-c", ALL], input=json.dumps(CALLS), capture_output=True, text=True, timeout=120,
        env=environment(KIND, FAKE_FOLDER=str(fakedriver.HERE)),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_error_type_is_a_class_of_exceptions() -> None:
    with pytest.raises(TypeError, match="expected a class of exceptions"):
        native.set_error_type(int)


def test_hip_keeps_no_error_for_whoever_asks_next() -> None:
    if not ROCM:
        assert fake.calls("hipGetLastError") == 0
        return
    fake.fail("hipMalloc", 2)
    refused(lambda: native.mem_alloc(0, 8))
    assert fake.calls("hipGetLastError") == 1
