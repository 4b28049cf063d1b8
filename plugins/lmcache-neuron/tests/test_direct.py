"""Direct reads and writes by the Neuron runtime, over a fake of it; and what is said where it is not there."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

native = pytest.importorskip("lmcache_neuron._native")
if not shutil.which(os.environ.get("CXX", "g++")):
    pytest.skip("the fake runtime needs a C++ compiler", allow_module_level=True)

from fake import fakenrt

from lmcache.errors import DeviceError
from lmcache_neuron.direct import TensorPages, why_not

PAGE, STRIDE, BLOCKS, FIRST = 48, 64, 10, 16


@pytest.fixture(scope="module")
def runtime() -> Any:
    return fakenrt.load()


@pytest.fixture
def tensor(runtime: Any) -> Iterator[tuple[int, Any]]:
    """A handle, and the tensor's bytes."""
    size = FIRST + BLOCKS * STRIDE
    handle = runtime.fake_tensor(size)
    data = (ctypes.c_ubyte * size).from_address(runtime.fake_data(handle))
    data[:] = random.Random(size).randbytes(size)
    runtime.fake_fail(-1, 0)
    yield handle, data
    runtime.fake_fail(-1, 0)
    runtime.fake_free(handle)


def host(count: int) -> tuple[Any, list[int]]:
    memory = (ctypes.c_ubyte * (count * PAGE))()
    return memory, [ctypes.addressof(memory) + at * PAGE for at in range(count)]


def test_pages_are_read_from_their_blocks_in_the_order_of_ids(tensor: tuple[int, Any]) -> None:
    handle, data = tensor
    memory, places = host(3)
    TensorPages(handle, PAGE, STRIDE, FIRST).read([7, 0, 9], places)
    wanted = b"".join(bytes(data[FIRST + block * STRIDE :][:PAGE]) for block in (7, 0, 9))
    assert bytes(memory) == wanted


def test_pages_are_written_and_nothing_between_them_is_touched(tensor: tuple[int, Any]) -> None:
    handle, data = tensor
    memory, places = host(2)
    memory[:] = bytes(range(2 * PAGE))
    expected = bytearray(data)
    for at, block in enumerate((4, 1)):
        start = FIRST + block * STRIDE
        expected[start : start + PAGE] = bytes(memory[at * PAGE : (at + 1) * PAGE])
    TensorPages(handle, PAGE, STRIDE, FIRST).write([4, 1], places)
    assert bytes(data) == bytes(expected)


@pytest.mark.parametrize(
    ("ids", "places", "said"),
    [
        ([0, BLOCKS], None, f"piece 1: {PAGE} bytes at offset {FIRST + BLOCKS * STRIDE}: the tensor has"),
        ([-1], None, "block id -1: expected 0 or more"),
        ([1, 2], [0, 0], "piece 0: address 0: no such memory"),
        ([1, 2], [64], "2 offsets, 1 addresses"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_moves(
    tensor: tuple[int, Any], runtime: Any, ids: list[int], places: list[int] | None, said: str
) -> None:
    memory, mine = host(2)
    pages = TensorPages(tensor[0], PAGE, STRIDE, FIRST)
    before = bytes(tensor[1])
    for move in (pages.read, pages.write):
        with pytest.raises(ValueError, match=said):
            move(ids, mine[: len(ids)] if places is None else places)
    assert runtime.fake_calls() == 0
    assert not any(memory)
    assert bytes(tensor[1]) == before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, r"invalid handle \(NRT status 3\)"),
        (13, "the runtime is not initialized"),
        (1202, "NRT status 1202"),
    ],
)
def test_a_failure_of_the_runtime_says_which_piece_and_why(
    tensor: tuple[int, Any], runtime: Any, code: int, said: str
) -> None:
    _, places = host(3)
    runtime.fake_fail(1, code)
    with pytest.raises(DeviceError, match=f"nrt_read: piece 1 of 3: {said}"):
        TensorPages(tensor[0], PAGE, STRIDE, FIRST).read([0, 1, 2], places)


@pytest.mark.parametrize("numbers", [(0, 64, 0), (65, 64, 0), (48, 64, -1)])
def test_pages_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected a page of 1 byte or more within its stride"):
        TensorPages(1, *numbers)


def test_no_handle_is_refused(runtime: Any) -> None:
    with pytest.raises(ValueError, match="tensor=0: expected the runtime's handle"):
        TensorPages(0, PAGE, STRIDE).read([0], [64])


def test_with_a_runtime_nothing_is_missing(runtime: Any) -> None:
    assert why_not() == ""


def said_by_a_new_process(**env: str) -> str:
    code = "from lmcache_neuron.direct import why_not; print(why_not())"
    kept = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_a_runtime_the_loader_s_words_and_the_remedy_are_said_in_one_line() -> None:
    if Path("/opt/aws/neuron/lib", fakenrt.NAME).exists():
        pytest.skip("this machine has the Neuron runtime")
    said = said_by_a_new_process()
    assert said.startswith("no Neuron runtime: libnrt.so.1: cannot open shared object file")
    assert said.endswith("install aws-neuronx-runtime-lib")
    assert "\n" not in said


def test_a_runtime_that_lacks_a_function_is_named_with_it() -> None:
    folder = fakenrt.folder("-DWITHOUT_WRITE")
    assert "libnrt.so.1 has no nrt_tensor_write" in said_by_a_new_process(LD_LIBRARY_PATH=str(folder))


def test_the_runtime_is_not_opened_before_it_is_asked_for() -> None:
    code = (
        "import lmcache_neuron.spec; from lmcache_neuron import _native\n"
        "print(sum('libnrt' in line for line in open('/proc/self/maps')))\n"
        "_native.nrt_why_not(); print(sum('libnrt' in line for line in open('/proc/self/maps')) > 0)"
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(fakenrt.folder())}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]


@pytest.mark.parametrize(
    ("pages", "ids", "places", "said"),
    [
        ((PAGE, STRIDE), [1 << 62], [64], "no tensor is as large"),
        ((PAGE, STRIDE), [1 << 90], [64], "no tensor is as large"),
        ((1 << 62, 1 << 62), [1], [64], "no tensor is as large"),
        ((PAGE, STRIDE), [0], [-8], "piece 0: address -8: no such memory"),
        ((PAGE, STRIDE), [0], [1 << 64], "18446744073709551616: expected an integer of 64 bits"),
        ((PAGE, STRIDE), [0], [(1 << 63) - 8], "no such memory"),
    ],
)
def test_numbers_that_would_wrap_around_are_refused_as_out_of_range(
    tensor: tuple[int, Any], runtime: Any, pages: Any, ids: list[int], places: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TensorPages(tensor[0], *pages).read(ids, places)
    assert runtime.fake_calls() == 0


def test_ids_of_numpy_do_not_wrap_around_to_a_block_that_is_there(
    tensor: tuple[int, Any], runtime: Any
) -> None:
    numpy = pytest.importorskip("numpy")
    ids = numpy.array([1 << 58], dtype=numpy.int64)  # times a stride of 64 that is 0 in 64 bits
    with pytest.raises(ValueError, match="no tensor is as large"):
        TensorPages(tensor[0], numpy.int64(PAGE), numpy.int64(STRIDE)).read(ids, host(1)[1])
    assert runtime.fake_calls() == 0


@pytest.mark.parametrize("handle", [-1, 1 << 64])
def test_a_handle_that_is_no_address_is_refused_in_one_line(handle: int) -> None:
    with pytest.raises(ValueError, match="expected an address of 64 bits") as caught:
        TensorPages(handle, PAGE, STRIDE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [1.5, "7", None])
def test_what_is_no_integer_is_refused_as_a_type(tensor: tuple[int, Any], bad: Any) -> None:
    pages = TensorPages(tensor[0], PAGE, STRIDE)
    for ids, places in (([bad], [64]), ([0], [bad])):
        with pytest.raises(TypeError):
            pages.read(ids, places)
    with pytest.raises(TypeError):
        TensorPages(bad, PAGE, STRIDE)


def test_threads_that_read_and_write_at_once_move_their_own_pages(tensor: tuple[int, Any]) -> None:
    handle, _ = tensor
    pages = TensorPages(handle, PAGE, STRIDE, FIRST)

    def rounds(block: int) -> bool:
        memory, places = host(2)
        for turn in range(200):
            memory[:PAGE] = bytes([block * 20 + turn % 20]) * PAGE
            pages.write([block], places[:1])
            pages.read([block], places[1:])
            if memory[:PAGE] != memory[PAGE:]:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rounds, range(BLOCKS)))


FORKED = """
import ctypes, os
from fake import fakenrt
from lmcache_neuron.direct import TensorPages
runtime = fakenrt.load()
handle = runtime.fake_tensor(256)
ctypes.memset(runtime.fake_data(handle), 7, 256)
pages, memory = TensorPages(handle, 64, 64), (ctypes.c_ubyte * 64)()
pages.write([0], [ctypes.addressof(memory)])
child = os.fork()
if not child:
    pages.read([3], [ctypes.addressof(memory)])
    os._exit(0 if bytes(memory) == bytes([7]) * 64 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_is_forked_after_use_reads_on() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
