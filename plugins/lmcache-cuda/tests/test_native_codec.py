"""The kernels that compute give what the torch baseline gives: CacheGen bit for bit, RoPE but for rounding."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hypothesis import given, settings
from hypothesis import strategies as st
from native_rig import fake, native, stream

from lmcache.v1.platform.torch_ops import (
    calculate_cdf,
    decode_fast_new,
    encode_fast_new,
    rotary_embedding_k_fused,
    rotary_embedding_k_fused_strided,
)

QUICK = settings(max_examples=25, deadline=None)
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float32", "float16", "bfloat16"]


def address(tensor: Any) -> int:
    assert tensor.is_contiguous()
    return int(tensor.data_ptr())


def drawn(data: Any, bins: int, kind: str) -> Any:
    layers, tokens, channels = (data.draw(st.integers(low, 4)) for low in (1, 0, 1))
    tokens *= data.draw(st.sampled_from([1, 30]))
    # some symbols far more often than others, so that streams have few bytes and many
    spread = data.draw(st.sampled_from([1, 2, bins]))
    return randoms(data.draw(st.integers(0, 1 << 30)), min(spread, bins), (layers, tokens, channels), kind)


def randoms(seed: int, bins: int, shape: tuple[int, ...], kind: str) -> Any:
    made = torch.randint(0, bins, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, kind))


# ----------------------------------------------------------------------------------------------------- CacheGen
def native_cdf(symbols: Any, bins: int) -> tuple[Any, Any]:
    layers, tokens, channels = symbols.shape
    counts = torch.full((bins, layers * channels), 7, dtype=torch.int32)
    cdf = torch.empty((layers, channels, bins + 1), dtype=torch.int16)
    status = torch.full((layers * channels,), 99, dtype=torch.uint8)
    with stream() as queue:
        native.cachegen_cdf(
            0, queue, address(symbols), str(symbols.dtype)[6:], layers, tokens, channels, bins, address(counts),
            address(cdf), address(status),
        )  # fmt: skip
    return cdf, status


def native_encode(cdf: Any, symbols: Any, capacity: int) -> tuple[Any, Any, Any]:
    layers, tokens, channels = symbols.shape
    shape = (
        0,
        0,
        address(cdf),
        cdf.shape[2] - 1,
        address(symbols),
        str(symbols.dtype)[6:],
        layers,
        tokens,
        channels,
    )
    sizes = torch.full((layers, channels), -1, dtype=torch.int64)
    status = torch.full((layers * channels,), 99, dtype=torch.uint8)
    out = torch.full((layers, channels, capacity), 0x5A, dtype=torch.uint8)
    with stream() as queue:
        shape = (0, queue, *shape[2:])
        native.cachegen_measure(*shape, address(sizes), address(status))
        native.cachegen_encode(*shape, address(sizes), address(out), capacity)
    return out, sizes, status


def native_decode(cdf: Any, data: Any, starts: Any, ends: Any, symbols: Any) -> Any:
    layers, tokens, channels = symbols.shape
    status = torch.full((layers * channels,), 99, dtype=torch.uint8)
    with stream() as queue:
        native.cachegen_decode(
            0, queue, address(cdf), cdf.shape[2] - 1, address(data), address(starts), address(ends), address(symbols),
            str(symbols.dtype)[6:], layers, tokens, channels, address(status),
        )  # fmt: skip
    return status


@pytest.mark.parametrize("kind", INTEGERS)
@given(data=st.data(), bins=st.sampled_from([2, 3, 17, 100, 128]))
@QUICK
def test_frequencies_are_those_of_the_baseline(kind: str, data: Any, bins: int) -> None:
    symbols = drawn(data, bins, kind)
    cdf, status = native_cdf(symbols, bins)
    assert torch.equal(cdf, calculate_cdf(symbols, bins))
    assert set(status.tolist()) == {native.CACHEGEN_OK}


def test_as_many_bins_as_there_may_be_have_frequencies_like_the_baseline() -> None:
    symbols = torch.randint(0, 65536, (1, 40, 2), dtype=torch.int32)
    assert torch.equal(native_cdf(symbols, 65536)[0], calculate_cdf(symbols, 65536))


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_symbol_outside_the_bins_marks_its_stream_and_no_other(bad: int) -> None:
    symbols = torch.randint(0, 5, (2, 9, 3), dtype=torch.int8)
    good = calculate_cdf(symbols, 5)
    symbols[1, 4, 2] = bad
    expected = [native.CACHEGEN_OK] * 5 + [native.CACHEGEN_BAD_SYMBOL]
    assert native_cdf(symbols, 5)[1].tolist() == expected
    assert native_encode(good, symbols, 18)[2].tolist() == expected


@pytest.mark.parametrize("kind", INTEGERS)
@given(data=st.data(), bins=st.sampled_from([2, 3, 17, 100, 128]))
@QUICK
def test_streams_have_the_bytes_of_the_baseline(kind: str, data: Any, bins: int) -> None:
    symbols = drawn(data, bins, kind)
    counted = drawn(data, bins, kind)
    cdf = calculate_cdf(symbols, bins)
    if counted.shape[0] == symbols.shape[0] and counted.shape[2] == symbols.shape[2]:
        cdf = calculate_cdf(counted, bins)  # any symbols can be coded with any table
    capacity = 2 * symbols.shape[1]
    expected = torch.full((*cdf.shape[:2], capacity), 0x5A, dtype=torch.uint8)
    lengths = torch.empty(cdf.shape[:2], dtype=torch.int64)
    encode_fast_new(cdf, symbols, expected, lengths)
    out, sizes, status = native_encode(cdf, symbols, capacity)
    assert torch.equal(sizes, lengths)
    assert torch.equal(out, expected)  # the bytes behind a stream's length are left alone, too
    assert set(status.tolist()) == {native.CACHEGEN_OK}

    starts = torch.arange(lengths.numel()) * capacity
    decoded = torch.full_like(symbols, 1)
    status = native_decode(cdf, out, starts, starts + lengths.reshape(-1), decoded)
    assert torch.equal(decoded, symbols)
    assert set(status.tolist()) == {native.CACHEGEN_OK}


def test_the_documented_streams_come_out() -> None:
    symbols = torch.tensor([0, 1, 0, 2, 1, 0, 1, 0]).view(1, 8, 1)
    cdf, _ = native_cdf(symbols, 3)
    assert cdf.reshape(-1).tolist() == [0, 32767, -8193, 0]
    out, sizes, _ = native_encode(cdf, symbols, 16)
    assert bytes(out[0, 0, : sizes[0, 0]].tolist()).hex() == "eb20ff"
    cdf, _ = native_cdf(torch.zeros((1, 12, 1), dtype=torch.uint8), 4)
    symbols = torch.tensor([0, 1, 3, 3, 1, 0, 2, 0, 0, 0, 3, 3]).view(1, 12, 1)
    out, sizes, _ = native_encode(cdf, symbols, 24)
    assert bytes(out[0, 0, : sizes[0, 0]].tolist()).hex() == "01020303fffffffffffd030108ffff"


def test_streams_without_gaps_are_read_where_they_lie() -> None:
    symbols = torch.randint(0, 7, (3, 50, 5), dtype=torch.uint8)
    cdf = calculate_cdf(symbols, 7)
    out, sizes, _ = native_encode(cdf, symbols, 100)
    packed = torch.cat([out[i, j, : sizes[i, j]] for i in range(3) for j in range(5)])
    ends = sizes.reshape(-1).cumsum(0)
    decoded = torch.zeros_like(symbols)
    status = native_decode(cdf, packed, ends - sizes.reshape(-1), ends, decoded)
    assert torch.equal(decoded, symbols)
    assert not status.any()


def test_a_stream_that_does_not_fit_is_left_out_and_its_size_is_told() -> None:
    symbols = torch.stack([torch.zeros(40), torch.arange(40) % 16], dim=1).to(torch.uint8)[None]
    cdf = calculate_cdf(symbols, 16)
    out, sizes, _ = native_encode(cdf, symbols, 4)
    assert sizes[0, 0] <= 4 < sizes[0, 1]
    assert out[0, 1].tolist() == [0x5A] * 4


@given(data=st.data())
@QUICK
def test_damage_is_noticed_where_the_baseline_notices_it(data: Any) -> None:
    symbols = randoms(1, 9, (1, 20, 4), "int16")
    cdf = calculate_cdf(symbols, 9)
    out, sizes, _ = native_encode(cdf, symbols, 40)
    channel = data.draw(st.integers(0, 3))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, int(sizes[0, channel]) - 1))
        out[0, channel, place] ^= data.draw(st.integers(1, 255))
    else:
        sizes[0, channel] += data.draw(st.sampled_from([-1, 1]))
    starts = torch.arange(4) * 40
    decoded = torch.zeros_like(symbols)
    status = native_decode(cdf, out, starts, starts + sizes.reshape(-1), decoded)
    expected = torch.zeros_like(symbols)
    if status.any():
        assert status.tolist() == [native.CACHEGEN_DAMAGED * (at == channel) for at in range(4)]
        with pytest.raises(ValueError, match=f"channel {channel} is damaged"):
            decode_fast_new(cdf, out, sizes, expected)
    else:
        decode_fast_new(cdf, out, sizes, expected)
        assert torch.equal(decoded, expected)


@pytest.mark.parametrize("entry", [(0, 1), (1, 0), (2, 1), (3, 5)])
def test_a_table_that_is_none_marks_its_stream(entry: tuple[int, int]) -> None:
    symbols = torch.randint(0, 3, (1, 6, 2), dtype=torch.uint8)
    cdf = calculate_cdf(symbols, 3)
    cdf[0, 1, entry[0]] = entry[1]
    expected = [native.CACHEGEN_OK, native.CACHEGEN_BAD_CDF]
    assert native_encode(cdf, symbols, 12)[2].tolist() == expected
    starts = torch.zeros(2, dtype=torch.int64)
    assert native_decode(cdf, torch.zeros(4, dtype=torch.uint8), starts, starts, symbols)[1] == expected[1]


@pytest.mark.parametrize(("bins", "kind"), [(1, "uint8"), (65537, "uint8"), (4, "float32")])
def test_bins_and_types_that_are_not_served_are_refused(bins: int, kind: str) -> None:
    fake.launches()
    with pytest.raises((ValueError, TypeError), match="expected"):
        native.cachegen_cdf(0, 0, 4096, kind, 1, 1, 1, bins, 4096, 4096, 4096)
    assert fake.launches() == []


# --------------------------------------------------------------------------------------------------------- RoPE
def rotation_table(kind: str, positions: int, rotated: int, factor: float = 1.0) -> Any:
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / 10 ** torch.arange(rotated // 2))
    return (torch.cat([angle.cos(), angle.sin()], dim=1) * factor).to(getattr(torch, kind))


def native_rotate(old: Any, new: Any, key: Any, heads: int, stride: int, cosines: Any, neox: bool) -> None:
    with stream() as queue:
        native.rotary(
            0, queue, address(old), address(new), str(old.dtype)[6:], key.data_ptr(), str(key.dtype)[6:],
            address(cosines), str(cosines.dtype)[6:], cosines.shape[0], key.shape[0], heads, cosines.shape[1],
            key.stride(0), stride, neox,
        )  # fmt: skip


def nearly(one: Any, other: Any) -> bool:
    """Equal but for one step of the type, which a fused multiplication may make."""
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[one.dtype]
    return bool(torch.allclose(one.float(), other.float(), rtol=step, atol=step * 4))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("table_kind", FLOATS)
@pytest.mark.parametrize("kind", FLOATS)
def test_keys_turn_as_in_the_baseline(kind: str, table_kind: str, neox: bool) -> None:
    cosines = rotation_table(table_kind, 50, 8, factor=1.3)  # a factor as YaRN has cancels out
    key = torch.randn((30, 3 * 16)).to(getattr(torch, kind))
    old, new = (torch.randint(0, 50, (30,), dtype=torch.int32) for _ in range(2))
    expected, before = key.clone(), key.clone()
    rotary_embedding_k_fused(old, new, expected, 16, cosines, neox)
    native_rotate(old, new, key, 3, 16, cosines, neox)
    assert nearly(key, expected)
    assert torch.equal(key.view(30, 3, 16)[..., 8:], before.view(30, 3, 16)[..., 8:])
    stays = old == new
    assert torch.equal(key[stays], before[stays])


def test_heads_with_more_than_a_key_turn_in_their_leading_part() -> None:
    cosines = rotation_table("float32", 20, 4)
    key = torch.randn((9, 2 * 10))
    old, new = torch.arange(9), torch.arange(9) + 5
    expected = key.clone()
    rotary_embedding_k_fused_strided(old, new, expected, 4, 10, cosines, True)
    native_rotate(old, new, key, 2, 10, cosines, True)
    assert nearly(key, expected)


def test_a_position_outside_the_table_leaves_its_key_alone() -> None:
    cosines = rotation_table("float32", 4, 4)
    key = torch.randn((4, 4))
    before = key.clone()
    native_rotate(torch.tensor([0, -1, 1, 0]), torch.tensor([4, 1, 2, 1 << 40]), key, 1, 4, cosines, True)
    assert torch.equal(key[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(key[2], before[2])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_every_half_there_is_survives_a_turn_by_nothing_much(kind: str) -> None:
    """Conversions of the host's emulation are torch's: a turn from (1, 0) to (1, 0) multiplies by one."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    key = bits.view(getattr(torch, kind)).clone().view(-1, 2)
    finite = key.isfinite().all(dim=1)
    cosines = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    tokens = key.shape[0]
    expected = key.clone()
    native_rotate(
        torch.zeros(tokens, dtype=torch.int64),
        torch.ones(tokens, dtype=torch.int64),
        key,
        1,
        2,
        cosines,
        True,
    )
    assert torch.equal(key[finite], expected[finite])
    assert torch.equal(
        key.isnan(), expected.isnan() | (~expected.isfinite()).any(dim=1, keepdim=True) & key.isnan()
    )


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40),
    kind=st.sampled_from(FLOATS[1:]),
)
@QUICK
def test_results_are_rounded_as_torch_rounds(values: list[float], kind: str) -> None:
    pairs = torch.tensor(values[: len(values) // 2 * 2], dtype=torch.float32).view(-1, 2)
    pairs = pairs.to(getattr(torch, kind))
    finite = pairs.isfinite().all(dim=1)
    cosines = torch.tensor([[1.0, 0.0], [0.3, 0.0]])  # z[new] / z[old] is 0.3
    expected = (pairs.float() * torch.tensor(0.3)).to(pairs.dtype)
    count = pairs.shape[0]
    native_rotate(
        torch.zeros(count, dtype=torch.int64),
        torch.ones(count, dtype=torch.int64),
        pairs,
        1,
        2,
        cosines,
        False,
    )
    assert torch.equal(pairs[finite], expected[finite])


def test_a_copy_by_a_kernel_moves_every_byte_and_no_other() -> None:
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    target = torch.zeros(100_100, dtype=torch.uint8)
    with stream() as queue:
        native.copy_kernel(target.data_ptr() + 5, source.data_ptr() + 1, 100_001, queue, 0)
        native.copy_kernel(0, 0, 0, queue, 0)
    assert torch.equal(target[5:100_006], source[1:100_002])
    assert not target[:5].any()
    assert not target[100_006:].any()


@pytest.mark.parametrize(("positions", "step"), [(0, 1), (4, 0)])
def test_a_table_without_rows_and_an_element_that_stands_for_many_are_refused(
    positions: int, step: int
) -> None:
    fake.launches()
    with pytest.raises(ValueError, match="expected none of them to be 0"):
        native.rotary(0, 0, 8, 8, "int32", 8, "float16", 8, "float32", positions, 1, 1, 2, 2, 2, True, step)
    assert fake.launches() == []
