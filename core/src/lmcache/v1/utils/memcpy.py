"""memcpy between addresses of host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["bytes_at", "copy_each", "copy_slices"]

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_BRIEF = 1 << 20
"""Bytes in all, a tenth of a millisecond's work, for which the interpreter's lock is not given back: with pieces of
16 KiB, giving it back and taking it again for each costs 3 to 10 %, and more where other threads want it."""

_memcpy = ctypes.CDLL(None).memcpy  # a CDLL call releases the interpreter's lock
_memcpy.argtypes, _memcpy.restype = _ARGUMENTS, None
_brief_memcpy = ctypes.PyDLL(None).memcpy  # a PyDLL call keeps it
_brief_memcpy.argtypes, _brief_memcpy.restype = _ARGUMENTS, None


def copy_each(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, for all i, in this thread.

    Nothing is checked; ranges must not overlap. Other threads of Python run meanwhile, unless there are several
    pieces of less than 1 MiB together.
    """
    keep = len(sizes) > 1 and sum(sizes) < _BRIEF
    deque(map(_brief_memcpy if keep else _memcpy, dst, src, sizes), 0)  # the loop runs in C


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Host memory as bytes. It must stay as long as the view."""
    return memoryview(_bytes(nbytes).from_address(address)).cast("B")


@lru_cache(maxsize=64)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    """Kept, as making such a type costs more than to use it."""
    return ctypes.c_uint8 * count


def copy_slices(
    into: memoryview, targets: Sequence[slice], out_of: memoryview, sources: Sequence[slice]
) -> None:
    """Assign slices of bytes, one after the other, in this thread; they must not overlap.

    The cheapest way to copy pieces from Python: half the price of a call of memcpy, and a piece that is not within both
    views is a ValueError. The interpreter's lock is kept for each piece, so long ones are better left to
    :func:`copy_each`.
    """
    for target, source in zip(targets, sources, strict=True):
        into[target] = out_of[source]
