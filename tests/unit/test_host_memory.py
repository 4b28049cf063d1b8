"""Host memory by address: what an allocator promises, what freeing refuses, what is told when a wish fails."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmcache.logging
from helpers.pinning import Pinner, PinningSpec
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.torch_ops import host_pages, memory

KINDS = ("pinned", "pinned_numa", "hugepage_pinned", "hugepage_pinned_numa", "numa")
SIZED = KINDS[1:]
PAGE = mmap.PAGESIZE
Lines = Callable[[], list[str]]


def alloc(kind: str, *args: Any) -> int:
    ptr: int = getattr(torch_ops, f"alloc_{kind}_ptr")(*args)
    return ptr


def free(kind: str, *args: Any) -> None:
    getattr(torch_ops, f"free_{kind}_ptr")(*args)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {*memory._live}
    yield
    assert {*memory._live} == before


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Lines:
    """What these modules log, with nothing said before."""
    monkeypatch.setattr(lmcache.logging, "_said", set())
    caplog.set_level(logging.INFO, "lmcache")
    modules = (memory.__name__, host_pages.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name in modules]


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A selected backend that pins; addresses and sizes that are pinned."""
    spec = PinningSpec()
    monkeypatch.setattr(Pinner, "pins", {})
    monkeypatch.setattr(memory, "_selected_spec", lambda: spec)
    return Pinner.pins


# --- promises ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 5 * PAGE))
def test_memory_is_aligned_zeroed_and_writable_to_its_last_byte(kind: str, size: int) -> None:
    ptr = alloc(kind, size)
    try:
        assert ptr > 0
        assert ptr % PAGE == 0
        assert ctypes.string_at(ptr, size) == bytes(size)
        ctypes.memset(ptr, 0xA5, size)
        assert ctypes.string_at(ptr, size) == b"\xa5" * size
    finally:
        free(kind, ptr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_of_nothing_is_refused(kind: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"alloc_{kind}_ptr: size={size}: expected 1 byte or more"):
        alloc(kind, size)


@pytest.mark.parametrize("size", ["1", 1.0, None])
def test_a_size_that_is_no_integer_is_refused(size: Any) -> None:
    with pytest.raises(TypeError):
        alloc("pinned", size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_what_cannot_be_had_is_said_in_one_line(kind: str, size: int) -> None:
    with pytest.raises(MemoryError) as caught:
        alloc(kind, size)
    assert str(caught.value).startswith(f"alloc_{kind}_ptr: {size} bytes of host memory: ")
    assert "\n" not in str(caught.value)


# --- freeing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_freed_once(kind: str) -> None:
    ptr = alloc(kind, PAGE)
    free(kind, ptr)
    with pytest.raises(ValueError, match=f"free_{kind}_ptr: pointer {ptr:#x}: it is not allocated, or freed"):
        free(kind, ptr)


def test_an_address_inside_and_one_of_nobody_are_refused() -> None:
    ptr = alloc("pinned", 2 * PAGE)
    for wrong in (ptr + PAGE, ptr + 1, 0, -1):
        with pytest.raises(ValueError, match="it is not allocated"):
            free("pinned", wrong)
    free("pinned", ptr)


def test_only_its_partner_frees_an_allocation() -> None:
    ptr = alloc("numa", PAGE)
    with pytest.raises(ValueError, match="it is alloc_numa_ptr's; free_numa_ptr frees it"):
        free("pinned", ptr)
    ctypes.memset(ptr, 1, PAGE)  # it is still there
    free("numa", ptr)


@pytest.mark.parametrize("kind", SIZED)
def test_another_size_than_was_asked_for_frees_nothing(kind: str) -> None:
    ptr = alloc(kind, 100)
    with pytest.raises(ValueError, match=f"pointer {ptr:#x}: size=4096: 100 bytes were asked for"):
        free(kind, ptr, 4096)
    ctypes.memset(ptr, 1, 100)
    free(kind, ptr, 100)
    for unchecked in (0, None):
        free(kind, alloc(kind, 100), unchecked)


def test_racing_threads_free_each_allocation_exactly_once() -> None:
    barrier, freed, refused = threading.Barrier(8), [], []
    pointers = [alloc("numa", PAGE) for _ in range(200)]

    def free_all(_: int) -> None:
        barrier.wait(10)
        for ptr in pointers:
            try:
                free("numa", ptr)
                freed.append(ptr)
            except ValueError:
                refused.append(ptr)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(free_all, range(8)))
    assert sorted(freed) == sorted(pointers)
    assert len(refused) == 7 * len(pointers)


def test_racing_threads_get_memory_of_their_own() -> None:
    barrier = threading.Barrier(4)

    def work(mark: int) -> bool:
        barrier.wait(10)
        sound = True
        for _ in range(100):
            ptr = alloc("pinned", PAGE)
            ctypes.memset(ptr, mark, PAGE)
            sound &= ctypes.string_at(ptr, PAGE) == bytes([mark]) * PAGE
            free("pinned", ptr)
        return sound

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5)))


# --- pinning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_pinned_by_the_selected_backend_and_unpinned_before_it_goes(
    kind: str, pinning: dict[int, int]
) -> None:
    ptr = alloc(kind, 5000)
    assert pinning == ({ptr: 5000} if "pinned" in kind else {})
    free(kind, ptr)
    assert pinning == {}


def test_a_backend_that_pins_none_leaves_memory_pageable_and_that_is_said_once(lines: Lines) -> None:
    for _ in range(2):
        free("pinned", alloc("pinned", PAGE))
    assert lines() == ["alloc_pinned_ptr: memory stays pageable: backend cpu pins none"]


def test_a_pin_that_fails_leaves_memory_pageable_and_is_warned_about(
    pinning: dict[int, int], monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(Pinner, "works", False)
    free("pinned", alloc("pinned", PAGE))
    assert lines() == [f"alloc_pinned_ptr: foo did not pin {PAGE} bytes; they stay pageable"]


def test_memory_that_cannot_be_unpinned_is_freed_all_the_same_and_told(
    pinning: dict[int, int], lines: Lines
) -> None:
    ptr = alloc("pinned", PAGE)
    pinning.clear()
    free("pinned", ptr)
    assert lines() == [f"free_pinned_ptr: foo did not unpin {ptr:#x}; it is unmapped all the same"]


def test_a_selection_that_fails_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> DeviceSpec:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(memory, "_selected_spec", refuse)
    with pytest.raises(RuntimeError, match="no such backend"):
        alloc("pinned", PAGE)
    free("numa", alloc("numa", PAGE))  # which asks no backend


# --- hugepages and nodes -----------------------------------------------------------------------------------


def test_without_hugepages_memory_is_plain_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: Lines
) -> None:
    monkeypatch.setattr(host_pages, "_MEMINFO", tmp_path / "none")
    for _ in range(2):
        host_pages.map_pages("op", PAGE, huge=True).close()
    assert lines() == ["op: no hugepages, plain pages instead: the kernel has none"]


def test_too_few_hugepages_are_told_with_how_many_it_takes(lines: Lines) -> None:
    page = host_pages._hugepage_size()
    if not page:
        pytest.skip("this kernel has no hugepages at all")
    with pytest.raises(MemoryError):
        host_pages.map_pages("op", 1 << 60, huge=True)
    assert f"need {(1 << 60) // page} of {page} bytes (sysctl vm.nr_hugepages)" in lines()[0]


@pytest.mark.parametrize(
    ("failed", "huge"), [(0, True), (errno.EINVAL, True), (errno.EFAULT, False), (errno.ENOMEM, False)]
)
def test_hugepages_that_would_fault_later_are_given_back(
    failed: int, huge: bool, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    # Where there are no hugepages, plain ones stand for them: what is tested is what follows the mapping.
    monkeypatch.setattr(host_pages, "_MAP_HUGETLB", 0)
    monkeypatch.setattr(host_pages, "_hugepage_size", lambda: 4 * PAGE)
    monkeypatch.setattr(host_pages, "_madvise", lambda memory, advice: failed)
    mapped = host_pages.map_pages("op", PAGE + 1, huge=True)
    assert len(mapped) == (4 * PAGE if huge else PAGE + 1)
    assert ("is there a limit on this container?" in "".join(lines())) is not huge
    mapped.close()


def test_a_node_that_the_host_lacks_is_told_and_memory_comes_from_elsewhere(lines: Lines) -> None:
    ptr = alloc("numa", PAGE, 1000)
    ctypes.memset(ptr, 1, PAGE)
    free("numa", ptr)
    assert lines() == ["alloc_numa_ptr: NUMA node 1000 is not honoured: this host has no such node"]


def test_a_kernel_that_refuses_the_node_is_quoted(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("this kernel has no NUMA nodes")
    monkeypatch.setattr(host_pages, "_SYS_MBIND", {host_pages.platform.machine(): 9999})  # no such call
    free("numa", alloc("numa", PAGE, 0))
    assert lines() == ["alloc_numa_ptr: NUMA node 0 is not honoured: Function not implemented"]


def test_an_unknown_machine_and_no_node_ask_the_kernel_nothing(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(host_pages, "_SYS_MBIND", {})
    free("numa", alloc("numa", PAGE, -1))
    assert lines() == []
    free("numa", alloc("numa", PAGE, 0))
    assert "no system call is known for" in lines()[0]
