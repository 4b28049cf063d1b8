"""What a memory object holds: shapes, element types, format, place. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.platform.base.ipc_wire import DTYPE_BYTES

__all__ = ["Layout", "MemoryObjMetadata", "dtype_name", "itemsize_of", "layout_of"]


def dtype_name(dtype: Any) -> str:
    """The element type's name without a library's prefix: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).rpartition(".")[2]


def itemsize_of(dtype: Any) -> int:
    """Bytes per element.

    Args:
        dtype: A type of torch, or its name.

    Raises:
        ValueError: There is no such type.
    """
    size = DTYPE_BYTES.get(dtype_name(dtype))
    if size is None:
        raise ValueError(f"dtype {dtype_name(dtype)!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return size


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of an object lies in it. A tensor begins at a multiple of its element's size."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    fmt: MemoryFormat
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.ends[-1]


def layout_of(shapes: Any, dtypes: Any, fmt: MemoryFormat = MemoryFormat.UNDEFINED) -> Layout:
    """The layout of one tensor (a shape, a dtype) or of several (a sequence of each; one dtype serves all).

    Raises:
        ValueError: They do not go together, do not fit the format, or make no bytes.
    """
    if isinstance(shapes, int):
        shapes = (shapes,)
    several = len(shapes) > 0 and not isinstance(shapes[0], int)
    each = tuple(tuple(int(size) for size in shape) for shape in (shapes if several else (shapes,)))
    types = tuple(dtypes) if isinstance(dtypes, (list, tuple)) else (dtypes,) * len(each)
    return _layout(each, tuple("uint8" if dtype is None else dtype for dtype in types), fmt)


@lru_cache(maxsize=1024)  # an engine allocates few layouts, and each of them again and again
def _layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...], fmt: MemoryFormat) -> Layout:
    if len(shapes) != len(dtypes):
        raise ValueError(f"memory object: {len(shapes)} shapes and {len(dtypes)} dtypes: expected as many")
    starts, ends, at = [], [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if min(shape, default=1) < 1:
            raise ValueError(f"memory object: shape {shape}: expected sizes of 1 or more")
        fmt.check(shape)
        itemsize = itemsize_of(dtype)
        at = -(-at // itemsize) * itemsize
        starts.append(at)
        at += prod(shape) * itemsize
        ends.append(at)
    return Layout(shapes, dtypes, fmt, tuple(starts), tuple(ends))


@dataclass(slots=True)
class MemoryObjMetadata:
    """An object's layout and place. Counts are the object's own.

    ``address`` is the offset in its arena, ``phy_size`` what it takes there.
    """

    layout: Layout
    address: int
    phy_size: int
    cached_positions: Any = None
    """Positions that the keys were rotated for, where it matters."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shapes[0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.shapes

    @property
    def dtype(self) -> Any:
        return self.layout.dtypes[0]

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return self.layout.dtypes

    @property
    def fmt(self) -> MemoryFormat:
        return self.layout.fmt

    @fmt.setter
    def fmt(self, fmt: MemoryFormat) -> None:
        """Who writes an object may say late what it wrote.

        Raises:
            ValueError: The shapes do not fit the format.
        """
        self.layout = layout_of(self.layout.shapes, self.layout.dtypes, fmt)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for a message or a file: layout, not place."""
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [dtype_name(dtype) for dtype in self.dtypes],
            "fmt": self.fmt.name,
        }

    @staticmethod
    def layout_from_dict(found: Mapping[str, Any]) -> Layout:
        """The layout that ``to_dict`` wrote; dtypes are names.

        Raises:
            ValueError: It is none.
        """
        fmt = MemoryFormat.__members__.get(str(found.get("fmt")))
        shapes, dtypes = found.get("shapes"), found.get("dtypes")
        if fmt is None:
            raise ValueError(f"memory format {found.get('fmt')!r}: expected one of {', '.join(_names())}")
        if not _is_shapes(shapes) or not isinstance(dtypes, (list, tuple)):
            raise ValueError(
                f"memory object: shapes {shapes!r}, dtypes {dtypes!r}: expected lists, one entry each"
            )
        return layout_of(shapes, dtypes, fmt)


def _names() -> Sequence[str]:
    return list(MemoryFormat.__members__)


def _is_shapes(found: Any) -> bool:
    return (
        isinstance(found, (list, tuple))
        and len(found) > 0
        and all(isinstance(shape, (list, tuple)) for shape in found)
        and all(type(size) is int for shape in found for size in shape)
    )
