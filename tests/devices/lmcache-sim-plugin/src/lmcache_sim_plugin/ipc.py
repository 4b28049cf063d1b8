"""Device memory as another process maps it: a handle of the allocation, and views on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.ipc_wire import MAX_PLANES, TensorMeta, convert
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper

__all__ = ["SimIPCWrapper"]


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    """Of the allocation that the tensor's storage lies in."""
    start: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Byte of the allocation at which the storage begins."""
    tensor: TensorMeta


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    single: bool
    """One tensor, not a sequence of one."""


class SimIPCWrapper(DeviceIPCWrapper):
    """A tensor of the device, or the planes of a layer.

    The exporter's allocation must live until it is opened. A mapping ends with the last tensor on it, not
    before; it outlives the exporter, and is opened once per process however many tensors lie in it.
    """

    device_type: ClassVar[str] = "sim"
    wire_version: ClassVar[int] = 1

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._views: tuple[Any, ...] = ()
        self._closed = False
        self.planes = tuple(plane.tensor for plane in wire.planes)
        self.exporter_pids = frozenset(torch.sim.ipc_owner(plane.handle) for plane in wire.planes)

    @classmethod
    def wrap(cls, value: Any) -> SimIPCWrapper:
        """Export a tensor of the device, or a list or tuple of them.

        Raises:
            ValueError: Not such tensors, or memory that was itself imported.
        """
        single = not isinstance(value, (list, tuple))
        tensors = [value] if single else list(value)
        if not 0 < len(tensors) <= MAX_PLANES:
            raise ValueError(f"a layer of {len(tensors)} planes: expected 1 to {MAX_PLANES}")
        return cls(Wire(tuple(_exported(tensor) for tensor in tensors), single))

    def to_tensor(self) -> Any:
        """The tensor, or a tuple of the planes.

        Raises:
            DeviceError: The exporter has ended, the memory was freed, or it is not what was described.
            ValueError: The wrapper is closed.
        """
        if self._closed:
            raise ValueError("to_tensor() of a closed wrapper; import the descriptor again")
        if not self._views:
            self._views = tuple(_opened(plane) for plane in self._wire.planes)
        return self._views[0] if self._wire.single else self._views

    def to_wire(self) -> Mapping[str, Any]:
        wire: dict[str, Any] = msgspec.to_builtins(self._wire, builtin_types=(bytes,))
        return wire

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> SimIPCWrapper:
        return cls(convert(data, Wire, "descriptor of sim memory"))

    def close(self) -> None:
        self._closed, self._views = True, ()


def _exported(tensor: Any) -> Plane:
    if getattr(getattr(tensor, "device", None), "type", "") != "sim" or tensor.layout != torch.strided:
        raise ValueError(f"expected a strided tensor of the device sim, got {type(tensor).__name__}")
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} has no memory to export")
    base = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    try:
        handle, start = torch.sim.ipc_export(base)
    except RuntimeError as exc:
        raise ValueError(f"device memory that cannot be exported: {exc}") from exc
    uuid = torch.sim.get_device_properties(tensor.device).uuid
    return Plane(handle, start, TensorMeta.of(tensor, uuid))


def _opened(plane: Plane) -> Any:
    meta = plane.tensor
    dtype = getattr(torch, meta.dtype, None)
    if dtype is None:
        raise DeviceError(f"torch {torch.__version__} has no dtype {meta.dtype!r}; use the exporter's torch")
    try:
        memory = torch.sim.open_tensor(plane.handle)
    except RuntimeError as exc:
        raise DeviceError(f"device memory of another process cannot be opened: {exc}") from exc
    if plane.start + meta.nbytes > memory.numel() or plane.start % dtype.itemsize:
        raise DeviceError(
            f"a storage of {meta.nbytes} bytes at byte {plane.start} of an allocation of {memory.numel()} bytes: "
            "the descriptor does not fit the memory that it names"
        )
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(meta.shape, meta.stride, plane.start // dtype.itemsize + meta.storage_offset)
