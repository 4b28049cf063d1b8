"""CacheGen's coder: what goes in comes out, near the entropy, and damage costs an error at most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.platform.base.op_contract import OPS, signature_fault
from lmcache.v1.platform.torch_ops import (
    calculate_cdf,
    decode_fast_new,
    decode_fast_prefsum,
    encode_fast_new,
)
from lmcache.v1.platform.torch_ops._rans import decode
from lmcache.v1.platform.torch_ops.cachegen import _checked_table

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

QUICK = settings(max_examples=25, deadline=None)
DTYPES = {
    torch.int8: 128,
    torch.uint8: 256,
    torch.int16: 32768,
    torch.int32: 65536,
    torch.int64: 65536,
}


@dataclass(frozen=True)
class Case:
    """Symbols to encode: their shape, and how they are distributed."""

    layers: int
    tokens: int
    channels: int
    bins: int
    skew: float
    """0: all symbols alike; the larger, the more of them are small ones."""
    seed: int

    def symbols(self, dtype: Any = torch.int64) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.layers, self.tokens, self.channels)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (uniform ** (1 + self.skew) * self.bins).floor().clamp_(max=self.bins - 1).to(dtype)


cases = st.builds(
    Case,
    layers=st.integers(1, 3),
    tokens=st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 60)),
    channels=st.integers(1, 5),
    bins=st.one_of(st.sampled_from([2, 3, 16, 32, 255, 256]), st.integers(2, 700)),
    skew=st.sampled_from([0.0, 1.0, 5.0, 1000.0]),
    seed=st.integers(0, 2**31),
)


def encoded(cdf: Any, symbols: Any) -> tuple[Any, Any]:
    """The dense form, with room for the worst."""
    layers, tokens, channels = symbols.shape
    out = torch.full((layers, channels, 2 * tokens), 0xA5, dtype=torch.uint8)
    lengths = torch.full((layers, channels), -1, dtype=torch.int32)
    encode_fast_new(cdf, symbols, out, lengths)
    return out, lengths


def packed(out: Any, lengths: Any) -> tuple[Any, Any]:
    """The same streams one after the other, and where each ends."""
    rows = [row[:n] for row, n in zip(out.flatten(0, 1), lengths.flatten().tolist(), strict=True)]
    return torch.cat(rows), lengths.flatten().cumsum(0).view(lengths.shape)


def decoded(cdf: Any, data: Any, lengths: Any, shape: Any, dtype: Any = torch.int64) -> Any:
    out = torch.full(tuple(shape), 77, dtype=dtype)
    decode_fast_new(cdf, data, lengths, out)
    return out


def unsigned(cdf: Any) -> Any:
    """The entries as a reader must see them."""
    entries = cdf.to(torch.int64) % 65536
    entries[..., -1] += 65536
    return entries


# ------------------------------------------------------------------------------------------------------------ the cdf


@QUICK
@given(cases)
def test_a_cdf_rises_from_0_to_65536_by_the_documented_rule(case: Case) -> None:
    symbols = case.symbols()
    cdf = calculate_cdf(symbols, case.bins)
    assert cdf.dtype == torch.int16
    assert tuple(cdf.shape) == (case.layers, case.channels, case.bins + 1)
    for layer in range(case.layers):
        for channel in range(case.channels):
            stream = symbols[layer, :, channel].tolist() or list(range(case.bins))
            below = [sum(s < i for s in stream) for i in range(case.bins + 1)]
            expected = [i + n * (65536 - case.bins) // len(stream) for i, n in enumerate(below)]
            assert unsigned(cdf)[layer, channel].tolist() == expected
            assert expected[0] == 0
            assert expected[-1] == 65536
            assert all(a < b for a, b in pairwise(expected))


@pytest.mark.parametrize("bins", [1, 0, -3, 65537])
def test_numbers_of_bins_outside_16_bits_are_refused(bins: int) -> None:
    with pytest.raises(ValueError, match=f"num_bins={bins}: expected 2 to 65536"):
        calculate_cdf(torch.zeros(1, 1, 1, dtype=torch.int64), bins)


@pytest.mark.parametrize("symbol", [-1, 4])
def test_a_symbol_outside_the_bins_is_refused(symbol: int) -> None:
    symbols = torch.full((1, 2, 3), symbol)
    with pytest.raises(ValueError, match=f"symbols has {symbol}: expected 0 to 3"):
        calculate_cdf(symbols, 4)
    cdf = calculate_cdf(torch.zeros(1, 2, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=f"symbols has {symbol}: expected 0 to 3"):
        encoded(cdf, symbols)


# ---------------------------------------------------------------------------------------------------------- the coder


@QUICK
@given(cases, st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)))
def test_decoding_gives_back_what_was_encoded(case: Case, of: Any, to: Any) -> None:
    if case.bins > min(DTYPES[of], DTYPES[to]):
        of = to = torch.int64
    symbols = case.symbols(of)
    cdf = calculate_cdf(symbols, case.bins)
    data, lengths = encoded(cdf, symbols)
    assert torch.equal(decoded(cdf, data, lengths, symbols.shape, to), symbols.to(to))


@QUICK
@given(cases)
def test_streams_put_one_after_the_other_decode_alike(case: Case) -> None:
    symbols = case.symbols()
    cdf = calculate_cdf(symbols, case.bins)
    data, sums = packed(*encoded(cdf, symbols))
    out = torch.empty_like(symbols)
    decode_fast_prefsum(cdf, data, sums, out)
    assert torch.equal(out, symbols)
    behind = torch.cat([data, torch.full((9,), 0xFF, dtype=torch.uint8)])
    decode_fast_prefsum(cdf, behind, sums.to(torch.int32), out.zero_())
    assert torch.equal(out, symbols)


@QUICK
@given(cases, cases)
def test_any_cdf_can_encode_any_symbols(case: Case, other: Case) -> None:
    cdf = calculate_cdf(case.symbols(), case.bins)
    generator = torch.Generator().manual_seed(other.seed)
    shape = (case.layers, other.tokens, case.channels)
    symbols = torch.randint(0, case.bins, shape, generator=generator)
    data, lengths = encoded(cdf, symbols)  # its room, 2 T bytes, is the documented worst case
    assert torch.equal(decoded(cdf, data, lengths, shape), symbols)


@QUICK
@given(cases)
def test_a_stream_is_as_long_as_its_entropy(case: Case) -> None:
    """Within 1 % and three bytes: the last state is whole bytes, and no symbol is free in a 16-bit table."""
    symbols = case.symbols()
    _, lengths = encoded(calculate_cdf(symbols, case.bins), symbols)
    for layer in range(case.layers):
        for channel in range(case.channels):
            counts = torch.bincount(symbols[layer, :, channel]).tolist()
            bits = -sum(n * log2(n / case.tokens) for n in counts if n)
            assert lengths[layer, channel] <= 1.01 * bits / 8 + 3


def test_a_long_stream_is_as_long_as_its_entropy() -> None:
    symbols = Case(1, 2000, 2, 32, 1.0, 9).symbols()
    _, lengths = encoded(calculate_cdf(symbols, 32), symbols)
    for channel in range(2):
        counts = torch.bincount(symbols[0, :, channel]).tolist()
        size = -sum(n * log2(n / 2000) for n in counts) / 8
        assert size <= lengths[0, channel] <= 1.001 * size + 3


@pytest.mark.parametrize("bins", [2, 16, 256, 65536])
@pytest.mark.parametrize("which", ["lowest", "highest", "both"])
def test_extreme_symbols_survive_a_table_that_does_not_expect_them(bins: int, which: str) -> None:
    pair = {"lowest": [0, 0], "highest": [bins - 1, bins - 1], "both": [0, bins - 1]}[which]
    symbols = torch.tensor(pair * 20).view(1, 40, 1)
    for cdf in (calculate_cdf(symbols, bins), calculate_cdf(bins - 1 - symbols, bins)):
        data, lengths = encoded(cdf, symbols)
        assert torch.equal(decoded(cdf, data, lengths, symbols.shape), symbols)


GOLDEN = [
    ([0, 1, 0, 2, 1, 0, 1, 0], [0, 1, 0, 2, 1, 0, 1, 0], 3, [0, 32767, -8193, 0], "eb20ff"),
    ([0] * 12, [0, 1, 3, 3, 1, 0, 2, 0, 0, 0, 3, 3], 4, [0, -3, -2, -1, 0], "01020303fffffffffffd030108ffff"),
    ([0] * 12, [0] * 12, 4, [0, -3, -2, -1, 0], ""),
]


@pytest.mark.parametrize(("counted", "stream", "bins", "entries", "expected"), GOLDEN)
def test_the_bytes_are_those_of_the_document(
    counted: list[int], stream: list[int], bins: int, entries: list[int], expected: str
) -> None:
    """A kernel elsewhere must make the same: a change here is another format."""
    cdf = calculate_cdf(torch.tensor(counted).view(1, -1, 1), bins)
    assert cdf.flatten().tolist() == entries
    data, lengths = encoded(cdf, torch.tensor(stream).view(1, -1, 1))
    assert bytes(data[0, 0, : int(lengths)].tolist()).hex() == expected


def spec_encode(stream: list[int], cdf: Any) -> bytes:
    """The specification in plain integers."""
    entries = unsigned(cdf).flatten().tolist()
    state, backwards = 0, bytearray()
    for symbol in reversed(stream):
        low, freq = entries[symbol], entries[symbol + 1] - entries[symbol]
        while state >= freq << 15:
            backwards.append(state & 0xFF)
            state >>= 8
        state = (state // freq << 16) + state % freq + low
    while state:
        backwards.append(state & 0xFF)
        state >>= 8
    return bytes(reversed(backwards))


def spec_decode(data: bytes, count: int, cdf: Any) -> list[int]:
    entries = unsigned(cdf).flatten().tolist()
    state, at, stream = 0, 0, []
    for step in range(count + 1):
        while state < 1 << 23 and at < len(data):
            state, at = state << 8 | data[at], at + 1
        if step == count:
            break
        slot = state & 0xFFFF
        symbol = max(i for i, entry in enumerate(entries) if entry <= slot)
        stream.append(symbol)
        state = (entries[symbol + 1] - entries[symbol]) * (state >> 16) + slot - entries[symbol]
    assert (state, at) == (0, len(data))
    return stream


@QUICK
@given(cases)
def test_every_stream_is_what_the_specification_says(case: Case) -> None:
    symbols = case.symbols()
    cdf = calculate_cdf(symbols, case.bins)
    data, lengths = encoded(cdf, symbols)
    stream = symbols[-1, :, -1].tolist()
    found = bytes(data[-1, -1, : int(lengths[-1, -1])].tolist())
    assert found == spec_encode(stream, cdf[-1, -1])
    assert spec_decode(found, case.tokens, cdf[-1, -1]) == stream


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 0, 0)])
def test_no_streams_are_no_bytes(shape: tuple[int, int, int]) -> None:
    symbols = torch.zeros(shape, dtype=torch.int64)
    cdf = calculate_cdf(symbols, 8)
    data, lengths = encoded(cdf, symbols)
    assert lengths.numel() == 0
    assert decoded(cdf, data, lengths, shape).shape == shape
    decode_fast_prefsum(cdf, data.flatten(), lengths, torch.zeros(shape, dtype=torch.int64))


def test_operands_may_have_any_strides() -> None:
    symbols = Case(3, 20, 4, 16, 1.0, 2).symbols().transpose(0, 2).contiguous().transpose(0, 2)
    cdf = calculate_cdf(symbols, 16)
    wide = torch.full((3, 4, 100), 0xA5, dtype=torch.uint8)
    out, lengths = wide[..., 30:74], torch.zeros(4, 3, dtype=torch.int64).t()
    encode_fast_new(cdf.transpose(0, 1).contiguous().transpose(0, 1), symbols, out, lengths)
    assert torch.equal(decoded(cdf, out, lengths, symbols.shape), symbols)
    assert bool((wide[..., :30] == 0xA5).all())
    used = torch.arange(44) < lengths.unsqueeze(-1)
    assert bool((out[~used] == 0xA5).all())


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_stream_that_does_not_fit_is_named_and_nothing_is_written() -> None:
    symbols = torch.zeros(2, 50, 3, dtype=torch.int64)
    symbols[1, :, 2] = torch.arange(50) % 16
    cdf = calculate_cdf(symbols, 16)
    _, needed = encoded(cdf, symbols)
    need = int(needed[1, 2])
    assert need > int(needed[0, 0])
    out = torch.full((2, 3, need - 1), 0xA5, dtype=torch.uint8)
    lengths = torch.full((2, 3), -1)
    with pytest.raises(
        ValueError, match=f"layer 1, channel 2 does not fit into B={need - 1} .*{need} or more"
    ):
        encode_fast_new(cdf, symbols, out, lengths)
    assert bool((out == 0xA5).all())
    assert bool((lengths == -1).all())
    exact = torch.zeros(2, 3, need, dtype=torch.uint8)
    encode_fast_new(cdf, symbols, exact, lengths)
    assert torch.equal(decoded(cdf, exact, lengths, symbols.shape), symbols)


@QUICK
@given(cases, st.data())
def test_a_damaged_stream_is_refused_or_is_that_of_the_symbols_it_gives(case: Case, data: Any) -> None:
    symbols = case.symbols()
    cdf = calculate_cdf(symbols, case.bins)
    dense, lengths = encoded(cdf, symbols)
    dense = torch.nn.functional.pad(dense, (0, 3))
    layer, channel = case.layers - 1, case.channels - 1
    size = int(lengths[layer, channel])
    for _ in range(data.draw(st.integers(0, 4)) if size else 0):
        at = data.draw(st.integers(0, size - 1))
        dense[layer, channel, at] = data.draw(st.integers(0, 255))
    size = max(0, size + data.draw(st.integers(-3, 3)))
    lengths[layer, channel] = size
    out = torch.full(symbols.shape, -7)
    refusal = ""
    try:
        decode_fast_new(cdf, dense, lengths, out)
    except ValueError as exc:
        refusal = str(exc)
    if refusal:
        assert f"layer {layer}, channel {channel} is damaged" in refusal
        assert bool((out == -7).all())
    else:
        again, sizes = encoded(cdf, out)
        assert int(sizes[layer, channel]) == size
        assert torch.equal(again[layer, channel, :size], dense[layer, channel, :size])


def accepted(cdf: Any, strings: Any, steps: int) -> tuple[Any, Any]:
    """Which of many strings ``[N, size]`` are streams of ``steps`` symbols, and what each gives."""
    count, size = strings.shape
    table = _checked_table("test", cdf).expand(count, -1).contiguous()
    end = torch.arange(1, count + 1) * size
    symbols = torch.full((count, steps, 1), -7)
    return decode(table, strings.flatten(), end - size, end, symbols), symbols


def test_of_all_strings_one_is_accepted_per_symbol() -> None:
    cdf = calculate_cdf(torch.tensor([0] * 9 + [1] * 6 + [39]).view(1, 16, 1), 40)
    found = []
    for size in (0, 1, 2):
        every = torch.tensor(list(product(range(256), repeat=size)), dtype=torch.uint8).view(256**size, size)
        whole, symbols = accepted(cdf, every, 1)
        found += symbols[whole].flatten().tolist()
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize("size", [1, 3, 4, 5, 24])
def test_noise_is_refused_or_is_the_stream_of_the_symbols_it_gives(size: int) -> None:
    cdf = calculate_cdf(torch.tensor([0] * 9 + [1] * 6 + [2]).view(1, 16, 1), 3)
    noise = torch.randint(0, 256, (2000, size), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    for steps in (1, 4, 30):
        whole, symbols = accepted(cdf, noise, steps)
        assert 0 <= int(symbols.min()) <= int(symbols.max()) <= 2
        again, lengths = encoded(cdf.expand(2000, 1, 4), symbols)
        alike = (torch.nn.functional.pad(again[:, 0], (0, size))[:, :size] == noise).all(-1)
        assert torch.equal(whole, alike & (lengths[:, 0] == size))


def test_bytes_that_are_noise_are_refused() -> None:
    cdf = calculate_cdf(Case(2, 60, 64, 32, 1.0, 4).symbols(), 32)
    noise = torch.randint(0, 256, (2, 64, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    out = torch.full((2, 60, 64), -7)
    with pytest.raises(ValueError, match="is damaged"):
        decode_fast_new(cdf, noise, torch.full((2, 64), 60), out)
    assert bool((out == -7).all())


def test_nothing_behind_the_data_is_read() -> None:
    """The last stream must give far more symbols than it has bytes for; an index too far would raise."""
    cdf = calculate_cdf(torch.full((1, 8, 1), 3), 4)
    out = torch.full((1, 500, 1), -7)
    with pytest.raises(ValueError, match="layer 0, channel 0 is damaged"):
        decode_fast_prefsum(cdf, torch.tensor([0x40, 0, 0, 0], dtype=torch.uint8), torch.tensor([[4]]), out)
    assert bool((out == -7).all())


def good() -> dict[str, Any]:
    symbols = Case(2, 12, 3, 16, 1.0, 6).symbols()
    cdf = calculate_cdf(symbols, 16)
    dense, lengths = encoded(cdf, symbols)
    data, sums = packed(dense, lengths)
    return {"cdf": cdf, "dense": dense, "lengths": lengths, "data": data, "sums": sums, "symbols": symbols}


@pytest.mark.parametrize("length", [-1, -(2**31), 2 * 12 + 1, 2**31 - 1])
def test_lengths_outside_the_rows_are_refused(length: int) -> None:
    have = good()
    have["lengths"][1, 0] = length
    with pytest.raises(ValueError, match=f"lengths: layer 1, channel 0 has {length}: expected 0 to B=24"):
        decoded(have["cdf"], have["dense"], have["lengths"], (2, 12, 3))


@pytest.mark.parametrize("value", [-1, 0, 2**62, -(2**62), -(2**63), 2**63 - 1])
def test_prefix_sums_that_fall_or_leave_the_data_are_refused(value: int) -> None:
    have = good()
    sums = have["sums"].to(torch.int64).contiguous()
    sums[1, 1] = value
    out = torch.full((2, 12, 3), -7)
    with pytest.raises(ValueError, match=r"prefix_sums: layer 1, channel [12] is bytes"):
        decode_fast_prefsum(have["cdf"], have["data"], sums, out)
    assert bool((out == -7).all())


def test_data_that_is_cut_is_refused() -> None:
    have = good()
    with pytest.raises(ValueError, match="layer 1, channel 2 is bytes"):
        decode_fast_prefsum(
            have["cdf"], have["data"][:-1], have["sums"], torch.zeros(2, 12, 3, dtype=torch.int64)
        )


def test_a_cdf_that_is_none_is_refused() -> None:
    have = good()
    for entry, value in ((0, 1), (16, 5), (5, 0), (6, int(have["cdf"][1, 2, 5]))):
        cdf = have["cdf"].clone()
        cdf[1, 2, entry] = value
        with pytest.raises(ValueError, match="cdf of layer 1, channel 2: expected unsigned"):
            decoded(cdf, have["dense"], have["lengths"], (2, 12, 3))
        with pytest.raises(ValueError, match="cdf of layer 1, channel 2: expected unsigned"):
            encoded(cdf, have["symbols"])
    with pytest.raises(ValueError, match="cdf has 2 entries"):
        encoded(have["cdf"][..., :2], have["symbols"])


def test_another_cdf_is_noticed() -> None:
    have = good()
    other = calculate_cdf(15 - have["symbols"], 16)
    with pytest.raises(ValueError, match="made with another cdf"):
        decoded(other, have["dense"], have["lengths"], (2, 12, 3))


def test_an_output_type_that_cannot_hold_the_symbols_is_refused() -> None:
    symbols = torch.zeros(1, 4, 1, dtype=torch.int64)
    cdf = calculate_cdf(symbols, 129)
    data, lengths = encoded(cdf, symbols)
    with pytest.raises(ValueError, match=r"out is torch\.int8: expected a type that holds symbols up to 128"):
        decoded(cdf, data, lengths, (1, 4, 1), torch.int8)
    assert torch.equal(decoded(cdf, data, lengths, (1, 4, 1), torch.uint8), symbols.to(torch.uint8))


WRONG = {
    "cdf of another type": ("cdf", lambda t: t.to(torch.int32), TypeError, "cdf is int32: expected int16"),
    "symbols of floats": ("symbols", lambda t: t.float(), TypeError, "symbols is float32"),
    "symbols of two dimensions": ("symbols", lambda t: t[0], ValueError, "symbols has shape"),
    "other layers": ("symbols", lambda t: t[:1], ValueError, "L=2"),
    "bytes of another type": ("out", lambda t: t.to(torch.int8), TypeError, "out is int8: expected uint8"),
    "other channels": ("out", lambda t: t[:, :1], ValueError, "C=3"),
    "lengths of another type": ("lengths", lambda t: t.to(torch.int16), TypeError, "int32 or int64"),
    "lengths of another shape": ("lengths", lambda t: t.t(), ValueError, "lengths has shape"),
    "lengths elsewhere": ("lengths", lambda t: t.to("meta"), ValueError, "is on meta: expected cpu"),
    "lengths in a list": ("lengths", lambda t: t.tolist(), TypeError, "expected a tensor, got list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_operands_that_do_not_fit_are_named(what: str) -> None:
    have = good()
    name, change, error, text = WRONG[what]
    call = {"cdf": have["cdf"], "symbols": have["symbols"], "out": have["dense"], "lengths": have["lengths"]}
    call[name] = change(call[name])
    with pytest.raises(error, match=text) as caught:
        encode_fast_new(**call)
    assert str(caught.value).startswith("encode_fast_new: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", [calculate_cdf, encode_fast_new, decode_fast_new, decode_fast_prefsum])
def test_the_ops_are_called_as_the_contract_says(op: Any) -> None:
    assert signature_fault(op.__name__, op) == ""
    assert not OPS[op.__name__].ordered


def test_tensors_made_in_inference_mode_are_written_outside_of_it() -> None:
    symbols = Case(2, 9, 3, 16, 1.0, 0).symbols()
    cdf = calculate_cdf(symbols, 16)
    with torch.inference_mode():
        out, lengths = torch.zeros(2, 3, 40, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int32)
        back = torch.zeros_like(symbols)
    encode_fast_new(cdf, symbols, out, lengths)
    decode_fast_new(cdf, out, lengths, back)
    assert torch.equal(back, symbols)
