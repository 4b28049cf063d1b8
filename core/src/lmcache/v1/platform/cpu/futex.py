"""Sleeping on a 32-bit word of shared memory until another process changes it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

__all__ = ["wait", "wake"]

# futex(2): the number of the system call differs by machine. The word is not private to the process.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
_POLL_SECONDS = 0.001
_QUIET = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> tuple[object, int] | None:
    number = _NUMBERS.get(platform.machine())
    if number is None or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    return None if call is None else (call, number)


_CALL = _system_call()


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until woken, at most ``seconds``, unless the word at ``address`` is no longer ``seen``.

    May return early: the caller looks again. Releases the GIL. Where the call is missing, a short sleep.
    """
    if _CALL is None or _futex(address, _WAIT, seen, seconds) == errno.ENOSYS:
        time.sleep(min(seconds, _POLL_SECONDS))


def wake(address: int) -> None:
    """Wake all who wait at ``address``."""
    if _CALL is not None:
        _futex(address, _WAKE, _ALL, 0)


def _futex(address: int, operation: int, value: int, seconds: float) -> int:
    assert _CALL is not None  # noqa: S101 -- for the type checker
    call, number = _CALL
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    result = call(  # type: ignore[operator]
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_uint32(value),
        ctypes.byref(limit), None, ctypes.c_int(0),
    )  # fmt: skip
    if result >= 0:
        return 0
    code = ctypes.get_errno()
    if code not in (*_QUIET, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    return code
