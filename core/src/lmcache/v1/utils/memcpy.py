"""memcpy between addresses of host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["bytes_at", "copy_each", "copy_freely", "copy_slices", "keeps_lock"]

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_BRIEF = 1 << 20
"""Bytes in all, a tenth of a millisecond's work, for which the interpreter's lock is not given back: with pieces of
16 KiB, giving it back and taking it again for each costs 3 to 10 %, and more where other threads want it."""

_MOST_KEPT = 4 << 20
"""Bytes after which it is given back in any case: whoever waits for it is not served before, for 5 ms each time."""
_kept = 0
"""Bytes copied since then."""

_memcpy = ctypes.CDLL(None).memcpy  # a CDLL call releases the interpreter's lock
_memcpy.argtypes, _memcpy.restype = _ARGUMENTS, None
_brief_memcpy = ctypes.PyDLL(None).memcpy  # a PyDLL call keeps it
_brief_memcpy.argtypes, _brief_memcpy.restype = _ARGUMENTS, None


def keeps_lock(nbytes: int) -> bool:
    """Whether so many bytes more may be copied with the interpreter's lock. If not, :func:`copy_freely` is to do it.

    Of all copies of this process together, as one that is brief may be one of many.
    """
    global _kept
    _kept += nbytes
    if _kept < _MOST_KEPT:
        return True
    _kept = 0
    return False


def copy_each(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, for all i, in this thread.

    Nothing is checked; ranges must not overlap. Other threads of Python run meanwhile; where there are several pieces
    of less than 1 MiB together, in some calls only.
    """
    nbytes = sum(sizes)
    if len(sizes) > 1 and nbytes < _BRIEF and keeps_lock(nbytes):
        deque(map(_brief_memcpy, dst, src, sizes), 0)  # the loop runs in C
    else:
        copy_freely(dst, src, sizes)


def copy_freely(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]) -> None:
    """As :func:`copy_each`, but other threads run with every piece."""
    deque(map(_memcpy, dst, src, sizes), 0)


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
    views is a ValueError. The interpreter's lock is kept throughout: see :func:`keeps_lock`.
    """
    for target, source in zip(targets, sources, strict=True):
        into[target] = out_of[source]
