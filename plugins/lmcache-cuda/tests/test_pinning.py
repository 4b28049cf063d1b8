"""Page-locking: whole, else in steps, all or nothing; copies are cut where it was done in steps."""

from __future__ import annotations

import itertools
import logging
import mmap
import resource
from collections.abc import Callable
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache_cuda import pinning, runtime
from lmcache_cuda.pinning import CudaPinMemoryBackend, Pieces

PAGE = mmap.PAGESIZE
BASE = 1 << 40
STEP = 4 * PAGE


class Driver:
    """Registers what ``accepts`` accepts, and keeps the books as the driver does."""

    def __init__(self, accepts: Callable[[int, int], int]) -> None:
        self.accepts, self.held, self.tried = accepts, {}, []

    def host_register(self, ptr: int, size: int, flags: int = 0) -> None:
        self.tried.append((ptr, size, flags))
        code = self.accepts(ptr, size)
        overlap = any(
            ptr // PAGE <= (s + n - 1) // PAGE and s // PAGE <= (ptr + size - 1) // PAGE
            for s, n in self.held.items()
        )
        if code or overlap:
            error = DeviceError(f"cuMemHostRegister_v2: error {code or 712}")
            error.code = code or 712
            raise error
        self.held[ptr] = size

    def host_unregister(self, ptr: int) -> None:
        if ptr not in self.held:
            raise DeviceError("cuMemHostUnregister: not registered")
        del self.held[ptr]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def make(accepts: Callable[[int, int], int]) -> Driver:
        made = Driver(accepts)
        monkeypatch.setattr(runtime, "native", lambda: made)
        monkeypatch.setattr(pinning, "_STEPS", (2 * STEP, STEP))
        return made

    return make


@pytest.mark.parametrize(
    ("ptr", "size"), [(BASE + 16, 16), (BASE + 16, 3 * PAGE), (BASE, PAGE + 1), (BASE + 1, 1)]
)
def test_memory_that_ends_within_a_page_is_registered_whole_too(
    driver: Callable[..., Driver], ptr: int, size: int
) -> None:
    native, pieces = driver(lambda ptr, size: 0), Pieces()
    backend = CudaPinMemoryBackend(pieces)
    assert backend.pin_memory(ptr, size)
    assert native.held == {ptr: size}
    assert pieces.cuts(ptr, size) == []


def test_memory_is_registered_whole_where_the_driver_can(driver: Callable[..., Driver]) -> None:
    native, pieces = driver(lambda ptr, size: 0), Pieces()
    backend = CudaPinMemoryBackend(pieces)
    assert backend.pin_memory(BASE, 10 * STEP, 2)
    assert native.tried == [(BASE, 10 * STEP, 3)], "portable, beside what was asked for"
    assert pieces.cuts(BASE, 10 * STEP) == []
    assert backend.unpin_memory(BASE)
    assert native.held == {}


@pytest.mark.parametrize(
    ("ptr", "size"), [(BASE, 10 * STEP), (BASE + 100, 10 * STEP), (BASE + 64, 3 * STEP + 7)]
)
def test_memory_that_is_too_large_for_one_call_is_registered_in_steps_that_share_no_page(
    driver: Callable[..., Driver], ptr: int, size: int
) -> None:
    native, pieces = driver(lambda ptr, size: 2 if size > STEP else 0), Pieces()
    backend = CudaPinMemoryBackend(pieces)
    assert backend.pin_memory(ptr, size)
    held = sorted(native.held.items())
    assert held[0][0] == ptr
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(held)), "no gap"
    assert sum(n for _, n in held) == size
    cuts = pieces.cuts(ptr, size)
    assert [ptr + cut for cut in cuts] == [start for start, _ in held[1:]]
    assert all((ptr + cut) % PAGE == 0 for cut in cuts)
    assert backend.unpin_memory(ptr)
    assert native.held == {}
    assert pieces.cuts(ptr, size) == []


def test_where_one_step_fails_those_before_it_are_given_back(
    driver: Callable[..., Driver], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, pieces = driver(lambda ptr, size: 2 if size > STEP or ptr >= BASE + 6 * STEP else 0), Pieces()
    backend = CudaPinMemoryBackend(pieces)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    with caplog.at_level(logging.WARNING):
        assert backend.pin_memory(BASE, 4096 * STEP) is False
    assert native.held == {}
    assert len(native.tried) > 3
    assert pieces.cuts(BASE, 10 * STEP) == []
    text = caplog.text
    assert "cannot be page-locked: cuMemHostRegister_v2: error 2" in text
    assert "may lock 8388608 bytes (RLIMIT_MEMLOCK)" in text
    assert "ulimit -l unlimited" in text
    assert backend.unpin_memory(BASE) is False


def test_where_the_limit_is_not_the_reason_nobody_is_sent_after_it(
    driver: Callable[..., Driver], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(lambda ptr, size: 801)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert CudaPinMemoryBackend(Pieces()).pin_memory(BASE, STEP) is False
    assert "error 801" in caplog.text
    assert "RLIMIT" not in caplog.text


def test_memory_that_is_registered_already_is_not_tried_in_steps(driver: Callable[..., Driver]) -> None:
    native = driver(lambda ptr, size: 0)
    native.held[BASE + 3 * STEP] = STEP
    assert CudaPinMemoryBackend(Pieces()).pin_memory(BASE, 10 * STEP) is False
    assert len(native.tried) == 1
    assert native.held == {BASE + 3 * STEP: STEP}


def test_the_same_address_is_pinned_once_and_unpinned_once(driver: Callable[..., Driver]) -> None:
    native = driver(lambda ptr, size: 0)
    backend = CudaPinMemoryBackend(Pieces())
    assert backend.pin_memory(BASE, PAGE)
    assert backend.pin_memory(BASE, PAGE) is False
    assert backend.unpin_memory(BASE)
    assert backend.unpin_memory(BASE) is False
    assert len(native.tried) == 1


@pytest.mark.parametrize(("ptr", "size"), [(0, PAGE), (-PAGE, PAGE), (BASE, 0), (BASE, -1)])
def test_what_is_no_memory_is_not_pinned(driver: Callable[..., Driver], ptr: int, size: int) -> None:
    native = driver(lambda ptr, size: 0)
    assert CudaPinMemoryBackend(Pieces()).pin_memory(ptr, size) is False
    assert native.tried == []


def test_cuts_are_those_inside_a_copy_and_none_at_its_ends() -> None:
    pieces = Pieces()
    pieces.add([1000, 3000, 2000])
    assert pieces.cuts(1000, 1000) == []
    assert pieces.cuts(999, 1002) == [1, 1001]
    assert pieces.cuts(500, 3000) == [500, 1500, 2500]
    assert pieces.cuts(3001, 10) == []
    pieces.remove([1000, 2000])
    assert pieces.cuts(0, 5000) == [3000]


def test_without_a_driver_pinning_is_not_supported_and_nothing_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver() -> Any:
        raise DeviceError("no CUDA driver")

    monkeypatch.setattr(runtime, "native", no_driver)
    backend = CudaPinMemoryBackend(Pieces())
    assert backend.is_pin_supported is False
    assert backend.pin_memory(BASE, PAGE) is False
