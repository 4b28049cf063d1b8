"""What the native module is given that it cannot take: refused in one line, and nothing was queued or freed."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin

from lmcache.errors import DeviceError
from lmcache.v1.memory.allocators import PagedTensorMemoryAllocator
from lmcache_xpu import memory, native, streams

pytestmark = [pytest.mark.torch]

SHAPE = [1, 1, 8, 4, 1, 32, 4, 0]
"""One layer of MLA: 8 blocks of 4 slots of 32 floats."""
BYTES = 4096


@pytest.fixture(autouse=True)
def on_the_cpu_device() -> Iterator[None]:
    with standin.installed():
        yield


@pytest.fixture
def host(module: Any, queue: int) -> Iterator[int]:
    """The address of pages, and of an object behind them."""
    ptr = module.usm_alloc(queue, 2 * BYTES, "host")
    ctypes.memset(ptr, 7, 2 * BYTES)
    yield ptr
    module.queue_wait(queue)
    module.usm_free(ptr)


def gathered(module: Any, queue: int, host: int, **other: Any) -> None:
    given = {"shape": SHAPE, "pages": [host], "objects": [host + BYTES], "ids": [6, 0], "object_slots": 8}
    module.transfer("t", queue, 3, 1, **{**given, **other})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"pages": [0]}, r"t: pages\[0\] is address 0"),
        ({"objects": [0]}, r"t: objects\[0\] is address 0"),
        ({"ids": (0, 2)}, "a table of 2 values at address 0: no such memory"),
        ({"ids": (64, -1)}, "a table of -1 values at address 64: no such memory"),
        ({"ids": [1 << 64]}, "18446744073709551616: expected an integer of 64 bits"),
        ({"pages": [-(1 << 64)]}, "expected an integer of 64 bits"),
        ({"objects": [1 << 65]}, "expected an integer of 64 bits"),
        ({"shape": [1, 1, 1 << 31, 4, 1, 32, 4, 0]}, "shape: 2147483648: expected a number of 32 bits"),
        ({"shape": [1, 1, -8, 4, 1, 32, 4, 0]}, "KV format 3"),
        ({"shape": [1, 1, 8, 0, 1, 32, 4, 0]}, "KV format 3"),
        ({"object_slots": -1}, "KV format 3"),
        ({"object_slots": 1 << 40}, "KV format 3"),
        ({"skip": -1}, "expected 0 or more"),
        ({"widths": [16, 16], "plane": 2}, "KV format 3"),
    ],
)
def test_operands_out_of_range_are_refused_in_one_line_and_nothing_moves(
    module: Any, queue: int, host: int, other: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        gathered(module, queue, host, **other)
    assert "\n" not in str(caught.value)
    assert module.queue_is_idle(queue)
    assert ctypes.string_at(host + BYTES, BYTES) == bytes([7]) * BYTES


@pytest.mark.parametrize(
    "other", [{"ids": [1.5]}, {"pages": ["x"]}, {"objects": 7}, {"shape": [1, 2]}, {"ids": (1, 2, 3)}]
)
def test_operands_of_other_types_are_refused_as_such(
    module: Any, queue: int, host: int, other: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        gathered(module, queue, host, **other)


def test_a_list_that_changes_while_it_is_read_is_no_fault(module: Any, queue: int, host: int) -> None:
    ids: list[Any] = []

    class Emptying:
        def __index__(self) -> int:
            ids.clear()
            return 0

    ids += [Emptying() for _ in range(1000)]
    with pytest.raises(ValueError, match="range"):
        gathered(module, queue, host, ids=ids)


def test_addresses_with_the_highest_bit_may_be_given_as_int64_tensors_have_them(
    module: Any, queue: int
) -> None:
    """Device memory of Intel GPUs lies there. Nothing is moved here: all blocks are left alone."""
    there = 0xFF00_0000_0000_1000
    for page, chunk in ((there, there), (there - (1 << 64), there - (1 << 64))):
        gathered(module, queue, 64, pages=[page], objects=[chunk], skip=2)


@pytest.mark.parametrize(
    ("to", "source", "nbytes", "said"),
    [
        (0, 64, 8, "address 0: no such memory"),
        (64, 0, 8, "address 0: no such memory"),
        (-4, 64, 8, "no such memory"),
        (64, 1 << 64, 8, "expected an integer of 64 bits"),
        (64, 128, -1, "copy of -1 bytes: expected 0 or more"),
    ],
)
def test_copies_that_make_no_sense_are_refused(
    module: Any, queue: int, to: int, source: int, nbytes: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        module.copy_async(queue, to, source, nbytes)
    assert module.queue_is_idle(queue)


def test_no_queue_is_refused_by_every_call_that_needs_one(module: Any) -> None:
    calls = (
        lambda: module.queue_wait(0),
        lambda: module.queue_is_idle(0),
        lambda: module.usm_alloc(0, 64, "host"),
        lambda: module.usm_kind(0, 64),
        lambda: module.copy_async(0, 64, 128, 8),
        lambda: module.record(0, 0, "k", b""),
        lambda: module.mark(0),
        lambda: module.stall(0, 1.0),
        lambda: gathered(module, 0, 64),
    )
    for call in calls:
        with pytest.raises(ValueError, match="queue 0: expected the address of a sycl::queue"):
            call()


def test_an_event_that_is_refused_is_not_kept(module: Any) -> None:
    with pytest.raises(ValueError, match="queue 0"):
        streams.record_event_on_stream(0, "t", "s", {}, {})
    assert streams._noted == {}


def test_a_queue_without_order_is_refused(module: Any) -> None:
    made = module.queue_create(0, in_order=False)
    with pytest.raises(ValueError, match="a queue without order: expected an in-order queue"):
        module.queue_wait(made)


# --- memory ------------------------------------------------------------------------------------------------


def test_memory_is_freed_once_and_from_its_beginning_only(module: Any, queue: int) -> None:
    ptr = module.usm_alloc(queue, 2 * BYTES, "host")
    with pytest.raises(ValueError, match="expected USM that usm_alloc gave"):
        module.usm_free(ptr + BYTES)  # the runtime knows that as USM, too
    assert module.usm_kind(queue, ptr + BYTES) == "host"
    module.usm_free(ptr)
    with pytest.raises(ValueError, match="not freed yet"):
        module.usm_free(ptr)


def test_of_threads_that_free_the_same_memory_one_does(module: Any, queue: int) -> None:
    for _ in range(20):
        ptr, freed = module.usm_alloc(queue, BYTES, "device"), []

        def free(_: int, ptr: int = ptr, freed: list[int] = freed) -> None:
            with suppress(ValueError):
                module.usm_free(ptr)
                freed.append(1)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(free, range(4)))
        assert freed == [1]


def test_memory_outlives_its_queue_and_is_freed_after_it(module: Any) -> None:
    made = module.queue_create(0)
    with standin.queued_on(made):
        ptr = memory.alloc_pinned_ptr(BYTES)
    module.queue_destroy(made)
    memory.free_pinned_ptr(ptr)


def test_host_memory_of_no_sensible_size_is_refused_in_one_line() -> None:
    for size in (0, -1, 1 << 63, 1 << 70):
        with pytest.raises(ValueError, match=f"alloc_pinned_ptr: size={size}: expected") as caught:
            memory.alloc_pinned_ptr(size)
        assert "\n" not in str(caught.value)


def test_what_the_allocator_refuses_costs_it_nothing(module: Any) -> None:
    allocator = memory.XPUMemoryAllocator(1 << 14)
    for shape in ((-2, -2), (-1,)):
        with pytest.raises(ValueError, match="expected"):
            allocator.allocate(shape, torch.float32)
    whole = allocator.allocate((1 << 14,), torch.uint8)
    assert whole is not None
    whole.ref_count_down()
    for size, alignment in ((0, 4096), (-1, 4096), (1 << 14, 3)):
        with pytest.raises(ValueError, match="expected"):
            memory.XPUMemoryAllocator(size, alignment)


def test_an_object_outlives_its_allocator_and_the_buffer_goes_with_the_last(module: Any, queue: int) -> None:
    allocator = memory.XPUMemoryAllocator(1 << 14)
    one, other = (allocator.allocate((BYTES,), torch.uint8) for _ in range(2))
    at = one.tensor.fill_(9).data_ptr()
    allocator.close()
    other.ref_count_down()
    del allocator, other
    gc.collect()
    assert module.usm_kind(queue, at) == "host"
    assert one.tensor.sum() == 9 * BYTES
    one.ref_count_down()
    del one
    gc.collect()
    assert module.usm_kind(queue, at) == "unknown"


def test_the_core_s_paged_allocator_works_in_the_same_memory(module: Any, queue: int) -> None:
    arena = memory.usm_arena(1 << 14)
    allocator = PagedTensorMemoryAllocator(arena, (BYTES,), torch.uint8)
    objects = [allocator.allocate((BYTES,), torch.uint8) for _ in range(5)]
    assert [one is None for one in objects] == [False] * 4 + [True]
    assert {module.usm_kind(queue, one.tensor.data_ptr()) for one in objects[:4]} == {"host"}


# --- processes ---------------------------------------------------------------------------------------------

FORKED = """
import os
from lmcache_xpu import native
module = native.load()
queue = module.queue_create(0)
ptr = module.usm_alloc(queue, 64, "host")
calls = [lambda: module.queue_wait(queue), lambda: module.usm_free(ptr), lambda: module.queue_create(0), module.devices,
         lambda: module.copy_async(queue, ptr, ptr + 32, 8), lambda: module.record(queue, 0, "k", b"")]
child = os.fork()
if not child:
    for call in calls:
        try:
            call()
        except RuntimeError as exc:
            print(exc, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
module.usm_free(ptr)
"""


def test_a_forked_process_is_told_to_be_spawned_and_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 6
    assert set(said) == {
        "SYCL was used before this process was forked, and cannot be used in it: start processes by spawn"
    }


def test_a_second_import_of_the_module_is_the_same_memory(module: Any, queue: int) -> None:
    ptr = module.usm_alloc(queue, 64, "host")
    name = module.__name__
    before = sys.modules.pop(name)
    try:
        importlib.import_module(name).usm_free(ptr)
        with pytest.raises(ValueError, match="not freed yet"):
            module.usm_free(ptr)
    finally:
        sys.modules[name] = before


def test_errors_are_the_project_s_classes(module: Any, queue: int) -> None:
    with pytest.raises(DeviceError):
        module.usm_alloc(queue, 1 << 60, "device")


LOADED = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from lmcache_xpu import native
native.load()
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libsycl.so" in line})
"""


def test_a_runtime_that_torch_has_loaded_from_elsewhere_stays_the_only_one(tmp_path: Path) -> None:
    lib = Path(sys.prefix, "lib")
    if not (lib / native.RUNTIME).is_file():
        pytest.skip("needs intel-sycl-rt in this environment, from which a second runtime is copied")
    elsewhere = shutil.copy(lib / native.RUNTIME, tmp_path)
    env = {**os.environ, "LD_LIBRARY_PATH": str(lib)}  # for what that one needs
    command = [sys.executable, "-c", LOADED, str(elsewhere)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(elsewhere)], done.stderr
