"""The entropy coder of CacheGen: a static rANS, all streams side by side.

Each step is a handful of tensor operations over all streams; Python loops over the symbols of a stream only.
docs/cachegen.md specifies the bits, and says why the bounds that are used here hold. A state is an int32 in
[0, 2**31); bytes go in and out of its low end, at most two per symbol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PRECISION", "decode", "encode"]

#: Frequencies of a table sum to 2**PRECISION.
PRECISION = 16

#: A decoder takes in bytes while its state is below this and there are any.
LOWER = 1 << 23

#: Bytes that a state can have.
_STATE_BYTES = 4

#: Bytes that a symbol can take.
_SYMBOL_BYTES = 2


def encode(table: torch.Tensor, symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode every stream into memory of its own, from its end towards its beginning.

    Args:
        table: int32 ``[L * C, bins + 1]``, each row strictly increasing from 0 to 2**16.
        symbols: integers ``[L, T, C]`` in [0, bins).

    Returns:
        Bytes (1-D uint8), and of each stream its start in there and its length, both int64 ``[L * C]``.
    """
    import torch

    streams, width = table.shape
    steps, device = symbols.shape[1], table.device
    room = _SYMBOL_BYTES * steps + 1  # one for a byte that does not count
    data = torch.zeros(streams * room, dtype=torch.uint8, device=device)
    row = torch.arange(streams, device=device)
    end = (row + 1) * room
    at = end.clone()
    state = torch.zeros(streams, dtype=torch.int32, device=device)
    flat, row_start = table.reshape(-1), row * width
    for step in range(steps - 1, -1, -1):
        cell = row_start + symbols[:, step].reshape(-1)
        low = flat.index_select(0, cell)
        freq = flat.index_select(0, cell + 1) - low
        # Only a state below freq * 2**15 stays below 2**31 when the symbol goes in.
        limit = freq << 15
        spilled = (state >= limit).to(torch.int32) + ((state >> 8) >= limit)
        # Both bytes are written always; the next ones overwrite those that do not count.
        _put(data, at - 1, state)
        _put(data, at - 2, state >> 8)
        at -= spilled
        state = state >> (spilled << 3)
        # (state // freq) * 2**16 + state % freq + low
        quotient = torch.div(state, freq, rounding_mode="trunc")
        state = state + quotient * ((1 << PRECISION) - freq) + low
    for _ in range(_STATE_BYTES):
        _put(data, at - 1, state)
        at -= (state > 0).to(torch.int64)
        state = state >> 8
    return data, at, end - at


def _put(data: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Store the low byte of each value."""
    data.scatter_(0, at, (values & 0xFF).to(data.dtype))


def decode(
    table: torch.Tensor, data: torch.Tensor, start: torch.Tensor, end: torch.Tensor, symbols: torch.Tensor
) -> torch.Tensor:
    """Decode every stream.

    Args:
        table: As for :func:`encode`.
        data: 1-D uint8.
        start: int64 ``[L * C]``: where each stream begins in ``data``.
        end: Likewise: the first byte behind it, at least ``start`` and within ``data``.
        symbols: ``[L, T, C]``, overwritten. Whatever the bytes are, what it gets is in [0, bins).

    Returns:
        bool ``[L * C]``: which streams are, byte for byte, what :func:`encode` makes of these symbols.
    """
    import torch

    streams, width = table.shape
    layers, steps, channels = symbols.shape
    data = torch.cat([data, data.new_zeros(1)])  # to be looked at, not used, by a stream that has ended
    canonical = (start == end) | (data.index_select(0, start) != 0)
    state, at = torch.zeros(streams, dtype=torch.int32, device=data.device), start
    for _ in range(_STATE_BYTES):
        state, at = _take_in(state, data, at, end)
    flat, row_start = table.reshape(-1), torch.arange(streams, device=data.device) * width
    for step in range(steps):
        slot = state & ((1 << PRECISION) - 1)
        cell = _find(flat, row_start, width - 1, slot)
        symbols[:, step] = (cell - row_start).view(layers, channels)
        low = flat.index_select(0, cell)
        freq = flat.index_select(0, cell + 1) - low
        state = freq * (state >> PRECISION) + slot - low
        for _ in range(_SYMBOL_BYTES):
            state, at = _take_in(state, data, at, end)
    # A canonical stream in state 0 has no bytes left: before its end a state is 2**7 or more.
    return canonical & (state == 0)


def _find(flat: torch.Tensor, row_start: torch.Tensor, bins: int, slot: torch.Tensor) -> torch.Tensor:
    """Where in each row the last entry lies that is at most ``slot``, by bisection.

    torch.searchsorted would do, but splits such small work among threads, which costs up to fifty times its
    time where cores are busy.
    """
    cell = row_start
    while bins > 1:
        half = bins // 2
        cell = cell + (flat.index_select(0, cell + half) <= slot) * half
        bins -= half
    return cell


def _take_in(
    state: torch.Tensor, data: torch.Tensor, at: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more byte for every state that wants one and has one."""
    import torch

    wants = (state < LOWER) & (at < end)
    return torch.where(wants, (state << 8) | data.index_select(0, at), state), at + wants
