"""Host tensors that another process can map: the storage itself moves into shared memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.ipc_wire import MAX_PLANES, TensorMeta, convert
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache.v1.platform.cpu.shared_file import FileId, SharedFile, create_file, file_at, open_file

__all__ = ["CpuShmTensorWrapper"]

_MIGRATION = threading.Lock()


class _Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: FileId
    tensor: TensorMeta

    def __post_init__(self) -> None:
        if self.tensor.nbytes != self.file.nbytes:
            raise ValueError(f"the storage has {self.tensor.nbytes} bytes, its file {self.file.nbytes}")


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    planes: Annotated[tuple[_Plane, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    single: bool
    """One tensor, not a sequence of one."""


class CpuShmTensorWrapper(DeviceIPCWrapper):
    """A host tensor, or the planes of a layer, in memory that another process on this host can map.

    ``wrap`` moves the whole storage of each tensor into shared memory, in place: every tensor on that storage
    goes on, with the same values, at a new address. Nothing may write to the storage meanwhile, and code that
    kept a raw address must ask again. While it moves, the storage is there twice; afterwards all of it is
    resident. The memory is anonymous and goes with the last process that has it.

    The storage stays shared, and can be opened, for as long as it lives, whatever becomes of the wrapper.

    ``to_tensor`` maps a file once per process, however many wrappers name it. ``close`` gives up this
    wrapper's share; the mapping ends when no open wrapper and no tensor is left on it, so a tensor that is
    kept past ``close`` is not a dangling pointer, but holds the memory. A mapping outlives the exporter.
    """

    device_type: ClassVar[str] = "cpu"

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._files: list[SharedFile] = []
        self._closed = False
        self.planes = tuple(plane.tensor for plane in wire.planes)
        self.exporter_pids = frozenset(plane.file.pid for plane in wire.planes)

    @classmethod
    def wrap(cls, value: Any) -> CpuShmTensorWrapper:
        """Export a host tensor or a non-empty list or tuple of them.

        Raises:
            ValueError: Not such tensors, or memory that was itself imported or is shared by other means.
            DeviceError: The shared memory cannot be had; tensors that moved before it stay moved.
        """
        single = not isinstance(value, (list, tuple))
        tensors = [value] if single else list(value)
        if not 0 < len(tensors) <= MAX_PLANES:
            raise ValueError(f"a layer of {len(tensors)} planes: expected 1 to {MAX_PLANES}")
        metas = [_checked(tensor) for tensor in tensors]
        planes = [
            _Plane(_migrated(t.untyped_storage()).identity(), m) for t, m in zip(tensors, metas, strict=True)
        ]
        return cls(_Wire(tuple(planes), single))

    def to_tensor(self) -> Any:
        """The tensor, or a tuple of the planes.

        Raises:
            DeviceError: The exporter has ended, or the memory is not what was described.
            ValueError: The wrapper is closed.
        """
        if self._closed:
            raise ValueError("to_tensor() of a closed wrapper; import the descriptor again")
        files = [open_file(plane.file) for plane in self._wire.planes]
        views = tuple(_view(f, plane.tensor) for f, plane in zip(files, self._wire.planes, strict=True))
        self._files = files
        return views[0] if self._wire.single else views

    def to_wire(self) -> Mapping[str, Any]:
        wire: dict[str, Any] = msgspec.to_builtins(self._wire)
        return wire

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> CpuShmTensorWrapper:
        return cls(convert(data, _Wire, "descriptor of host memory"))

    def close(self) -> None:
        self._closed = True
        self._files = []


def _checked(tensor: Any) -> TensorMeta:
    """Whether ``tensor`` can be exported; nothing has been touched then."""
    device, layout = getattr(tensor, "device", None), str(getattr(tensor, "layout", ""))
    if getattr(device, "type", "") != "cpu" or layout != "torch.strided":
        raise ValueError(f"expected a strided tensor in host memory, got {type(tensor).__name__} on {device}")
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} has no memory to export")
    file = file_at(storage.data_ptr())
    if file is None and storage.is_shared():
        raise ValueError("the tensor's memory is shared by torch.multiprocessing already; use engine_driven")
    if file is not None and file.fd < 0:
        raise ValueError("memory that was imported from another process cannot be exported again")
    return TensorMeta.of(tensor)


def _migrated(storage: Any) -> SharedFile:
    """The shared file that holds ``storage``, which is moved there unless it is there."""
    import torch

    with _MIGRATION:
        file = file_at(storage.data_ptr())
        if file is not None:
            return file
        if not hasattr(storage, "_swap_data_ptr_"):
            raise DeviceError(
                f"torch {torch.__version__} cannot give a storage other memory; upgrade torch, or use engine_driven"
            )
        file = create_file(storage.nbytes(), "lmcache-kv")
        target = torch.frombuffer(file, dtype=torch.uint8).untyped_storage()
        target.copy_(storage)
        storage._swap_data_ptr_(target)  # the old memory goes with ``target``; the storage holds the mapping
        return file


def _view(file: SharedFile, meta: TensorMeta) -> Any:
    import torch

    dtype = getattr(torch, meta.dtype, None)
    if dtype is None:
        raise DeviceError(f"torch {torch.__version__} has no dtype {meta.dtype!r}; use the exporter's torch")
    flat = torch.frombuffer(file, dtype=torch.uint8)
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(flat.untyped_storage(), meta.storage_offset, meta.shape, meta.stride)
