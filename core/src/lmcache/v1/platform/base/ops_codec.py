"""Ops that compute on KV content, as members of ``DeviceOps``: the CacheGen coder and RoPE."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache.v1.platform.base.op import op

if TYPE_CHECKING:
    import torch

__all__ = ["CodecOps"]


class CodecOps:
    """L layers, T tokens, C channels. Coded bytes are for the coder that wrote them: no format of a file."""

    @op
    def calculate_cdf(self, symbols: torch.Tensor, num_bins: int) -> torch.Tensor:
        """How often each symbol occurs in each layer and channel, cumulated and scaled to 16 bits.

        Args:
            symbols: Integers ``[L, T, C]`` from 0 to ``num_bins - 1``.
            num_bins: Number of different symbols.

        Returns:
            int16 ``[L, C, num_bins + 1]``: cumulative frequencies; the bits are those of a uint16.

        Raises:
            ValueError: ``num_bins`` or a symbol is out of range, or ``symbols`` has another shape.
        """

    @op
    def encode_fast_new(
        self, cdf: torch.Tensor, symbols: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Code the symbols of each layer and channel by their frequencies.

        Args:
            cdf: int16 ``[L, C, bins + 1]`` of ``calculate_cdf``.
            symbols: Integers ``[L, T, C]``.
            out: uint8 ``[L, C, B]``; gets the bytes of each channel.
            lengths: Integers ``[L, C]``; gets the number of bytes in each row of ``out``.

        Raises:
            ValueError: Shapes or types do not fit, or a row takes more than B bytes.
        """

    @op
    def decode_fast_new(
        self, cdf: torch.Tensor, data: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Undo ``encode_fast_new``.

        Args:
            cdf: int16 ``[L, C, bins + 1]`` that coded it.
            data: uint8 ``[L, C, B]``: bytes of each channel from the start of its row.
            lengths: Integers ``[L, C]``: bytes in each row.
            out: Integers ``[L, T, C]``; gets the symbols.

        Raises:
            ValueError: Shapes or types do not fit.
        """

    @op
    def decode_fast_prefsum(
        self, cdf: torch.Tensor, data: torch.Tensor, prefix_sums: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Undo ``encode_fast_new`` where the rows were joined without gaps.

        Args:
            cdf: int16 ``[L, C, bins + 1]`` that coded it.
            data: uint8, 1-D: the bytes of all channels, layer by layer. Reads past the end give 0.
            prefix_sums: Integers ``[L, C]``: where in ``data`` each channel ends.
            out: Integers ``[L, T, C]``; gets the symbols.

        Raises:
            ValueError: Shapes or types do not fit, or ``prefix_sums`` decreases or leads past ``data``.
        """

    @op
    def rotary_embedding_k_fused(
        self,
        old_pos: torch.Tensor,
        new_pos: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        """Turn keys that were rotated for one position into keys for another, in place.

        Args:
            old_pos: Integers ``[T]``: positions that the keys were rotated for.
            new_pos: Integers ``[T]``: positions that they shall have.
            key: ``[T, heads * head_size]`` or ``[T, heads, head_size]``; changed in place.
            head_size: Elements per head.
            cos_sin_cache: ``[positions, rotary size]``: per position the cosines, then the sines.
            is_neox: True pairs element ``i`` with ``i + rotary size / 2``; False pairs neighbours.

        Raises:
            ValueError: Shapes do not fit, or a position is not in ``cos_sin_cache``.
        """

    @op
    def rotary_embedding_k_fused_strided(
        self,
        old_pos: torch.Tensor,
        new_pos: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        head_stride: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        """``rotary_embedding_k_fused`` for heads that hold more than keys: only their leading part is turned.

        Args:
            old_pos: Integers ``[T]``: positions that the keys were rotated for.
            new_pos: Integers ``[T]``: positions that they shall have.
            key: ``[T, heads * head_stride]`` or ``[T, heads, head_stride]``; changed in place.
            head_size: Leading elements per head that are keys.
            head_stride: Elements from one head to the next, ``head_size`` or more.
            cos_sin_cache: ``[positions, rotary size]``: per position the cosines, then the sines.
            is_neox: True pairs element ``i`` with ``i + rotary size / 2``; False pairs neighbours.

        Raises:
            ValueError: Shapes do not fit, or a position is not in ``cos_sin_cache``.
        """
