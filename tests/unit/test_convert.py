"""A chunk stored from one format and retrieved into another has the same content, and comes back the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, canonical_view, kv_format, kv_formats
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.platform.torch_ops.convert import canonical_chunk, convert_chunk  # noqa: E402

KV_ROWS = [r for r in kv_formats() if r.token_addressable and not r.is_mla and not r.is_single_kv]
PAGED = [r for r in KV_ROWS if r.is_block_addressable]
MLA_ROWS = [r for r in kv_formats() if r.token_addressable and r.is_mla]
NL, NB, BS = 2, 4, 2


def chunk_shape(row: KVFormat, nh: int, hs: int, slots: int) -> tuple[int, ...]:
    return (row.kv_size, NL, slots, nh * hs * (2 if row.is_packed else 1))


def noise(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@given(
    source=st.sampled_from(KV_ROWS),
    target=st.sampled_from(KV_ROWS),
    nh=st.integers(1, 3),
    hs=st.integers(1, 4),
    slots=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]),
)
@settings(max_examples=100, deadline=None)
def test_there_and_back_is_the_identity_and_the_content_is_equal_on_the_way(
    source: KVFormat, target: KVFormat, nh: int, hs: int, slots: int, dtype: Any
) -> None:
    chunk = noise(*chunk_shape(source, nh, hs, slots), dtype=dtype)
    there = convert_chunk(chunk, source, target, nh)
    assert there.shape == chunk_shape(target, nh, hs, slots)
    assert same(canonical_chunk(there, target, nh), canonical_chunk(chunk, source, nh))
    assert same(convert_chunk(there, target.name, source.id, nh), chunk)


def test_what_was_made_in_inference_mode_is_written_outside_of_it() -> None:
    chunk = noise(2, NL, 4, 12)
    with torch.inference_mode():
        out = torch.zeros(1, NL, 4, 24, dtype=chunk.dtype)
    assert same(convert_chunk(chunk, 1, 13, 3, out), convert_chunk(chunk, 1, 13, 3))


def test_packed_heads_hold_k_then_v() -> None:
    packed = torch.arange(2 * 2 * 3).view(1, 1, 1, 12)  # one slot: K0 V0 K1 V1 of three elements each
    planes = convert_chunk(packed, 13, 2, num_heads=2)
    assert planes[0].flatten().tolist() == [0, 1, 2, 6, 7, 8]
    assert planes[1].flatten().tolist() == [3, 4, 5, 9, 10, 11]


def pages_of(row: KVFormat, nh: int, hs: int, fill: bool) -> Any:
    sizes = {"NB": NB, "NL": NL, "BS": BS, "NH": nh, "HS": hs, "CS": 2 * hs}
    shape = row.shape(sizes)

    def build(levels: tuple[str, ...]) -> Any:
        if levels:
            return [build(levels[1:]) for _ in range(2)]  # NL and the pair are both 2
        return noise(*shape) if fill else torch.zeros(shape, dtype=torch.bfloat16)

    return build(row.dims.levels)


def content(row: KVFormat, paged: Any, layer: int, block: int, nh: int) -> Any:
    """``[2, BS, NH, HS]`` of a block, read off the pages without the transfer."""

    def view(tensor: Any) -> Any:
        seen = canonical_view(row, tensor.shape, tensor.stride())
        step = seen.layer_stride * layer if row.is_cross_layer else 0
        return tensor.as_strided(seen.shape, seen.strides, step)[:, block]

    if row.is_kv_list:
        return torch.cat([view(paged[0][layer]), view(paged[1][layer])])
    if row.is_kv_second_tuple:
        return torch.cat([view(tensor) for tensor in paged[layer]])
    pages = view(paged if row.is_cross_layer else paged[layer])
    return torch.cat(pages.chunk(2, dim=-1)) if row.is_packed else pages


def move(row: KVFormat, paged: Any, chunk: Any, ids: list[int], nh: int, way: TransferDirection) -> None:
    hidden = chunk.shape[3]
    desc = PageBufferShapeDesc(row.kv_size, NL, NB, BS, nh, hidden // nh, 2)
    DeviceOps().multi_layer_block_kv_transfer(paged, [chunk], ids, "cpu", way, desc, 3 * BS, row.id, 0)


@pytest.mark.parametrize("target", PAGED, ids=lambda row: row.name)
@pytest.mark.parametrize("source", PAGED, ids=lambda row: row.name)
def test_pages_of_one_format_reach_those_of_another_with_equal_content(
    source: KVFormat, target: KVFormat
) -> None:
    nh, hs, out_of, into = 2, 4, [2, 0, 3], [1, 3, 0]
    theirs, mine = pages_of(source, nh, hs, fill=True), pages_of(target, nh, hs, fill=False)
    chunk = torch.zeros(chunk_shape(source, nh, hs, 3 * BS), dtype=torch.bfloat16)
    move(source, theirs, chunk, out_of, nh, TransferDirection.D2H)
    move(target, mine, convert_chunk(chunk, source, target, nh), into, nh, TransferDirection.H2D)
    for layer in range(NL):
        for there, here in zip(out_of, into, strict=True):
            got, wanted = content(target, mine, layer, here, nh), content(source, theirs, layer, there, nh)
            assert same(got, wanted)


def test_a_latent_is_the_same_in_every_mla_format() -> None:
    chunk = noise(1, NL, 4, 7)
    for source in MLA_ROWS:
        for target in MLA_ROWS:
            assert same(convert_chunk(chunk, source, target, 1), chunk)
            assert same(convert_chunk(chunk[0], source, target, 1), chunk)


@pytest.mark.parametrize(("source", "target"), [(3, 2), (2, 3), (3, 13), (18, 2), (13, 18), (5, 18)])
def test_formats_that_hold_different_things_are_refused_by_name(source: int, target: int) -> None:
    have, want = kv_format(source), kv_format(target)
    chunk = noise(have.kv_size, NL, 4, 8)
    with pytest.raises(LayoutError, match=f"convert_chunk: .*{have.name} .* holds .*{want.name}"):
        convert_chunk(chunk, source, target, 1)


@pytest.mark.parametrize(("source", "target"), [(14, 3), (3, 14), (14, 14)])
def test_a_format_whose_pages_are_taken_whole_is_refused_by_name(source: int, target: int) -> None:
    with pytest.raises(LayoutError, match=r"convert_chunk does not serve .*NL_X_NB_BSV_BSS.*whole"):
        convert_chunk(noise(1, NL, 4, 8), source, target, 1)


@pytest.mark.parametrize(
    ("shape", "fmt", "heads"),
    [
        ((1, NL, 4, 8), 2, 2),
        ((NL, 4, 8), 2, 2),
        ((2, NL, 4, 7), 2, 2),
        ((1, NL, 4, 6), 13, 2),
        ((1, NL, 4, 6), 3, 2),
        ((2, NL, 4, 8), 2, 0),
    ],
)
def test_a_chunk_that_does_not_fit_its_format_is_refused(
    shape: tuple[int, ...], fmt: int, heads: int
) -> None:
    with pytest.raises(LayoutError, match=f"{kv_format(fmt).name}.*{heads} heads: expected"):
        convert_chunk(noise(*shape), fmt, fmt, heads)


def test_out_is_filled_and_returned_or_refused_as_it_was() -> None:
    chunk = noise(1, NL, 4, 16)
    out = torch.zeros(2, NL, 4, 8, dtype=torch.bfloat16)
    assert convert_chunk(chunk, 13, 2, 2, out) is out
    assert same(out, convert_chunk(chunk, 13, 2, 2))
    for bad in (out[:, :, :2], out.float(), out[0]):
        before = bad.clone()
        with pytest.raises(LayoutError, match="out is"):
            convert_chunk(chunk, 13, 2, 2, bad)
        assert same(bad, before)
    flat = torch.zeros(NL, 4, 16, dtype=torch.bfloat16)
    assert same(convert_chunk(out, 2, 13, 2, flat), chunk[0])
