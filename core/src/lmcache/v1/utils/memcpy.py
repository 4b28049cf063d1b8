"""memcpy between addresses of host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

__all__ = ["copy_each"]

_memcpy = ctypes.CDLL(None).memcpy  # a CDLL call releases the GIL
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def copy_each(dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, for all i, in this thread.

    Nothing is checked; ranges must not overlap. Other threads of Python run meanwhile.
    """
    deque(map(_memcpy, dst, src, sizes), 0)  # the loop runs in C: a third less than a Python loop per copy
