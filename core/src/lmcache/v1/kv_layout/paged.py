"""What a stored object must know about the pages in it, so that bytes of one layout never meet another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.strided import PageGeometry
from lmcache.v1.kv_layout.table import kv_format

__all__ = ["PLAIN", "LayoutFingerprint", "PagedLayout"]

#: Packing of pages whose content follows the row's axes.
PLAIN = "plain"

_TAG = re.compile(r"[a-z0-9][a-z0-9._-]*")

FieldValue: TypeAlias = "str | int | tuple[int, ...]"
LayoutFingerprint: TypeAlias = "tuple[tuple[str, FieldValue], ...]"
"""Names and primitive values in a fixed order, ready to be encoded into a key."""


@dataclass(frozen=True)
class PagedLayout:
    """The layout of one group of layers that share block ids.

    Two caches whose ``fingerprint()`` is equal may exchange pages as bytes.
    """

    format: str
    """Name of the row."""
    dtype: str
    """Element type without a library's prefix, such as ``bfloat16``."""
    block_size: int
    """Token slots per block."""
    num_kv_heads: int
    """KV heads of this rank; 1 for MLA."""
    head_size: int
    """Elements per head and slot; the packed width where K and V are packed, of all planes of a latent."""
    page_bytes: tuple[int, ...]
    """Bytes of one block, one entry per tensor: a layer's one, or each of its ``planes`` in turn."""
    packing: str = PLAIN
    """How content is packed inside a page: ``plain``, or a tag for the engine's own way, such as
    ``cpu-vec``. Pages of any packing but ``plain`` are opaque."""
    split: int = 1
    """Kernel blocks per block, where an engine splits its blocks."""
    planes: int = 1
    """Tensors per layer: 2 where K and V are tensors of their own."""

    def __post_init__(self) -> None:
        kv_format(self.format)
        numbers = (
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            self.split,
            self.planes,
            *self.page_bytes,
        )
        if not self.page_bytes or min(numbers) < 1 or len(self.page_bytes) % self.planes:
            raise LayoutError(
                f"layout {self.format}: expected positive sizes, and pages of at least one whole layer: {self}"
            )
        for tag in (self.dtype, self.packing):
            if not _TAG.fullmatch(tag):
                raise LayoutError(f"layout {self.format}: bad dtype or packing tag {tag!r}")

    @classmethod
    def of(
        cls, pages: Sequence[PageGeometry], dtype: object, packing: str = PLAIN, planes: int = 1
    ) -> PagedLayout:
        """The layout of layers that were described one by one.

        A cross-layer tensor counts as all the layers it holds.

        Args:
            pages: What ``describe`` said of each tensor, in layer order; where a layer is several, one after the
                other.
            dtype: The element type or its name; ``torch.bfloat16`` and ``bfloat16`` are the same.
            packing: See the field.
            planes: Tensors per layer.

        Raises:
            LayoutError: No layers, layers that differ in more than padding, another number of tensors than the row
                has, or opaque pages whose packing is said to be plain (and the reverse).
        """
        if not pages:
            raise LayoutError("a layout needs at least one layer")
        first = pages[0]
        _check_planes(first, len(pages), planes)
        kinds = {tuple(map(_kind, pages[at : at + planes])) for at in range(0, len(pages), planes)}
        if len(kinds) > 1:
            raise LayoutError(f"layers of one group differ: {sorted(kinds)}; describe each kind by itself")
        if first.opaque != (packing != PLAIN):
            raise LayoutError(
                f"layout {first.row.name}: opaque={first.opaque} does not go with packing {packing!r}"
            )
        return cls(
            format=first.row.name,
            dtype=str(dtype).rpartition(".")[2],
            block_size=first.block_size,
            num_kv_heads=first.num_heads,
            head_size=sum(p.head_size for p in pages[:planes]) if first.row.is_mla else first.head_size,
            page_bytes=tuple(p.page_bytes for p in pages for _ in range(p.num_layers)),
            packing=packing,
            split=first.split,
            planes=planes,
        )

    @property
    def num_layers(self) -> int:
        return len(self.page_bytes) // self.planes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(self.page_bytes)

    @property
    def opaque(self) -> bool:
        return self.packing != PLAIN

    @property
    def token_addressable(self) -> bool:
        """Whether stored pages may be cut below a block or converted to another layout."""
        return kv_format(self.format).token_addressable and not self.opaque and self.split == 1

    def fingerprint(self) -> LayoutFingerprint:
        """Every field, by name, in a fixed order."""
        return (
            ("format", self.format),
            ("dtype", self.dtype),
            ("block_size", self.block_size),
            ("num_kv_heads", self.num_kv_heads),
            ("head_size", self.head_size),
            ("page_bytes", self.page_bytes),
            ("packing", self.packing),
            ("split", self.split),
            ("planes", self.planes),
        )


def _kind(page: PageGeometry) -> tuple[str, int, int, int, bool, int]:
    return page.row.name, page.block_size, page.num_heads, page.head_size, page.opaque, page.split


def _check_planes(first: PageGeometry, tensors: int, planes: int) -> None:
    levels = first.row.dims.levels
    fits = planes == 2 if "2" in levels else planes >= 1 if "NP" in levels else planes == 1
    if not fits or tensors % planes:
        raise LayoutError(
            f"{first.row.label}: {tensors} tensors, {planes} a layer: expected {first.row.dims}"
        )
