"""The compiled kernels by ctypes, and errors as Python has them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_uint64, c_void_p
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import lmcache_sim  # noqa: F401 -- its driver must be in the process

from lmcache.errors import DeviceError, LayoutError

__all__ = ["ABI", "Table", "Transfer", "drain", "launch", "on_device", "on_host", "record"]

_LIB = ctypes.CDLL(str(Path(__file__).resolve().with_name("liblmcache_sim_plugin.so")))


class Table(ctypes.Structure):
    """Integers in device memory, or on the host."""

    _fields_ = [("device", c_uint64), ("host", POINTER(c_uint64)), ("count", c_int32)]


class _Call(ctypes.Structure):
    _fields_ = [
        ("stream", c_uint64),
        ("format", c_int32),
        ("direction", c_int32),
        ("shape", c_int32 * 8),
        ("pages", Table),
        ("objects", Table),
        ("ids", Table),
        ("object_slots", c_int32),
        ("skip", c_int32),
        ("by_slot", c_int32),
        ("token_major", c_int32),
        ("objects_on_host", c_int32),
    ]


_LIB.lmcache_sim_plugin_transfer.argtypes = [POINTER(_Call)]
_LIB.lmcache_sim_plugin_error_text.restype = c_char_p
_LIB.lmcache_sim_plugin_record.argtypes = [c_uint64, c_char_p, c_uint64, c_char_p, c_uint64]
_LIB.lmcache_sim_plugin_drain.argtypes = [POINTER(c_uint64)]
_LIB.lmcache_sim_plugin_drain.restype = c_void_p

ABI: int = _LIB.lmcache_sim_plugin_abi()
"""``LMCACHE_NATIVE_ABI`` of the headers that the kernels were compiled with."""


def on_host(values: Sequence[int]) -> Table:
    """A table that travels with the launch."""
    return Table(0, (c_uint64 * len(values))(*(value % (1 << 64) for value in values)), len(values))


def on_device(tensor: Any) -> Table:
    """A table that is in device memory: a contiguous int64 tensor, which nobody waits for."""
    table = Table(tensor.data_ptr(), None, tensor.numel())
    table.tensor = tensor  # one that was made for the call must be there until it is queued
    return table


@dataclass
class Transfer:
    """One transfer between pages and objects; see csrc/transfers.cpp."""

    stream: int
    format: int
    direction: int
    shape: Any
    pages: Table
    objects: Table
    ids: Table
    object_slots: int
    skip: int = 0
    by_slot: bool = False
    token_major: bool = False
    objects_on_host: bool = False


def launch(op: str, transfer: Transfer) -> None:
    """Check a transfer, and queue it.

    Raises:
        LayoutError: The format is not served, or the operands do not fit it.
        ValueError: A number is out of range.
        DeviceError: The driver refuses it. Whatever is raised, nothing was queued.
    """
    call = _Call()
    for name, _ in _Call._fields_:
        value = getattr(transfer, name)
        setattr(call, name, (c_int32 * 8)(*astuple(value)) if name == "shape" else value)
    error = _LIB.lmcache_sim_plugin_transfer(byref(call))
    if not error:
        return
    text = f"{op}: KV format {transfer.format}: {_LIB.lmcache_sim_plugin_error_text(error).decode()}"
    if error == -1:
        raise DeviceError(text)
    raise (ValueError if error == 8 else LayoutError)(text)


def record(stream: int, kind: str, payload: bytes) -> None:
    """Have it drained once the stream is there."""
    word = kind.encode()
    if _LIB.lmcache_sim_plugin_record(stream, word, len(word), payload, len(payload)):
        raise DeviceError(_LIB.lmcache_sim_plugin_error_text(-1).decode())


def drain() -> list[tuple[str, bytes]]:
    """What is due, oldest first."""
    size = c_uint64()
    address = _LIB.lmcache_sim_plugin_drain(byref(size))
    raw = ctypes.string_at(address, size.value) if size.value else b""
    parts, at = [], 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 8], "little")
        parts.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return [(kind.decode(), payload) for kind, payload in zip(parts[::2], parts[1::2], strict=True)]
