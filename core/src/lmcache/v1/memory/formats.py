"""What the axes of a memory object's tensors mean. One row per format; everything else is looked up here."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

__all__ = ["MemoryFormat"]


class MemoryFormat(Enum):
    """A name, the meaning of each axis (one letter each) and thereby the axis that counts tokens.

    2: keys and values; 1: both in one; L: layers; T: tokens; D: the hidden dimension; B: bytes.
    """

    UNDEFINED = ("undefined", "")
    KV_2LTD = ("kv_2ltd", "2LTD")
    """A whole chunk."""
    KV_T2D = ("kv_t2d", "T2D")
    """One layer of a chunk."""
    KV_2TD = ("kv_2td", "2TD")
    """One layer of a chunk, keys first: what blending works on."""
    KV_MLA_FMT = ("kv_mla", "1LTD")
    """A whole chunk of a model whose keys and values are one latent vector."""
    EC_TD = ("ec_td", "TD")
    """What a multimodal encoder gives."""
    HS_TD = ("hs_td", "TD")
    """Hidden states."""
    BINARY = ("binary", "B")
    """Bytes in an arena: something serialised."""
    BINARY_BUFFER = ("binary_buffer", "B")
    """Bytes in a buffer of their own."""

    def __init__(self, label: str, axes: str) -> None:
        self.label = label
        self.axes = axes

    @property
    def token_axis(self) -> int | None:
        """Which axis counts tokens; None where none does."""
        at = self.axes.find("T")
        return None if at < 0 else at

    def token_dim(self) -> int:
        """As ``token_axis``; 0 where no axis counts tokens."""
        return self.token_axis or 0

    def tokens(self, shape: Sequence[int]) -> int:
        """Tokens in a tensor of this shape; 0 where no axis counts them."""
        return 0 if self.token_axis is None else int(shape[self.token_axis])

    def check(self, shape: Sequence[int]) -> None:
        """
        Raises:
            ValueError: A tensor of this format cannot have this shape.
        """
        if self.token_axis is not None and len(shape) != len(self.axes):
            raise ValueError(
                f"memory format {self.name}: shape {tuple(shape)}: expected {len(self.axes)} axes, {self.axes}"
            )
        if self.axes[:1] in {"1", "2"} and shape[0] != int(self.axes[0]):
            raise ValueError(
                f"memory format {self.name}: shape {tuple(shape)}: expected {self.axes[0]} on the first axis"
            )
