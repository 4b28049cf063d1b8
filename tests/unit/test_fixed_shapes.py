"""Blocks in a fixed number of shapes, and the vendor's own mover of pages in engine-driven mode."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import ConfigError
from lmcache.v1.platform.fixed_shapes import DEFAULT_SIZES, batches, last_of_each, padded, parse_sizes

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True).map(sorted)


@given(st.integers(0, 2000), SIZES)
def test_batches_hold_every_block_once_in_order_and_are_of_the_given_sizes(
    count: int, sizes: list[int]
) -> None:
    found = list(batches(count, sizes))
    assert [at for first, taken, _ in found for at in range(first, first + taken)] == list(range(count))
    assert {size for _, _, size in found} <= set(sizes)
    assert all(0 < taken <= size for _, taken, size in found)


@given(st.integers(1, 2000), SIZES)
def test_fewer_places_than_the_smallest_size_stay_unused(count: int, sizes: list[int]) -> None:
    assert sum(size for _, _, size in batches(count, sizes)) - count < sizes[0]


@given(st.lists(st.integers(0, 5), max_size=30))
def test_of_a_block_that_is_named_twice_the_last_place_counts(ids: list[int]) -> None:
    kept = last_of_each(ids)
    assert [ids[at] for at in kept] == [ids[at] for at in range(len(ids)) if ids[at] not in ids[at + 1 :]]


def test_a_batch_is_filled_up_with_its_last_block() -> None:
    assert padded([4, 2], 4) == [4, 2, 2, 2]


def test_sizes_are_read_and_nothing_means_the_default() -> None:
    assert parse_sizes("X", " 4, 16,64 ") == (4, 16, 64)
    assert parse_sizes("X", "") == DEFAULT_SIZES


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "8,8",
        "32,8",
        "8,x",
        "8,,32",
        "-4",
        "1.5",
        "٣",
        "8,100000",
        "9" * 5000,
        ",".join(map(str, range(1, 18))),
    ],
    ids=lambda text: text[:12],
)
def test_sizes_that_make_no_sense_are_refused_by_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SIZES='.*': expected at most 16 rising numbers of blocks"):
        parse_sizes("SIZES", text)


# ----------------------------------------------------------------------------------------------------- with torch


class PlainStage:
    """What native code does, in Python."""

    def __init__(self) -> None:
        self.rows = 0

    def HostBuffer(self, nbytes: int, lock: bool = True) -> Any:
        class Buffer(bytearray):
            @property
            def address(self) -> int:
                return ctypes.addressof(ctypes.c_char.from_buffer(self))

            @property
            def nbytes(self) -> int:
                return len(self)

        return Buffer(nbytes)

    def _pairs(self, stage: int, addresses: Any, pieces: int, piece: int, stride: int) -> Any:
        for row, place in enumerate(addresses):
            self.rows += 1
            for at in range(pieces) if place else ():
                yield stage + (row * pieces + at) * piece, place + at * stride, piece

    def gather(self, *call: Any) -> None:
        for here, there, nbytes in self._pairs(*call):
            ctypes.memmove(here, there, nbytes)

    def scatter(self, *call: Any) -> None:
        for here, there, nbytes in self._pairs(*call):
            ctypes.memmove(there, here, nbytes)


def mover(
    stage: PlainStage, said: list[str], sizes: tuple[int, ...] = (2, 8), stage_bytes: int = 1 << 16
) -> Any:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

    return FixedShapeMover(
        stage, sizes, lambda: said.append("end"), lambda device: said.append("wait"), stage_bytes
    )


@pytest.mark.torch
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_pages_go_out_and_come_back_byte_by_byte_whatever_their_number(data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]))
    blocks, elements = 24, data.draw(st.integers(1, 9))
    ids = data.draw(st.lists(st.integers(0, blocks - 1), max_size=40, unique=True))
    bits = [torch.randint(0, 256, (blocks, elements * dtype.itemsize), dtype=torch.uint8) for _ in range(3)]
    pages = [layer.clone().view(dtype) for layer in bits]
    row = elements * dtype.itemsize
    host = torch.zeros(3, max(len(ids), 1), row, dtype=torch.uint8)
    places = [[host[layer, at].data_ptr() for at in range(len(ids))] for layer in range(3)]
    said: list[str] = []
    one = mover(PlainStage(), said, stage_bytes=data.draw(st.integers(1, 400)))
    one.move_pages(pages, ids, places, True)
    for layer in range(3):
        assert torch.equal(host[layer, : len(ids)], bits[layer][ids])
        pages[layer].view(torch.uint8).zero_()
    one.move_pages(pages, ids, places, False)
    for layer in range(3):
        expected = torch.zeros_like(bits[layer])
        expected[ids] = bits[layer][ids]
        assert torch.equal(pages[layer].view(torch.uint8), expected)
    # What was pending is ended first; then each round is ended and waited for.
    assert re.fullmatch(r"(end (end wait )+)*", "".join(f"{one} " for one in said))


@pytest.mark.torch
def test_where_a_written_block_is_named_twice_the_last_address_wins() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    pages, host = torch.zeros(4, 8, dtype=torch.uint8), torch.arange(24, dtype=torch.uint8).view(3, 8)
    mover(PlainStage(), []).move_pages([pages], [1, 2, 1], [[host[at].data_ptr() for at in range(3)]], False)
    assert torch.equal(pages[1], host[2])
    assert torch.equal(pages[2], host[1])


@pytest.mark.torch
def test_layers_share_a_wait_as_far_as_the_stage_holds_them() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    pages = [torch.zeros(4, 64, dtype=torch.uint8) for _ in range(6)]
    host = torch.zeros(6, 2, 64, dtype=torch.uint8)
    places = [[host[layer, at].data_ptr() for at in range(2)] for layer in range(6)]
    said: list[str] = []
    mover(PlainStage(), said, stage_bytes=3 * 2 * 64).move_pages(pages, [0, 3], places, True)
    assert said == ["end", *["end", "wait"] * 2]


def moved(one: Any, widths: tuple[int, ...], ids: tuple[int, ...] = (0, 3)) -> None:
    """Store blocks of layers of these widths, and compare."""
    import torch

    pages = [torch.randint(0, 256, (4, width), dtype=torch.uint8) for width in widths]
    hosts = [torch.zeros(len(ids), width, dtype=torch.uint8) for width in widths]
    one.move_pages(
        pages, list(ids), [[host[at].data_ptr() for at in range(len(ids))] for host in hosts], True
    )
    assert all(torch.equal(host, layer[list(ids)]) for host, layer in zip(hosts, pages, strict=True))


@pytest.mark.torch
def test_planes_of_two_widths_in_turn_share_two_waits() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    said: list[str] = []
    moved(mover(PlainStage(), said), (64, 16, 64, 16, 64, 16))
    assert said == ["end", *["end", "wait"] * 2]


@pytest.mark.torch
def test_a_stage_that_there_is_no_memory_for_costs_one_move_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    stage = PlainStage()
    one = mover(stage, [], stage_bytes=64)
    moved(one, (16,))

    def none(nbytes: int, lock: bool = True) -> Any:
        raise MemoryError(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "HostBuffer", none)
        with pytest.raises(MemoryError):
            moved(one, (64,))
    moved(one, (16,))


@pytest.mark.torch
def test_a_move_that_fails_is_waited_for_before_its_stage_is_used_again() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    said: list[str] = []
    one = mover(PlainStage(), said)
    with pytest.raises(IndexError):
        moved(one, (16,), ids=(0, 9))
    assert said[-1] == "wait"
    moved(one, (16,))


@pytest.mark.torch
def test_a_stage_that_a_failed_device_may_still_write_to_is_never_used_again() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    from lmcache.v1.platform import fixed_shapes

    one = mover(PlainStage(), [])
    moved(one, (16,))
    before, wait = one._buffer, one._synchronize

    def lost(device: Any) -> None:
        raise RuntimeError("the device is lost")

    one._synchronize = lost
    with pytest.raises(RuntimeError, match="the device is lost"):
        moved(one, (16,))
    one._synchronize = wait
    moved(one, (16,))
    assert one._buffer is not before
    assert any(kept is before for kept in fixed_shapes._LOST)


@pytest.mark.torch
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_spec_s_own_mover_moves_what_torch_copies_would(
    direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from lmcache.v1.multiprocess.transfer_context import pages
    from lmcache.v1.platform import _device_detect

    blocks, per_chunk = 9, 3
    sizes = (32, 48)

    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(1)
        whole = [torch.randn(blocks, 40, dtype=torch.float16) for _ in sizes]  # blocks lie apart
        tensors = [one[:, : size // 2] for one, size in zip(whole, sizes, strict=True)]
        host = bytearray(torch.randint(0, 255, (2 * per_chunk * sum(sizes),), dtype=torch.uint8).tolist())
        group = pages.KVGroupPages(
            namespace=SimpleNamespace(page_bytes=sizes, blocks_per_chunk=per_chunk), num_blocks=blocks,
            addresses=[t.data_ptr() for t in tensors], strides=[80, 80], device="other:0", tensors=tensors,
        )  # fmt: skip
        return whole, host, group

    def copy(mover: Any) -> tuple[Any, bytes]:
        whole, host, group = made()
        spec = SimpleNamespace(page_mover=mover)
        monkeypatch.setattr(_device_detect, "get_device_spec", lambda kind: spec if kind == "other" else None)
        monkeypatch.setattr(_device_detect, "synchronize_current_stream", lambda device: None)
        view, size = memoryview(host), per_chunk * sum(sizes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(host))
        spans = [pages.Span(0, 4, 2), pages.Span(2, 0, 1)], [pages.Span(1, 7, 1)]
        chunks = [
            pages.ChunkCopy(base + at * size, view[at * size : (at + 1) * size], part)
            for at, part in enumerate(spans)
        ]
        pages.copy_pages(group, direction, chunks)
        return [one.view(torch.int16) for one in whole], bytes(host)  # bits: what is loaded may be no number

    expected, expected_bytes = copy(None)
    found, found_bytes = copy(mover(PlainStage(), []).move_pages)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found_bytes == expected_bytes
    before, before_bytes = [one.view(torch.int16) for one in made()[0]], made()[1]
    assert (expected_bytes != bytes(before_bytes)) == (direction == "store")
    assert any(not torch.equal(one, other) for one, other in zip(found, before, strict=True)) == (
        direction == "load"
    )
