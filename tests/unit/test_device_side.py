"""The server's hands on a device: what is checked first, in what order things are queued, and who hears of the end.

The device here is a list of what it was told to do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.local import pool_view
from helpers.pages import layout
from helpers.server import wait_for
from lmcache.v1.multiprocess import device_side
from lmcache.v1.multiprocess.device_side import DeviceSide, Move, Part
from lmcache.v1.platform.ops_types import TransferDirection

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CHUNK, BLOCKS = 8, 16
NAMESPACE = msgspec.structs.replace(layout(page_bytes=(32, 32, 48)), chunk_size=CHUNK)
"""Two layers of pages of one size, then one of another: two calls of an op for each batch."""


class Device:
    """What a vendor brings: ops, events, a context, a stream. All calls are in ``log``."""

    def __init__(self, kinds: frozenset[str] = frozenset(["tensors"])) -> None:
        self.kinds = kinds
        self.is_synchronous = False
        self.log: list[Any] = []
        self.fails_at = -1
        self.stuck = ""
        self.tells_once = False
        self.silent = False
        self.event_fault = ""
        self.ends = threading.Event()
        self.ends.set()
        self.done: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.cupy_stream = SimpleNamespace(ptr=77)
        self.stream = self
        self.max_batch_size = 2
        self.device = SimpleNamespace(type="fake")
        self.kv_tensors = [f"layer {i}" for i in range(3)]
        self.moved = 0

    # --- context and stream

    def get_shape_desc(self, group: int) -> Any:
        return SimpleNamespace(nb=BLOCKS)

    def get_kernel_group_shape_dtype(self, tokens: int, group: int) -> Any:
        layers, page = {0: (2, 32), 1: (1, 48)}[group]
        return torch.Size((1, layers, tokens // 4, page)), torch.uint8

    def get_temp_kernel_group_buffer(self, index: int, group: int) -> Any:
        shape, dtype = self.get_kernel_group_shape_dtype(CHUNK, group)
        return torch.zeros(shape, dtype=dtype)

    def get_kernel_group_kv_pointers(self, group: int) -> Any:
        return f"pointers {group}"

    def get_engine_kv_format(self, group: int) -> int:
        return 7

    def stage_block_ids(self, ids: Any) -> Any:
        return ("staged", list(ids))

    def synchronize(self) -> None:
        self.log.append("synchronize")
        if self.stuck:
            text, self.stuck = self.stuck, "" if self.tells_once else self.stuck
            raise RuntimeError(text)

    def close(self) -> None:
        self.log.append("close")

    # --- ops

    def operand_kinds(self, name: str) -> frozenset[str]:
        return self.kinds

    def multi_layer_block_kv_transfer(self, *arguments: Any) -> None:
        self.moved += 1
        if self.moved == self.fails_at:
            raise RuntimeError("launch failed")
        self.log.append(("blocks", *arguments))

    def lmcache_memcpy_async(self, target: Any, source: Any, nbytes: int, way: int, *_: int) -> None:
        self.log.append(("stage", nbytes, way))

    def record_completion_on_stream(self, stream: int, kind: str, payload: bytes) -> None:
        assert stream == 77
        if not self.silent:
            self.done.put((kind, payload))

    def drain_recorded_completions(self) -> list[tuple[str, bytes]]:
        return [self.done.get() for _ in range(self.done.qsize())]

    # --- events

    def import_event(self, handle: bytes, device: Any) -> str:
        if handle == b"bad":
            raise ValueError("not an event")
        return f"event {handle.decode()}"

    def wait_event(self, event: str, stream: Any) -> None:
        self.log.append(("wait", event))

    def create_event(self, device: Any) -> str:
        return "ours"

    def record_event(self, event: str, stream: Any) -> None:
        self.log.append(("record", event))

    def export_event(self, event: str, device: Any) -> bytes:
        return b"exported"

    def synchronize_event(self, event: str, device: Any) -> None:
        assert self.ends.wait(20)
        if self.event_fault:
            raise RuntimeError(self.event_fault)


class Side(DeviceSide):
    """A side on such a device."""

    def __init__(self, device: Device) -> None:
        self.fake = device
        self.opened: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__([[b"", b"", b""]], [NAMESPACE], pool_view(8), self.opened.put, 0)

    def _open(self) -> None:
        module = SimpleNamespace(device=lambda _: nullcontext(), stream=lambda _: nullcontext())
        self._context = self._ops = self._backend = self.fake
        self._device = self.fake.device
        self._by_tensors = "tensors" in self.fake.operand_kinds("")
        self._spec = SimpleNamespace(_get_torch_module=lambda: module)  # type: ignore[assignment]


class Told:
    """What was said of a move."""

    def __init__(self) -> None:
        self.queued: list[bytes] = []
        self.done: list[str] = []

    def move(self, direction: Any, blocks: list[int], skip: int = 0, event: bytes = b"e") -> Move:
        offsets = [i * 4096 for i in range(len(blocks) // 2)]
        return Move(direction, [Part(offsets, blocks, skip)], event, self.queued.append, self.done.append)


@pytest.fixture
def make() -> Iterator[Callable[[Device], Side]]:
    sides: list[tuple[Side, Device]] = []

    def start(device: Device) -> Side:
        side = Side(device)
        assert side.opened.get(timeout=20) == ""
        sides.append((side, device))
        return side

    yield start
    for side, device in sides:
        device.ends.set()
        side.close()
        assert side.join(20)
        assert device.log.count("close") == 1
        assert side._context is None, "and its buffers with it"


def heard(told: Told) -> str:
    wait_for(lambda: told.done, 20, "the end of the move")
    assert len(told.done) == 1
    return told.done[0]


def test_a_store_reads_pages_before_it_stages_and_a_load_stages_before_it_writes(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    side = make(device)
    for direction, way in (("store", TransferDirection.D2H), ("load", TransferDirection.H2D)):
        told = Told()
        device.log.clear()
        side.submit(told.move(direction, [1, 2, 3, 4, 5, 6]))
        assert heard(told) == ""
        assert told.queued == [b"exported"]
        steps = [entry[0] if isinstance(entry, tuple) else entry for entry in device.log]
        one = ["blocks", "stage", "stage"] if direction == "store" else ["stage", "stage", "blocks"]
        last = ["blocks", "stage"] if direction == "store" else ["stage", "blocks"]
        assert steps == ["wait", *one, *last, *one, *last, "record"]
        calls = [entry for entry in device.log if entry[0] == "blocks"]
        assert {call[5] for call in calls} == {int(way)}
        assert [call[1] for call in calls] == [["layer 0", "layer 1"]] * 2 + [["layer 2"]] * 2
        assert [call[3] for call in calls] == [[1, 2, 3, 4], [5, 6]] * 2
        assert [len(call[2]) for call in calls] == [2, 1] * 2


def test_ops_that_take_pointers_get_pointers_and_staged_ids(make: Callable[[Device], Side]) -> None:
    device = Device(frozenset(["pointers"]))
    told = Told()
    make(device).submit(told.move("store", [1, 2]))
    assert heard(told) == ""
    first, second = (entry for entry in device.log if entry[0] == "blocks")
    assert (first[1], second[1]) == ("pointers 0", "pointers 1")
    assert all(isinstance(address, int) for call in (first, second) for address in call[2])
    assert first[3] == ("staged", [1, 2])


@pytest.mark.parametrize("kinds", ["tensors", "pointers"])
@pytest.mark.parametrize("bad", [-1, BLOCKS, 1 << 62])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_block_outside_the_cache_is_refused_whatever_the_op_would_do(
    make: Callable[[Device], Side], kinds: str, bad: int, direction: str
) -> None:
    device = Device(frozenset([kinds]))
    told = Told()
    make(device).submit(told.move(direction, [1, 2, 3, 4, 5, bad]))
    assert heard(told) == f"KV group 0: block id {bad}: expected 0 to {BLOCKS - 1}"
    assert (told.queued, device.log) == ([], []), "nothing was queued, not even the wait"


def test_a_skipped_block_need_not_be_one(make: Callable[[Device], Side]) -> None:
    device = Device()
    told = Told()
    make(device).submit(told.move("load", [-1, -1, -1, 3, 4, 5], skip=3))
    assert heard(told) == ""
    calls = [entry for entry in device.log if entry[0] == "blocks"]
    assert [(call[3], call[-1]) for call in calls] == [([-1, 3, 4, 5], 1)] * 2, "the first chunk is left out"


def test_of_a_move_that_fails_in_the_middle_nobody_hears_before_the_device_is_still(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.fails_at = 3
    side, told, later = make(device), Told(), Told()
    side.submit(told.move("load", [1, 2, 3, 4, 5, 6]))
    assert heard(told) == "RuntimeError: launch failed"
    assert device.log[-1] == "synchronize"
    side.submit(later.move("load", [1, 2]))
    assert heard(later) == "", "the next one is served"


def test_a_device_that_cannot_say_whether_it_is_done_ends_no_move_and_passes_no_fence(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.fails_at, device.stuck = 2, "device lost"
    side, told, later = make(device), Told(), Told()
    side.submit(told.move("store", [1, 2]))
    passed: list[int] = []
    side.fence(lambda: passed.append(1))
    side.submit(later.move("store", [1, 2]))
    assert "it is not known what the device still does: RuntimeError: launch failed" in heard(later)
    side.close()
    assert side.join(20)
    assert (told.done, told.queued, passed) == ([], [], [])


def test_a_device_that_tells_of_a_failure_when_it_is_waited_for_is_waited_for_again(
    make: Callable[[Device], Side],
) -> None:
    """As CUDA does: what failed is said once, by whatever call comes next."""
    device = Device()
    device.fails_at, device.stuck, device.tells_once = 1, "a kernel failed", True
    side, told, later = make(device), Told(), Told()
    side.submit(told.move("load", [1, 2]))
    assert heard(told) == "RuntimeError: launch failed"
    assert device.log.count("synchronize") == 2
    side.submit(later.move("load", [1, 2]))
    assert heard(later) == "", "the device is not lost"


def test_of_a_move_whose_end_fails_nobody_hears_before_the_device_is_still(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.event_fault = "device-side assert"
    told = Told()
    make(device).submit(told.move("load", [1, 2]))
    assert heard(told) == "RuntimeError: device-side assert"
    assert device.log[-1] == "synchronize"


def test_a_device_that_is_lost_while_it_moves_ends_nothing_and_says_so_to_who_comes_later(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.event_fault, device.stuck = "gone", "device lost"
    side, told, later = make(device), Told(), Told()
    side.submit(told.move("load", [1, 2]))
    wait_for(lambda: side._lost, 20, "it is known to be lost")
    passed: list[int] = []
    side.fence(lambda: passed.append(1))
    side.submit(later.move("load", [1, 2]))
    assert "it is not known what the device still does: RuntimeError: gone" in heard(later)
    side.close()
    assert side.join(20)
    assert (told.done, passed) == ([], [])


def test_the_device_must_say_in_both_ways_that_it_is_done(make: Callable[[Device], Side]) -> None:
    device = Device()
    device.silent = True
    told = Told()
    make(device).submit(told.move("store", [1, 2]))
    assert "its completion was not recorded" in heard(told)
    assert not device_side._completed


def test_where_all_is_done_on_return_the_end_is_told_before_the_answer(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.is_synchronous = True
    told: list[str] = []
    move = Move(
        "store", [Part([0], [1, 2])], b"e", lambda _: told.append("queued"), lambda _: told.append("done")
    )
    make(device).submit(move)
    wait_for(lambda: len(told) == 2, 20)
    assert told == ["done", "queued"]


def test_a_fence_waits_for_what_was_before_it_and_a_closed_side_fails_what_comes_after(
    make: Callable[[Device], Side],
) -> None:
    device = Device()
    device.ends.clear()
    side, told, late = make(device), Told(), Told()
    side.submit(told.move("load", [1, 2]))
    passed: list[int] = []
    side.fence(lambda: passed.append(len(told.done)))
    wait_for(lambda: told.queued, 20)
    assert (passed, told.done) == ([], [])
    side.close()
    side.submit(late.move("load", [1, 2]))
    assert not side.join(0.05), "the move under way is waited for"
    assert "close" not in device.log
    device.ends.set()
    assert side.join(20)
    assert (passed, told.done) == ([1], [""])
    assert heard(late) == "the worker's session has ended"


def test_an_event_that_is_none_fails_the_move_alone(make: Callable[[Device], Side]) -> None:
    device = Device()
    side, told, later = make(device), Told(), Told()
    side.submit(told.move("store", [1, 2], event=b"bad"))
    assert heard(told) == "not an event"
    side.submit(later.move("store", [1, 2]))
    assert heard(later) == ""
