"""Host staging: the native module against torch, and what it refuses."""

from __future__ import annotations

import ast
import contextlib
import importlib
import random
import shutil
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

native = pytest.importorskip("lmcache_hpu._native")

import lmcache
from lmcache.v1.platform.base.op_contract import NATIVE_ABI

PLUGIN = Path(__file__).resolve().parents[1]


def test_the_module_has_what_its_stub_declares_and_nothing_else() -> None:
    stub = ast.parse((PLUGIN / "src" / "lmcache_hpu" / "_native.pyi").read_text(encoding="utf-8"))
    declared = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    declared |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert declared == {name for name in dir(native) if not name.startswith("_")}


def test_the_abi_is_the_core_s_and_so_is_the_header() -> None:
    assert native.LMCACHE_NATIVE_ABI == NATIVE_ABI
    core = Path(lmcache.get_include()) / "lmcache" / "abi.h"
    assert (PLUGIN / "csrc" / "sdk" / "lmcache" / "abi.h").read_text() == core.read_text()


def test_importing_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys; from lmcache_hpu import _native; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_another_wheel_that_ships_the_same_staging_may_be_in_the_process_too(tmp_path: Path) -> None:
    """As lmcache-neuron's is: each is the other's text, in a library of its own."""
    other = shutil.copy2(native.__file__, tmp_path)
    code = (
        "import sys\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "from lmcache_hpu import _native as one\n"
        "spec = spec_from_file_location('other._native', sys.argv[1])\n"
        "other = module_from_spec(spec)\n"
        "spec.loader.exec_module(other)\n"
        "assert one.HostBuffer is not other.HostBuffer\n"
        "for module in (one, other):\n"
        "    memoryview(module.HostBuffer(64)).cast('B')[0] = 7\n"
        "    module.free_pinned_ptr(module.alloc_pinned_ptr(64))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, other], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------- the buffer
@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 5])
def test_a_buffer_is_aligned_zeroed_and_writable_from_end_to_end(nbytes: int) -> None:
    buffer = native.HostBuffer(nbytes)
    view = memoryview(buffer).cast("B")
    assert buffer.address % native.HOST_ALIGNMENT == 0
    assert (buffer.nbytes, len(view)) == (nbytes, nbytes)
    assert not any(view)
    view[0] = view[nbytes - 1] = 7
    assert view[nbytes - 1] == 7


def test_a_buffer_is_locked_only_if_it_says_so() -> None:
    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmLck:")).split()[1])

    before = locked_kib()
    buffer = native.HostBuffer(64 << 10, True)
    assert locked_kib() - before >= (64 if buffer.locked else 0)
    assert buffer.locked or locked_kib() == before
    plain = native.HostBuffer(64 << 10, False)
    assert not plain.locked


def test_memory_outlives_its_buffer_object_as_long_as_a_view_is_on_it() -> None:
    view = memoryview(native.HostBuffer(4096)).cast("B")
    view[4095] = 3
    assert view[4095] == 3


@pytest.mark.parametrize("nbytes", [0, 2**64 - 1])
def test_a_buffer_of_no_sensible_size_is_refused(nbytes: int) -> None:
    with pytest.raises((ValueError, MemoryError)):
        native.HostBuffer(nbytes)


def test_pinned_memory_is_freed_once_and_by_its_address() -> None:
    address = native.alloc_pinned_ptr(100)
    assert address % native.HOST_ALIGNMENT == 0
    with pytest.raises(ValueError, match="it is not allocated, or freed already"):
        native.free_pinned_ptr(address + 4096)
    native.free_pinned_ptr(address)
    with pytest.raises(ValueError, match=f"free_pinned_ptr: pointer {address:#x}: it is not allocated"):
        native.free_pinned_ptr(address)
    with pytest.raises(ValueError, match="alloc_pinned_ptr: size=0: expected 1 byte or more"):
        native.alloc_pinned_ptr(0)


# ---------------------------------------------------------------------------------------------- rows and copies
@pytest.mark.torch
@pytest.mark.parametrize("threads", [0, 1, 3, 64])
@pytest.mark.parametrize(("pieces", "piece", "stride"), [(1, 96, 0), (4, 24, 24), (4, 24, 40), (3, 1, 7)])
def test_rows_go_to_their_places_and_come_back_and_nothing_else_is_touched(
    pieces: int, piece: int, stride: int, threads: int
) -> None:
    torch = pytest.importorskip("torch")
    rows, span = 50, (pieces - 1) * stride + piece
    torch.manual_seed(rows + piece)
    stage = torch.randint(0, 256, (rows, pieces, piece), dtype=torch.uint8)
    host = torch.randint(0, 256, (2 * rows, span), dtype=torch.uint8)
    where = torch.randperm(2 * rows)[:rows].tolist()
    expected = host.clone()
    for row, place in enumerate(where):
        if row % 5:  # the others have no address
            expected[place].as_strided((pieces, piece), (stride, 1), expected[place].storage_offset()).copy_(
                stage[row]
            )
    places = [host[place].data_ptr() if row % 5 else 0 for row, place in enumerate(where)]
    native.scatter(stage.data_ptr(), array("Q", places), pieces, piece, stride, threads)
    assert torch.equal(host, expected)
    back = torch.zeros_like(stage)
    native.gather(back.data_ptr(), places, pieces, piece, stride, threads)
    taken = torch.arange(rows) % 5 != 0
    assert torch.equal(back[taken], stage[taken])
    assert not back[~taken].any()


@pytest.mark.torch
def test_large_sets_are_shared_out_and_every_byte_arrives() -> None:
    torch = pytest.importorskip("torch")
    source = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    rows = 40
    size = len(source) // rows
    native.scatter(
        source.data_ptr(), [target.data_ptr() + at * size for at in reversed(range(rows))], 1, size, 0
    )
    assert torch.equal(target.view(rows, size), source.view(rows, size).flip(0))
    target.zero_()
    sizes = [0, 1, (20 << 20) + 3, 17, (15 << 20) - 1, 0]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    native.batched_memcpy(
        [source.data_ptr() + at for at in starts], [target.data_ptr() + at for at in starts], sizes
    )
    total = sum(sizes)
    assert torch.equal(target[:total], source[:total])
    assert not target[total:].any()


BAD: list[tuple[str, tuple[Any, ...], str | None]] = [
    ("no stage", (0, [], 1, 8, 0), "stage=0: expected an address"),
    ("no pieces", (64, [], 0, 8, 0), "pieces=0: expected 1 or more"),
    ("empty pieces", (64, [], 1, 0, 0), "piece_bytes=0: expected 1 or more"),
    ("a row beyond 63 bits", (64, [], 4, 2**62, 2**62), "within 63 bits"),
    ("pieces that overlap", (64, [], 2, 8, 4), "stride=4: expected at least the 8 bytes of a piece"),
    ("pieces beyond 63 bits", (64, [64], 1 << 33, 1, 1 << 33), "stride=8589934592: expected a row's pieces"),
    ("rows beyond 63 bits", (64, [0] * 4, 1, 2**62, 0), "stage=64: expected an address of 4 rows"),
    ("a stage that would wrap around", (2**63 - 8, [0], 1, 64, 0), "expected an address of 1 rows"),
    ("a place below 0", (64, [0, -8], 1, 8, 0), r"addresses\[1\]=-8: expected an address of 8 bytes"),
    (
        "a place that would wrap around",
        (64, [2**63 - 9], 2, 8, 8),
        r"addresses\[0\]=\d+: expected an address of 16",
    ),
    ("a place beyond 64 bits", (64, [1 << 64], 1, 8, 0), None),
    ("a place far below 0", (64, [-(1 << 64)], 1, 8, 0), None),
]


@pytest.mark.parametrize(("call", "said"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_rows_that_make_no_sense_are_refused_before_anything_moves(
    call: tuple[Any, ...], said: str | None
) -> None:
    for function in (native.gather, native.scatter):
        expected = "expected an integer of 64 bits" if said is None else f"{function.__name__}: .*{said}"
        with pytest.raises(ValueError, match=expected):
            function(*call)


def test_copies_that_make_no_sense_are_refused_before_anything_moves() -> None:
    source, target = native.HostBuffer(64), native.HostBuffer(64)
    memoryview(source).cast("B")[0] = 9
    for src, dst, sizes, said in (
        ([source.address], [], [1], "1 src, 0 dst, 1 sizes: expected as many of each"),
        ([source.address] * 2, [target.address] * 2, [1, -1], "copy 1: size -1: expected 0 or more"),
        ([source.address] * 2, [target.address, 0], [1, 1], "copy 1: 1 bytes at address 0: no such memory"),
        ([source.address, -8], [target.address] * 2, [1, 1], "copy 1: 1 bytes at address -8: no such memory"),
        (
            [source.address, 1 << 64],
            [target.address] * 2,
            [1, 1],
            "18446744073709551616: expected an integer",
        ),
        ([64] * 2, [target.address] * 2, [2**62, 2**62], "all sizes together within 63 bits"),
    ):
        with pytest.raises(ValueError, match=said):
            native.batched_memcpy(src, dst, sizes)
    assert memoryview(target).cast("B")[0] == 0
    for bad in (["x"], [1.5], array("i", [1])):
        with pytest.raises(TypeError):
            native.batched_memcpy(bad, [0], [0])


@pytest.mark.parametrize("shift", [-(5 << 20), -3, 0, 3, 5 << 20], ids=lambda shift: f"by {shift}")
def test_a_copy_onto_itself_moves_what_was_there_before(shift: int) -> None:
    size = 24 << 20  # which several threads would share
    buffer = native.HostBuffer(size + (10 << 20), False)
    view = memoryview(buffer).cast("B")
    pattern = random.Random(1).randbytes(1 << 16) * (size >> 16)
    start = 5 << 20
    view[start : start + size] = pattern
    native.batched_memcpy([buffer.address + start], [buffer.address + start + shift], [size])
    assert view[start + shift : start + shift + size] == pattern


def test_copies_that_read_what_earlier_ones_wrote_are_made_in_their_order() -> None:
    piece, count = 1 << 20, 32
    buffer = native.HostBuffer(piece * (count + 1), False)
    view = memoryview(buffer).cast("B")
    view[:piece] = bytes([7]) * piece
    places = [buffer.address + at * piece for at in range(count + 1)]
    native.batched_memcpy(places[:-1], places[1:], [piece] * count)  # a chain: all become the first
    assert view == bytes([7]) * (piece * (count + 1))
    view[:piece], view[piece : 2 * piece] = bytes([1]) * piece, bytes([2]) * piece
    native.batched_memcpy([places[0], places[1]], [places[2]] * 2, [piece] * 2)  # the last one wins
    assert view[2 * piece : 3 * piece] == bytes([2]) * piece


def test_a_list_that_changes_while_it_is_read_is_no_fault() -> None:
    addresses: list[Any] = []

    class Emptying:
        def __index__(self) -> int:
            addresses.clear()
            return 0

    addresses += [Emptying() for _ in range(1000)]
    with pytest.raises(ValueError, match="1000 src, 1 dst"):
        native.batched_memcpy(addresses, [0], [0])


@pytest.mark.parametrize("ask", [native.HostBuffer, native.alloc_pinned_ptr])
def test_memory_that_the_system_does_not_have_is_told_in_one_line(ask: Any) -> None:
    with pytest.raises(
        MemoryError, match="HostBuffer: 4611686018427387904 bytes: Cannot allocate memory; ask for"
    ):
        ask(1 << 62)


def test_threads_that_allocate_and_free_at_once_free_each_address_once() -> None:
    def rounds(_: int) -> int:
        addresses = [native.alloc_pinned_ptr(4096) for _ in range(50)]
        return sum(not native.free_pinned_ptr(address) for address in addresses)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rounds, range(4))) == [50] * 4
    address, freed = native.alloc_pinned_ptr(4096), []

    def free(_: int) -> None:
        with contextlib.suppress(ValueError):
            native.free_pinned_ptr(address)
            freed.append(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(free, range(16)))
    assert freed == [1]


FORKED = """
import os
from lmcache_hpu import _native as native
size = 16 << 20
source, target = native.HostBuffer(size, False), native.HostBuffer(size, False)

def copied(byte):
    memoryview(source).cast("B")[:] = bytes([byte]) * size
    native.batched_memcpy([source.address], [target.address], [size])
    return memoryview(target).cast("B") == bytes([byte]) * size

assert copied(5)
child = os.fork()
if not child:
    os._exit(0 if copied(6) else 1)
assert os.waitpid(child, 0)[1] == 0
assert memoryview(target).cast("B") == bytes([5]) * size
"""


def test_a_forked_process_copies_with_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_second_import_of_the_module_finds_the_same_memory() -> None:
    address = native.alloc_pinned_ptr(64)
    sys.modules.pop(native.__name__)
    again = importlib.import_module(native.__name__)
    again.free_pinned_ptr(address)
    with pytest.raises(ValueError, match="freed already"):
        native.free_pinned_ptr(address)
    sys.modules[native.__name__] = native
