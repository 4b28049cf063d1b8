"""Exporting an engine's KV tensors, and importing what another process exported: all of them or none.

The descriptors are of :mod:`lmcache.v1.platform.base.ipc_wire`. A worker exports, sends the bytes, and keeps
the result as long as the server may open them; a server imports, which opens nothing, and then maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmcache.errors import DeviceError, LMCacheError
from lmcache.logging import init_logger
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.ipc_wire import TensorMeta, WireDescriptor, decode, encode

__all__ = ["ExportedCaches", "ImportedCaches", "export_kv_caches", "import_kv_caches"]

logger = init_logger(__name__)


class ExportedCaches(list[bytes]):
    """Encoded descriptors, one per layer, with the wrappers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.wrappers: list[Any] = []

    def close(self) -> None:
        """Close every wrapper. May be called more than once."""
        _close(self.wrappers)


class ImportedCaches(list[Any]):
    """Wrappers, one per layer, with the descriptors they came in."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptors: list[WireDescriptor] = []

    def map(self) -> list[Any]:
        """The tensors (where a layer is several planes: a sequence of them), as views on the exporter's memory.

        Raises:
            DeviceError: A wrapper gave something else than its descriptor says. Like anything a wrapper
                raises, this closes all of them.
        """
        try:
            tensors = [
                _vendor(descriptor.backend, "to_tensor()", wrapper.to_tensor)
                for wrapper, descriptor in zip(self, self.descriptors, strict=True)
            ]
            for index, (tensor, descriptor) in enumerate(zip(tensors, self.descriptors, strict=True)):
                _check_mapped(index, tensor, descriptor)
        except BaseException:
            self.close()
            raise
        return tensors

    def close(self) -> None:
        """Close every wrapper. May be called more than once."""
        _close(self)


def export_kv_caches(kv_caches: Iterable[Any]) -> ExportedCaches:
    """Export the KV tensors of an engine, all on devices of one type.

    Args:
        kv_caches: One tensor per layer, or a list or tuple of them where a layer is several planes. Several
            may lie in one storage.

    Returns:
        Encoded descriptors in the same order.

    Raises:
        ValueError: Nothing to export, mixed device types, no wrapper for the type, or what the wrapper refuses.
        DeviceError: The backend's wrapper does not work. Whatever is raised, nothing stays exported.
    """
    layers = list(kv_caches)
    types = {plane.device.type for layer in layers for plane in _planes(layer)}
    if len(types) != 1:
        raise ValueError(f"KV tensors of device types {sorted(types)}: expected tensors of one type")
    (device_type,) = types
    wrap = _device_detect.resolve_kv_wrapper_factory(device_type)
    spec = _device_detect.get_device_spec(device_type)
    assert spec is not None  # noqa: S101 -- or there were no factory
    exported = ExportedCaches()
    try:
        for layer in layers:
            wrapper = _vendor(spec.backend_name, "wrap()", wrap, layer)
            exported.wrappers.append(wrapper)
            exported.append(encode(_described(spec, layer, wrapper)))
    except BaseException:
        exported.close()
        raise
    return exported


def import_kv_caches(encoded: Sequence[bytes], exporter: int | None = None) -> ImportedCaches:
    """The wrappers for descriptors that another process sent. Opens nothing: :meth:`ImportedCaches.map` does.

    Args:
        encoded: The descriptors.
        exporter: The pid of the process that sent them, if that is known from somebody else than itself.

    Raises:
        ValueError: A descriptor is malformed, its backend's wrapper refuses it, or it names memory of another
            process than ``exporter``.
        DeviceError: A backend is unknown here, cannot be used, has no wrapper, or speaks another version.
            Whatever is raised, every wrapper made so far is closed.
    """
    imported = ImportedCaches()
    imported.descriptors = [decode(data) for data in encoded]
    versions = {(d.backend, d.wire_version) for d in imported.descriptors}
    classes = {backend: _wrapper_cls(backend, version) for backend, version in sorted(versions)}
    try:
        for index, descriptor in enumerate(imported.descriptors):
            cls = classes[descriptor.backend]
            wrapper = _vendor(descriptor.backend, "from_wire()", cls.from_wire, descriptor.payload)
            imported.append(wrapper)
            declared = getattr(wrapper, "planes", ())
            if _are_metas(declared) and tuple(declared) != descriptor.tensors:
                raise ValueError(f"KV layer {index}: the payload describes other tensors than the descriptor")
            _check_exporter(index, wrapper, exporter)
    except BaseException:
        imported.close()
        raise
    return imported


def _check_exporter(index: int, wrapper: Any, exporter: int | None) -> None:
    """What a process may open, it opens for itself alone: not for whoever writes down a pid and a descriptor."""
    named: frozenset[int] = getattr(wrapper, "exporter_pids", frozenset())
    if exporter is not None and not named <= {exporter}:
        raise ValueError(
            f"KV layer {index}: the descriptor names memory of process {min(named - {exporter})}, and process"
            f" {exporter} sent it; expected its own"
        )


def _planes(layer: Any) -> tuple[Any, ...]:
    return tuple(layer) if isinstance(layer, (list, tuple)) else (layer,)


def _vendor(backend: str, what: str, call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``; what it raises beside the errors of the contract becomes one of them."""
    try:
        return call(*args)
    except (LMCacheError, ValueError):
        raise
    except Exception as exc:
        cause = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise DeviceError(f"device backend {backend!r}: {what} of its IPC wrapper failed: {cause}") from exc


def _are_metas(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, TensorMeta) for v in value)


def _described(spec: DeviceSpec, layer: Any, wrapper: Any) -> WireDescriptor:
    to_wire = getattr(wrapper, "to_wire", None)
    if not callable(to_wire):
        raise DeviceError(
            f"device backend {spec.backend_name}: its wrapper made a {type(wrapper).__name__}, which has no to_wire()"
        )
    tensors = tuple(TensorMeta.of(plane, _device_id(spec, plane)) for plane in _planes(layer))
    return WireDescriptor(spec.backend_name, int(wrapper.wire_version), tensors, dict(to_wire()))


def _device_id(spec: DeviceSpec, tensor: Any) -> int | str:
    """The UUID of a tensor's device where its module tells one; indices differ between processes."""
    index = tensor.device.index or 0
    properties = getattr(spec._get_torch_module(), "get_device_properties", None)
    uuid = getattr(properties(index), "uuid", None) if properties and spec.device_type != "cpu" else None
    return index if uuid is None else str(uuid)


def _wrapper_cls(backend: str, version: int) -> Any:
    cls = _device_detect.resolve_wrapper_cls(backend)
    if not callable(getattr(cls, "from_wire", None)):
        raise DeviceError(f"device backend {backend!r}: {cls.__name__} has no from_wire(); use engine_driven")
    if cls.wire_version != version:
        raise DeviceError(
            f"device backend {backend!r}: the exporter speaks wire version {version}, this process "
            f"{cls.wire_version}; install the same release of the backend on both sides"
        )
    return cls


def _check_mapped(index: int, mapped: Any, descriptor: WireDescriptor) -> None:
    planes = _planes(mapped)
    fits = len(planes) == len(descriptor.tensors) and all(
        meta.matches(plane) for meta, plane in zip(descriptor.tensors, planes, strict=True)
    )
    for meta, plane in zip(descriptor.tensors, planes, strict=False):
        _check_device(index, descriptor.backend, meta, plane)
    if not fits:
        found = ", ".join(f"{p.dtype}{list(p.shape)} stride {list(p.stride())}" for p in planes)
        raise DeviceError(
            f"KV layer {index}: the wrapper of backend {descriptor.backend!r} mapped {found}; expected "
            f"{', '.join(f'{m.dtype}{list(m.shape)} stride {list(m.stride)}' for m in descriptor.tensors)}"
        )


def _check_device(index: int, backend: str, meta: TensorMeta, plane: Any) -> None:
    """A stream of another device would not wait for what is queued there. Indices alone tell nothing."""
    spec = _device_detect.get_device_spec(plane.device.type)
    if isinstance(meta.device, str) and spec is not None and _device_id(spec, plane) != meta.device:
        raise DeviceError(
            f"KV layer {index}: the wrapper of backend {backend!r} mapped it on {plane.device}, which is not device"
            f" {meta.device} that it lies on"
        )


def _close(wrappers: Sequence[Any]) -> None:
    for wrapper in wrappers:
        try:
            getattr(wrapper, "close", int)()
        except Exception as exc:  # one that cannot be closed must not keep the others open
            logger.warning("closing %s failed: %s: %s", type(wrapper).__name__, type(exc).__name__, exc)
