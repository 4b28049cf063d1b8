"""Types that device ops take. Plain integers throughout, so a native kernel can read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["PageBufferShapeDesc", "TransferDirection"]


class TransferDirection(IntEnum):
    """Which way a transfer goes. H2D writes the engine's pages, D2H reads them."""

    H2D = 0
    D2H = 1


@dataclass
class PageBufferShapeDesc:
    """Geometry of the pages of one group of layers that share a layout."""

    kv_size: int = 0
    """Planes per page: 2 where K and V are apart, 1 where they are packed or there is one (MLA)."""
    nl: int = 0
    """Layers."""
    nb: int = 0
    """Blocks; 0 leaves it to the tensors."""
    bs: int = 0
    """Token slots per block."""
    nh: int = 0
    """KV heads; 1 for MLA."""
    hs: int = 0
    """Elements per head and slot; the packed width where K and V are packed."""
    element_size: int = 0
    """Bytes per element."""
    block_stride_elems: int = 0
    """Elements between blocks where the block axis is padded, for ops that get pointers; 0 is tight."""
