"""Geometry of paged KV as device ops take it: plain integers, so that a native kernel can read them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from lmcache.errors import LayoutError

__all__ = ["PageBufferShapeDesc"]


@dataclass
class PageBufferShapeDesc:
    """Geometry of the pages of one group of layers that share a layout: eight int32.

    Other attributes (a ``dtype``, say) may be set; they take no part in a comparison.

    Raises:
        LayoutError: A field is given, at any time, what an int32 cannot hold.
        TypeError: Or no integer at all.
    """

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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            try:
                value = int(operator.index(value))
            except TypeError:
                raise TypeError(f"PageBufferShapeDesc.{name}={value!r}: expected an integer") from None
            # A kernel reads it as an int32: what does not fit would wrap to another geometry.
            if not -(1 << 31) <= value < 1 << 31:
                raise LayoutError(f"PageBufferShapeDesc.{name}={value}: expected what an int32 holds")
        object.__setattr__(self, name, value)
