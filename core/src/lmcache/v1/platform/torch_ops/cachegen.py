"""CacheGen's lossless step: quantised KV symbols to bytes and back, one stream per layer and channel.

The coder is a static rANS of our own, in tensor operations (``_rans.py``), specified in docs/cachegen.md.
Libraries of entropy coders (constriction, torchac) were considered: they take one call per stream and table
or run on the host alone, of which a chunk has thousands, and bring compiled code that the core must not
require. rANS fits a device: 32 bits of state, one table look-up and at most two bytes per symbol, read
forward, streams independent of each other.

These ops read results back from the device (to check them), so they wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.torch_ops import _rans
from lmcache.v1.platform.torch_ops._operands import INDICES, INTEGERS, Operands

if TYPE_CHECKING:
    import torch

__all__ = ["calculate_cdf", "decode_fast_new", "decode_fast_prefsum", "encode_fast_new"]

_TOTAL = 1 << _rans.PRECISION
_U16 = 0xFFFF


def calculate_cdf(symbols: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Cumulative frequencies of each layer and channel over its tokens, scaled to 16 bits.

    Entry i is ``i + floor(n_i * (2**16 - num_bins) / T)``, where ``n_i`` of the T symbols are less than i. So
    it starts at 0, ends at 2**16, and every symbol has a frequency of at least 1, whether it occurs or not.
    With no tokens all symbols are alike: ``i + floor(i * (2**16 - num_bins) / num_bins)``.

    Args:
        symbols: ``[L, T, C]`` of any integer type, in [0, num_bins).
        num_bins: 2 to 65536.

    Returns:
        int16 ``[L, C, num_bins + 1]``: the entries' low 16 bits. Read them as unsigned; the last is 2**16,
        hence stored as 0.

    Raises:
        TypeError: Not an integer tensor.
        ValueError: Another shape, a symbol outside the bins, or another number of bins.
    """
    import torch

    op = "calculate_cdf"
    operands = Operands(op)
    operands.add("symbols", symbols, "L T C", INTEGERS)
    if not 2 <= num_bins <= _TOTAL:
        raise ValueError(f"{op}: num_bins={num_bins}: expected 2 to {_TOTAL}")
    _check_symbols(op, symbols, num_bins)
    layers, tokens, channels = symbols.shape
    entry = torch.arange(num_bins + 1, device=symbols.device)
    # One step after the other in place: there are as many entries as symbols when bins are many.
    below = torch.zeros((layers, channels, num_bins + 1), dtype=torch.int64, device=symbols.device)
    if tokens:
        torch.cumsum(_counts(symbols, num_bins), -1, out=below[..., 1:])
    else:
        below, tokens = below + entry, num_bins
    below.mul_(_TOTAL - num_bins).div_(tokens, rounding_mode="floor").add_(entry)
    return below.add_(0x8000).bitwise_and_(_U16).sub_(0x8000).to(torch.int16)


def _counts(symbols: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each layer and channel has each symbol, ``[L, C, num_bins]``."""
    import torch

    layers, _, channels = symbols.shape
    cells = layers * channels * num_bins
    narrow = torch.int32 if cells <= 1 << 31 else torch.int64  # half the memory to write and to read
    rows = torch.arange(0, cells, num_bins, dtype=narrow, device=symbols.device).view(layers, 1, channels)
    counted = torch.bincount((rows + symbols).reshape(-1), minlength=cells)
    return counted.view(layers, channels, num_bins)


def encode_fast_new(
    cdf: torch.Tensor, symbols: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Encode each layer and channel into its row of ``out``.

    ``B = 2 * T`` is enough whatever the symbols are. Bytes of a row behind its length stay as they were.
    The form that :func:`decode_fast_prefsum` reads is these streams put one after the other.

    Args:
        cdf: int16 ``[L, C, bins + 1]`` as :func:`calculate_cdf` gives it; it need not be that of ``symbols``.
        symbols: ``[L, T, C]`` of any integer type, in [0, bins).
        out: uint8 ``[L, C, B]``, overwritten.
        lengths: int32 or int64 ``[L, C]``, overwritten: bytes of each stream.

    Raises:
        TypeError: An operand is no tensor or of another dtype.
        ValueError: Shapes do not fit, a symbol is outside the bins, the cdf is none, or a stream needs more
            than B bytes: the first such is named, with the most that any needs. Nothing is written then.
    """
    import torch

    op = "encode_fast_new"
    operands = Operands(op)
    operands.add("cdf", cdf, "L C entries", ("int16",))
    operands.add("symbols", symbols, "L T C", INTEGERS)
    operands.add("out", out, "L C B", ("uint8",))
    operands.add("lengths", lengths, "L C", INDICES)
    table = _checked_table(op, cdf)
    _check_symbols(op, symbols, cdf.shape[2] - 1)
    data, start, size = _rans.encode(table, symbols)
    start, size = start.view(lengths.shape), size.view(lengths.shape)
    longest, capacity = int(size.max()) if size.numel() else 0, out.shape[2]
    if longest > capacity:
        where = _stream_name(size > capacity)
        raise ValueError(f"{op}: {where} does not fit into B={capacity} bytes: expected {longest} or more")
    with torch.inference_mode():  # tensors made in it can only be written in it
        column = torch.arange(longest, device=out.device)
        for layer in range(out.shape[0]):  # bounds the memory of the indices
            row = out[layer, :, :longest]
            source = (start[layer].unsqueeze(1) + column).clamp_(max=data.numel() - 1)
            row.copy_(torch.where(column < size[layer].unsqueeze(1), data[source], row))
        lengths.copy_(size)


def decode_fast_new(cdf: torch.Tensor, data: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Decode what :func:`encode_fast_new` wrote.

    What is accepted is, byte for byte, what encoding the result would give. So a damaged stream either is
    noticed or is the stream of other symbols. That is no checksum: keep one where bytes may change.

    Args:
        cdf: int16 ``[L, C, bins + 1]``, the one that was encoded with.
        data: uint8 ``[L, C, B]``.
        lengths: int32 or int64 ``[L, C]``: bytes of each stream, 0 to B.
        out: ``[L, T, C]`` of an integer type that holds ``bins - 1``, overwritten.

    Raises:
        TypeError: An operand is no tensor or of another dtype.
        ValueError: Shapes or lengths do not fit, the cdf is none, or a stream is damaged: the first such is
            named. ``out`` stays as it was then, and no byte outside a row's length counts.
    """
    import torch

    op = "decode_fast_new"
    operands = Operands(op)
    operands.add("cdf", cdf, "L C entries", ("int16",))
    operands.add("data", data, "L C B", ("uint8",))
    operands.add("lengths", lengths, "L C", INDICES)
    operands.add("out", out, "L T C", INTEGERS)
    capacity = data.shape[2]
    bad = (lengths < 0) | (lengths > capacity)
    if bool(bad.any()):
        raise ValueError(
            f"{op}: lengths: {_stream_name(bad)} has {int(lengths[bad][0])}: expected 0 to B={capacity} bytes"
        )
    start = torch.arange(lengths.numel(), device=data.device) * capacity
    _decode(op, cdf, data.reshape(-1), start, start + lengths.reshape(-1), out)


def decode_fast_prefsum(
    cdf: torch.Tensor, data: torch.Tensor, prefix_sums: torch.Tensor, out: torch.Tensor
) -> None:
    """Decode streams that lie one after the other, layer by layer, channel by channel.

    Args:
        cdf: int16 ``[L, C, bins + 1]``, the one that was encoded with.
        data: 1-D uint8; bytes behind the last stream are not read.
        prefix_sums: int32 or int64 ``[L, C]``: where each stream ends in ``data``, which is where the next
            begins; the first begins at 0.
        out: ``[L, T, C]`` of an integer type that holds ``bins - 1``, overwritten.

    Raises:
        TypeError: An operand is no tensor or of another dtype.
        ValueError: As for :func:`decode_fast_new`; or sums that fall or end outside ``data``.
    """
    import torch

    op = "decode_fast_prefsum"
    operands = Operands(op)
    operands.add("cdf", cdf, "L C entries", ("int16",))
    operands.add("data", data, "nbytes", ("uint8",))
    operands.add("prefix_sums", prefix_sums, "L C", INDICES)
    operands.add("out", out, "L T C", INTEGERS)
    end = prefix_sums.reshape(-1).to(torch.int64)
    start = torch.cat([end.new_zeros(1), end[:-1]]) if end.numel() else end
    bad = (start > end) | (end > data.numel())
    if bool(bad.any()):
        raise ValueError(
            f"{op}: prefix_sums: {_stream_name(bad.view(prefix_sums.shape))} is bytes {int(start[bad][0])} to "
            f"{int(end[bad][0])}: expected sums that never fall, within the {data.numel()} of data"
        )
    _decode(op, cdf, data, start, end, out)


def _decode(op: str, cdf: Any, data: Any, start: Any, end: Any, out: Any) -> None:
    """Decode aside, and hand over only what is whole."""
    import torch

    table = _checked_table(op, cdf)
    largest = cdf.shape[2] - 2
    if torch.iinfo(out.dtype).max < largest:
        raise ValueError(f"{op}: out is {out.dtype}: expected a type that holds symbols up to {largest}")
    symbols = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    damaged = ~_rans.decode(table, data, start, end, symbols)
    if bool(damaged.any()):
        where = _stream_name(damaged.view(cdf.shape[:2]))
        raise ValueError(
            f"{op}: {where} is damaged, cut, or was made with another cdf: expected its own bytes"
        )
    with torch.inference_mode():  # tensors made in it can only be written in it
        out.copy_(symbols)


def _checked_table(op: str, cdf: Any) -> torch.Tensor:
    """The cdf as int32 ``[L * C, bins + 1]``, the last entry 2**16, once it is strictly increasing."""
    import torch

    entries = cdf.shape[2]
    if not 3 <= entries <= _TOTAL + 1:
        raise ValueError(
            f"{op}: cdf has {entries} entries per stream: expected num_bins + 1, 3 to {_TOTAL + 1}"
        )
    table = cdf.to(torch.int32) & _U16
    bad = (table[..., 0] != 0) | (table[..., -1] != 0)
    table[..., -1] = _TOTAL
    bad |= (table[..., 1:] <= table[..., :-1]).any(-1)
    if bool(bad.any()):
        raise ValueError(
            f"{op}: cdf of {_stream_name(bad)}: expected unsigned 16-bit entries, strictly increasing from 0 to "
            "2**16 (stored as 0), as calculate_cdf gives them"
        )
    return table.reshape(-1, entries)


def _check_symbols(op: str, symbols: Any, num_bins: int) -> None:
    if symbols.numel() == 0:
        return
    low, high = (int(bound) for bound in symbols.aminmax())
    if low < 0 or high >= num_bins:
        bad = low if low < 0 else high
        raise ValueError(f"{op}: symbols has {bad}: expected 0 to {num_bins - 1}")


def _stream_name(bad: Any) -> str:
    """The first stream that ``bad`` (bool ``[L, C]``) marks."""
    layer, channel = bad.nonzero()[0].tolist()
    return f"layer {layer}, channel {channel}"
