"""Device memory as another process maps it: the wrapper, its wire form, and which way of sharing is taken.

Three ways, in ``ipc_ways``: torch's storage handle, the driver's handle of the allocation, and a file descriptor of
the allocation. LMCACHE_CUDA_IPC names one; ``auto`` takes the first that works on the memory at hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from lmcache.errors import ConfigError, DeviceError
from lmcache.v1.platform.base.ipc_wire import MAX_PLANES, TensorMeta, convert
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache_cuda import runtime, settings
from lmcache_cuda.ipc_ways import MAPPED, WAYS, Plane, TorchHandle, VmmHandle, Wire

__all__ = ["CudaIPCWrapper", "ways_to_try"]


class CudaIPCWrapper(DeviceIPCWrapper):
    """A tensor in a GPU's memory, or the planes of a layer.

    The exporter's tensors are held until ``close``, so that their memory is not given to somebody else. A mapping
    ends with the last tensor on it, not before, and is made once per process however many tensors lie in it.
    """

    device_type: ClassVar[str] = "cuda"
    wire_version: ClassVar[int] = 1

    def __init__(self, wire: Wire, exported: tuple[Any, ...] = ()) -> None:
        self._wire = wire
        self._exported = exported
        self._views: tuple[Any, ...] = ()
        self._closed = False
        # Who drops a wrapper without closing it gives its tensors free, and with them what was shared.
        self._withdraw = weakref.finalize(self, _withdraw, wire.planes if exported else ())
        self._withdraw.atexit = False
        self.planes = tuple(plane.tensor for plane in wire.planes)
        self.exporter_pids = frozenset(plane.handle.exporter for plane in wire.planes) - {0}

    @classmethod
    def wrap(cls, value: Any) -> CudaIPCWrapper:
        """Export a tensor in device memory, or a list or tuple of them.

        Raises:
            ConfigError: LMCACHE_CUDA_IPC asks for what the isolated policy excludes.
            ValueError: Not such tensors, or memory that was itself imported.
            DeviceError: No way of sharing works on this memory; it says why of each.
        """
        single = not isinstance(value, (list, tuple))
        tensors = [value] if single else list(value)
        if not 0 < len(tensors) <= MAX_PLANES:
            raise ValueError(f"a layer of {len(tensors)} planes: expected 1 to {MAX_PLANES}")
        planes: list[Plane] = []
        try:
            for tensor in tensors:
                planes.append(_exported(tensor))
        except BaseException:
            _withdraw(planes)
            raise
        return cls(Wire(tuple(planes), single), tuple(tensors))

    def to_tensor(self) -> Any:
        """The tensor, or a tuple of the planes.

        Raises:
            DeviceError: The exporter has ended, the device is not seen here, or the memory is not as described.
            ValueError: The wrapper is closed.
        """
        if self._closed:
            raise ValueError("to_tensor() of a closed wrapper; import the descriptor again")
        if not self._views:
            self._views = self._exported or tuple(_opened(plane) for plane in self._wire.planes)
        return self._views[0] if self._wire.single else self._views

    def to_wire(self) -> Mapping[str, Any]:
        wire: dict[str, Any] = msgspec.to_builtins(self._wire, builtin_types=(bytes,))
        return wire

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> CudaIPCWrapper:
        wire = convert(data, Wire, "descriptor of GPU memory")
        _check_policy(wire)
        made = cls(wire)
        if settings.isolated():
            made.exporter_pids = frozenset()  # numbers of another namespace
        return made

    def close(self) -> None:
        self._withdraw()
        self._closed, self._views, self._exported = True, (), ()


def _check_policy(wire: Wire) -> None:
    """Whether this process's policy lets the descriptor tell what it tells of the exporter, and no less."""
    isolated = settings.isolated()
    for plane in wire.planes:
        if isolated and isinstance(plane.handle, TorchHandle):
            why = "torch's handles are not taken with LMCACHE_CUDA_ISOLATED_IPC=1"
        elif not isolated and isinstance(plane.handle, VmmHandle) and not plane.handle.exporter:
            why = "it does not name its process, as with LMCACHE_CUDA_ISOLATED_IPC=1, and here that is 0"
        else:
            continue
        raise ValueError(f"descriptor of GPU memory: {why}; set the same in both processes")


def ways_to_try() -> tuple[str, ...]:
    """Names of ways of sharing, the first choice first.

    Raises:
        ConfigError: torch's handles are asked for where processes share no /dev/shm.
    """
    wanted, isolated = settings.choice("LMCACHE_CUDA_IPC"), settings.isolated()
    if wanted == "torch" and isolated:
        raise ConfigError(
            "LMCACHE_CUDA_IPC='torch' contradicts LMCACHE_CUDA_ISOLATED_IPC=1: torch's handles need a shared "
            "/dev/shm; use raw or vmm"
        )
    if wanted != "auto":
        return (wanted,)
    return ("raw", "vmm") if isolated else ("torch", "raw", "vmm")


def _exported(tensor: Any) -> Plane:
    import torch

    if not hasattr(tensor, "device") or not runtime.is_on_device(tensor) or tensor.layout != torch.strided:
        what = f"{type(tensor).__name__} on {getattr(tensor, 'device', 'no device')}"
        raise ValueError(f"expected a strided tensor in the memory of a GPU, got {what}")
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} has no memory to export")
    if MAPPED.hold(storage.data_ptr()):
        raise ValueError("memory that was imported from another process cannot be exported again")
    ordinal = runtime.ordinal_of(tensor.device)
    meta = TensorMeta.of(tensor, runtime.uuid_of(ordinal))
    faults = []
    for way in ways_to_try():
        try:
            return Plane(meta, *WAYS[way].export(tensor, ordinal))
        except RuntimeError as exc:
            faults.append(f"{way}: {' '.join(str(exc).split())}")
    raise DeviceError(
        f"memory of {storage.nbytes()} bytes on {tensor.device} cannot be shared: {'; '.join(faults)}; "
        "use engine_driven"
    )


def _withdraw(planes: Any) -> None:
    for plane in planes:
        plane.handle.withdraw()


def _opened(plane: Plane) -> Any:
    import torch

    meta = plane.tensor
    dtype = getattr(torch, meta.dtype, None)
    if dtype is None:
        raise DeviceError(f"torch {torch.__version__} has no dtype {meta.dtype!r}; use the exporter's torch")
    ordinal = runtime.ordinal_of_uuid(str(meta.device))
    storage = plane.handle.open(ordinal, plane.start, meta.nbytes)
    if storage.numel() < meta.nbytes or storage.data_ptr() % dtype.itemsize:
        raise DeviceError(
            f"a storage of {meta.nbytes} bytes: {storage.numel()} are mapped at {storage.data_ptr():#x}: the "
            "descriptor does not fit the memory that it names"
        )
    whole = storage[: meta.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(meta.shape, meta.stride, meta.storage_offset)
