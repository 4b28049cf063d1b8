"""``torch.sim``: what torch and callers of modules like ``torch.cuda`` expect, and the simulation's own."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable
from ctypes import c_uint8, c_uint64
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_sim import _driver
from lmcache_sim.streams import Event, Stream, current_stream, default_stream, index_of, set_stream, stream

_PID_IN_HANDLE = 8  # csrc/runtime/handle.hpp

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "check_guards",
    "clear_error",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "host_register",
    "host_unregister",
    "ipc_close",
    "ipc_export",
    "ipc_open",
    "ipc_owner",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_info",
    "memory_reserved",
    "open_tensor",
    "set_delay",
    "set_device",
    "set_link",
    "set_stream",
    "stream",
    "synchronize",
    "tensor_from_ptr",
]


# ------------------------------------------------------------------------------------------------------- devices
def device_count() -> int:
    """How many devices this process sees.

    Raises:
        RuntimeError: A setting in the environment is wrong.
    """
    count: int = _driver.LIB.lmcache_sim_device_count()
    if count < 0:
        raise RuntimeError(_driver.LIB.lmcache_sim_last_error().decode())
    return count


def is_available() -> bool:
    """Whether there is a device. Uses none."""
    return bool(_driver.LIB.lmcache_sim_device_count() > 0)


def is_initialized() -> bool:
    """Whether a device was used in this process."""
    return bool(_driver.LIB.lmcache_sim_used())


def current_device() -> int:
    """The ordinal of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Make a device this thread's current one."""
    torch.accelerator.set_device_index(index_of(device))


class device:
    """A context in which another device is current; nothing changes if it is None or negative."""

    def __init__(self, device: Any) -> None:
        self._index = -1 if device is None else index_of(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        if self._index >= 0:
            set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        set_device(self._before)


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is. ``uuid`` names it in every process of the machine, whatever its ordinal there."""

    name: str
    uuid: str
    total_memory: int


def get_device_name(device: Any = None) -> str:
    """The model's name."""
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> DeviceProperties:
    """See DeviceProperties."""
    index = index_of(device)
    room = (c_uint8 * _driver.UUID_BYTES)()
    _driver.call("device_uuid", index, room)
    return DeviceProperties(
        "LMCache simulated accelerator", str(uuid.UUID(bytes=bytes(room))), mem_get_info(index)[1]
    )


def synchronize(device: Any = None) -> None:
    """Wait until all streams of a device are done. Raises the first failure."""
    _driver.call("synchronize", index_of(device))


def clear_error(device: Any = None) -> None:
    """Forget failures, also an illegal address, after all streams are done."""
    _driver.call("clear_error", index_of(device))


# -------------------------------------------------------------------------------------------------------- memory
def memory_info(device: Any = None) -> dict[str, int]:
    """Bytes ``capacity``, ``allocated`` (whole pages), ``reserved``, ``peak``; counts ``allocations``, ``imported``."""
    info = _driver.out(_driver.MemoryInfo, "get_memory_info", index_of(device))
    return {name: getattr(info, name) for name, _ in info._fields_}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    info = memory_info(device)
    return info["capacity"] - info["reserved"], info["capacity"]


def memory_allocated(device: Any = None) -> int:
    """Bytes of live allocations."""
    return memory_info(device)["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """The most that memory_allocated has been."""
    return memory_info(device)["peak"]


def memory_reserved(device: Any = None) -> int:
    """Bytes of live allocations and of freed ones that queued work may still use."""
    return memory_info(device)["reserved"]


def empty_cache() -> None:
    """Nothing to do: freed memory goes back to the host by itself."""


def check_guards(device: Any = None) -> None:
    """Wait for the device and look at the bytes before and after every allocation.

    Raises:
        RuntimeError: Names damage, of a live allocation or of one that was freed since; it is then repaired.
    """
    _driver.call("check_guards", index_of(device))


def host_register(address: int, nbytes: int) -> None:
    """Count host memory as pinned. Raises RuntimeError if part of it already is."""
    _driver.call("host_register", address, nbytes)


def host_unregister(address: int) -> None:
    """Undo host_register of the range that begins there."""
    _driver.call("host_unregister", address)


# ------------------------------------------------------------------------------------------------- the simulation
def set_delay(microseconds: int) -> None:
    """Wait so long before each kernel, copy and callback, on every stream."""
    _driver.call("set_delay", microseconds)


def set_link(gigabytes_per_second: float = 0.0, latency_microseconds: int = 0) -> None:
    """How fast host and device are connected; 0 is no limit. The streams of a device share it."""
    _driver.call("set_link", gigabytes_per_second, latency_microseconds)


# ----------------------------------------------------------------------------------------------------- addresses
def tensor_from_ptr(ptr: int, shape: Iterable[int], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """A tight tensor over device memory that is known by its address. It owns nothing."""
    sizes = tuple(shape)
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    raw = torch.ops.lmcache_sim.from_pointer(ptr, nbytes, index_of(device), False)
    return raw.view(dtype).view(sizes)


def ipc_export(tensor: torch.Tensor) -> tuple[bytes, int]:
    """A handle on the allocation that a tensor lies in, and the offset of its first element there, in bytes.

    The allocation must live until the other process has opened it; what is mapped there outlives this process,
    but not the freeing of the allocation.
    """
    if tensor.device.type != "sim":
        raise ValueError(f"tensor on {tensor.device}: expected one of a 'sim' device")
    room = (c_uint8 * _driver.HANDLE_BYTES)()
    offset = _driver.out(c_uint64, "ipc_export", tensor.data_ptr(), room)
    return bytes(room), offset


def ipc_open(handle: bytes) -> int:
    """Map another process's allocation and return its address here. Opened twice, it is mapped once.

    Raises:
        RuntimeError: Its process has ended, it was freed, or this process does not see its device.
    """
    return int(_driver.out(c_uint64, "ipc_open", _driver.handle_buffer(handle)))


def ipc_owner(handle: bytes) -> int:
    """The process whose memory a handle says it is. Nothing is opened, and nothing of it is believed yet."""
    return int(struct.unpack_from("<i", handle, _PID_IN_HANDLE)[0])


def ipc_close(base: int) -> None:
    """Undo one ipc_open. The last one unmaps, once the work that is queued by then is done."""
    _driver.call("ipc_close", base)


def open_tensor(handle: bytes) -> torch.Tensor:
    """The whole allocation behind a handle as bytes; closed with the last tensor that shares its storage."""
    base = ipc_open(handle)
    info = _driver.out(_driver.PointerInfo, "get_pointer_info", base)
    try:
        opened: torch.Tensor = torch.ops.lmcache_sim.from_pointer(base, info.bytes, info.device, True)
    except BaseException:
        ipc_close(base)
        raise
    return opened


# --------------------------------------------------------------------------------------- what torch itself calls
def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Random numbers come from the CPU's generator, which torch.manual_seed sets."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The CPU's state."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the CPU's state."""
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """For torch.autocast."""
    return [torch.float16, torch.bfloat16]
