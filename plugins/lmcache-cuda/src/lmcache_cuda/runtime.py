"""What this wheel asks of torch: the only module that names ``torch.cuda``.

Streams and memory are torch's; what is done with them is the native module's. Both use the device's primary
context, so a handle or an address of one is the other's, too.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from lmcache.errors import DeviceError
from lmcache_cuda import driver

__all__ = [
    "DEVICE_TYPE",
    "bytes_at",
    "current_ordinal",
    "current_stream",
    "device_count",
    "ids_for_upload",
    "is_on_device",
    "is_pinned",
    "kind",
    "native",
    "new_stream",
    "ordinal_of",
    "ordinal_of_uuid",
    "staged",
    "storage_from_torch",
    "storage_to_torch",
    "stream_handle",
    "stream_ordinal",
    "upload",
    "uuid_of",
]

DEVICE_TYPE = "cuda"
"""``torch.device.type`` of this wheel's tensors, on ROCm as well."""


def _torch() -> Any:
    return importlib.import_module("torch")


def kind() -> str:
    """Which driver torch was built for: "cuda" or "rocm"."""
    return "rocm" if _torch().version.hip else "cuda"


@lru_cache(maxsize=1)
def native() -> Any:
    """The native module on torch's driver.

    Raises:
        DeviceError: It cannot be loaded.
    """
    return driver.load(kind())


# --- devices -----------------------------------------------------------------------------------------------


def ordinal_of(device: Any) -> int:
    """The index of a torch device, of a string that names one, or an index itself; None is the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else _torch().device(device).index
    return current_ordinal() if index is None else int(index)


def current_ordinal() -> int:
    """The index of the device on which torch queues now."""
    return int(_torch().cuda.current_device())


def uuid_of(ordinal: int) -> str:
    """The device's UUID as torch writes it."""
    return str(_torch().cuda.get_device_properties(ordinal).uuid)


def device_count() -> int:
    """Devices that this process sees."""
    return int(_torch().cuda.device_count())


def ordinal_of_uuid(uuid: str) -> int:
    """The index here of the device that another process named.

    Raises:
        DeviceError: This process does not see it, or sees several of that name.
    """
    seen = [uuid_of(ordinal) for ordinal in range(device_count())]
    if seen.count(uuid) != 1:
        raise DeviceError(
            f"device {uuid}: this process sees {', '.join(seen) or 'none'}; let both processes see the same "
            "devices (CUDA_VISIBLE_DEVICES, or the container's --gpus)"
        )
    return seen.index(uuid)


# --- streams -----------------------------------------------------------------------------------------------


def current_stream(device: Any = None) -> tuple[int, int]:
    """Index of the device, and the handle of the stream on which torch queues there now."""
    ordinal = ordinal_of(device)
    return ordinal, int(_torch().cuda.current_stream(ordinal).cuda_stream)


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream: torch's, cupy's, or the handle itself.

    Raises:
        TypeError: It is none of them.
    """
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    if isinstance(stream, int):
        return stream
    raise TypeError(f"{stream!r} is no stream: expected one of torch.cuda, or a handle")


def stream_ordinal(stream: Any) -> int:
    """The index of the device that a stream is of; of a bare handle, which does not tell, the current one."""
    index = getattr(stream, "device_index", None)
    return index if isinstance(index, int) else current_ordinal()


def new_stream(ordinal: int, high_priority: bool = False) -> Any:
    """A stream of torch's pool."""
    cuda = _torch().cuda
    with cuda.device(ordinal):
        return cuda.Stream(priority=-1 if high_priority else 0)


# --- memory ------------------------------------------------------------------------------------------------


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor lies in a GPU's memory."""
    return bool(tensor.device.type == DEVICE_TYPE)


def is_pinned(tensor: Any) -> bool:
    """Whether a GPU can read a host tensor where it is."""
    return bool(tensor.is_pinned())


class _Memory:
    """Device memory as torch takes it without a copy; torch keeps the object as long as the tensor."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, ptr: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,  # whoever uses it has ordered its work already
        }


def bytes_at(ptr: int, nbytes: int, ordinal: int, owner: Any = None) -> Any:
    """Device memory as a tensor of bytes, never a copy; ``owner`` lives as long as any tensor on it."""
    torch = _torch()
    device = torch.device(DEVICE_TYPE, ordinal)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    try:
        made = torch.as_tensor(_Memory(ptr, nbytes, owner), device=device)
    except (RuntimeError, TypeError) as exc:
        text = " ".join(str(exc).split())
        raise DeviceError(f"{nbytes} bytes at {ptr:#x}: torch does not take them: {text}") from exc
    if made.data_ptr() != ptr or made.device != device:
        raise DeviceError(
            f"{nbytes} bytes at {ptr:#x}: torch sees them on {made.device}, or copies them: expected {device}"
        )
    return made


def ids_for_upload(values: Any) -> Any:
    """Integers in page-locked memory: an upload then waits for nothing, and torch keeps them until it is done."""
    torch = _torch()
    return torch.tensor(values, dtype=torch.int64, pin_memory=True)


def upload(values: list[int], ordinal: int) -> Any:
    """Integers as an int64 tensor on the device, queued on the current stream."""
    return ids_for_upload(values).to(_torch().device(DEVICE_TYPE, ordinal), non_blocking=True)


def staged(tensor: Any, ordinal: int) -> Any:
    """A contiguous copy of a tensor on the device, queued on the current stream."""
    return tensor.to(_torch().device(DEVICE_TYPE, ordinal)).contiguous()


# --- torch's own way of sharing memory ---------------------------------------------------------------------


def storage_to_torch(tensor: Any) -> tuple[Any, ...]:
    """torch's handle of a tensor's storage; see ``storage_from_torch``. Each must be opened once at most.

    Returns:
        Handle, bytes of the storage, its offset in the allocation, name and offset of the reference counter,
        handle of an event, and whether to wait for that.
    """
    return tuple(tensor.untyped_storage()._share_cuda_()[1:])


def storage_from_torch(ordinal: int, handle: tuple[Any, ...]) -> Any:
    """All bytes of the storage that another process shared, as a tensor. It ends with the last tensor on it."""
    torch = _torch()
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    share, nbytes, offset, counter, counter_offset, event, wait = handle
    return reductions.rebuild_cuda_tensor(
        torch.Tensor, (nbytes,), (1,), 0, torch.UntypedStorage, torch.uint8, ordinal, share, nbytes, offset, False,
        counter, counter_offset, event, wait,
    )  # fmt: skip
