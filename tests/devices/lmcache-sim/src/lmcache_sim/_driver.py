"""The driver's C functions by ctypes. Calls release the GIL; failures are raised."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from typing import Any

from lmcache_sim._load import library_path

__all__ = ["HANDLE_BYTES", "LIB", "OK", "MemoryInfo", "PointerInfo", "call", "finished", "out"]

OK = 0
_NOT_READY = 1
_OUT_OF_MEMORY = 3
HANDLE_BYTES = 64
UUID_BYTES = 16

HOST_FN = ctypes.CFUNCTYPE(None, c_void_p, c_int)


class MemoryInfo(ctypes.Structure):
    """lmcache_sim_memory_info: bytes, and counts of allocations."""

    _fields_ = [
        (n, c_uint64) for n in ("capacity", "allocated", "reserved", "peak", "allocations", "imported")
    ]


class PointerInfo(ctypes.Structure):
    """lmcache_sim_pointer_info."""

    _fields_ = [
        ("device", c_int32),
        ("imported", c_int32),
        ("base", c_uint64),
        ("bytes", c_uint64),
        ("id", c_uint64),
    ]


_HANDLE = POINTER(c_uint8)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "device_count": (),
    "device_uuid": (c_int, _HANDLE),
    "synchronize": (c_int,),
    "device_error": (c_int,),
    "clear_error": (c_int,),
    "used": (),
    "malloc": (c_int, c_uint64, POINTER(c_uint64)),
    "free": (c_uint64,),
    "get_memory_info": (c_int, POINTER(MemoryInfo)),
    "reset_peak": (c_int,),
    "get_pointer_info": (c_uint64, POINTER(PointerInfo)),
    "check_guards": (c_int,),
    "host_register": (c_void_p, c_uint64),
    "host_unregister": (c_void_p,),
    "host_is_registered": (c_void_p,),
    "default_stream": (c_int, POINTER(c_uint64)),
    "stream_device": (c_uint64,),
    "stream_query": (c_uint64,),
    "stream_synchronize": (c_uint64,),
    "set_delay": (c_int64,),
    "stream_set_delay": (c_uint64, c_int64),
    "stream_pause": (c_uint64,),
    "stream_resume": (c_uint64,),
    "stream_sleep": (c_uint64, c_int64),
    "set_link": (c_double, c_int64),
    "memcpy_async": (c_uint64, c_uint64, c_uint64, c_uint64, c_int),
    "memset_async": (c_uint64, c_uint64, c_int, c_uint64),
    "host_func": (c_uint64, HOST_FN, c_void_p),
    "event_create": (c_int, POINTER(c_void_p)),
    "event_destroy": (c_void_p,),
    "event_device": (c_void_p,),
    "event_record": (c_void_p, c_uint64),
    "stream_wait_event": (c_uint64, c_void_p),
    "event_query": (c_void_p,),
    "event_synchronize": (c_void_p,),
    "event_elapsed": (c_void_p, c_void_p, POINTER(c_double)),
    "event_export": (c_void_p, _HANDLE),
    "event_import": (_HANDLE, POINTER(c_void_p)),
    "ipc_export": (c_uint64, _HANDLE, POINTER(c_uint64)),
    "ipc_open": (_HANDLE, POINTER(c_uint64)),
    "ipc_close": (c_uint64,),
}


def _load() -> ctypes.CDLL:
    # Global, so that kernel libraries that are not linked with it find its functions, too.
    library = ctypes.CDLL(library_path(), mode=ctypes.RTLD_GLOBAL)
    for name, arguments in _SIGNATURES.items():
        getattr(library, f"lmcache_sim_{name}").argtypes = arguments
    library.lmcache_sim_last_error.restype = ctypes.c_char_p
    library.lmcache_sim_shutdown.restype = None
    return library


LIB = _load()


def _raise(code: int) -> None:
    text = LIB.lmcache_sim_last_error().decode()
    if code == _OUT_OF_MEMORY:
        import torch

        raise torch.OutOfMemoryError(text)
    raise RuntimeError(text)


def call(name: str, *arguments: Any) -> None:
    """Call ``lmcache_sim_NAME``.

    Raises:
        RuntimeError: What the driver says; ``torch.OutOfMemoryError`` if the device is full.
    """
    if code := getattr(LIB, f"lmcache_sim_{name}")(*arguments):
        _raise(code)


def finished(name: str, *arguments: Any) -> bool:
    """Call a query. Raises as ``call`` does if what is asked about has failed."""
    code = getattr(LIB, f"lmcache_sim_{name}")(*arguments)
    if code not in (OK, _NOT_READY):
        _raise(code)
    return bool(code == OK)


def out(kind: Any, name: str, *arguments: Any) -> Any:
    """Call a function whose last parameter is a pointer to ``kind``, and return what it wrote."""
    result = kind()
    call(name, *arguments, byref(result))
    return result if isinstance(result, ctypes.Structure) else result.value


def handle_of(name: str, *arguments: Any) -> bytes:
    """Call a function that writes a handle."""
    room = (c_uint8 * HANDLE_BYTES)()
    call(name, *arguments, room)
    return bytes(room)


def handle_buffer(handle: bytes) -> Any:
    """A handle as the driver takes it.

    Raises:
        ValueError: It has another length.
    """
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"handle of {len(handle)} bytes: expected the {HANDLE_BYTES} that were exported")
    return (c_uint8 * HANDLE_BYTES).from_buffer_copy(handle)
