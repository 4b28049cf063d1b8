"""The device host of this process: one object behind every question about devices.

Importing this module looks at nothing. Discovery and choice run on first use, once, under a lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmcache.errors import ConfigError, DeviceError
from lmcache.v1.platform._admission import DiscoveryRunning
from lmcache.v1.platform._records import PluginRecord, describe
from lmcache.v1.platform._registry import Registry, discover
from lmcache.v1.platform._selection import Selection, import_torch, select, spec_for_type, spec_named
from lmcache.v1.platform.base.binding import NativeAbiError
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.event_ipc import EventIPCBackend

__all__ = [
    "device_records",
    "get_device_spec",
    "get_event_ipc_backend",
    "registry",
    "reset",
    "resolve_device_ops",
    "resolve_kv_wrapper_factory",
    "resolve_wrapper_cls",
    "selected",
    "synchronize_current_stream",
    "synchronize_device",
]

#: For how long a thread waits for another that looks for devices, which may import torch and every plugin.
_PATIENCE_SECONDS = 300.0


class _Host:
    """Registry and choice of one process. The lock makes racing threads agree on both."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False
        self._registry: Registry | None = None
        self._selection: Selection | None = None

    def after_fork(self) -> None:
        """Begin anew in a forked process if the thread that was at it is not there to end it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock, self._busy = threading.RLock(), False
            self._registry = self._selection = None

    @contextmanager
    def registry(self) -> Iterator[Registry]:
        """The registry, for the time in which code of plugins may run for it.

        A plugin that asks about devices meanwhile would have to be answered by what it is delaying.
        """
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            # Most likely a plugin waits for this thread while it is imported or probed.
            raise DiscoveryRunning(
                f"another thread has looked for devices for {_PATIENCE_SECONDS:g} s and is not done; "
                "lmcache device doctor says which plugin hangs"
            )
        try:
            if self._busy:
                raise DiscoveryRunning(
                    "a plugin asked lmcache which device is used while that is being decided"
                )
            self._busy = True
            try:
                if self._registry is None:
                    self._registry = discover()
                yield self._registry
            finally:
                self._busy = False
        finally:
            self._lock.release()

    def selection(self) -> Selection:
        # A failed choice is not kept: the next access says the same again, or finds the fault mended.
        # Read without the lock first: it is asked for on the way to every device operation.
        if self._selection is None:
            with self.registry() as found:
                if self._selection is None:
                    self._selection = select(found)
        return self._selection

    def reset(self) -> None:
        with self._lock:
            self._registry = self._selection = None


_HOST = _Host()
os.register_at_fork(after_in_child=_HOST.after_fork)


def registry() -> Registry:
    """The backends of this process, every plugin imported and checked."""
    with _HOST.registry() as found:
        found.load()
        return found


def device_records() -> list[PluginRecord]:
    """What is known about every candidate so far. Imports no plugin that was not needed yet."""
    with _HOST.registry() as found:
        return found.records


def selected() -> Selection:
    """The backend this process uses, chosen on the first call.

    Raises:
        DeviceError: What LMCACHE_DEVICE_BACKEND or DEVICE_TYPE asks for cannot be delivered, or more than
            one backend of a device type is available and neither variable decides.
    """
    return _HOST.selection()


def reset() -> None:
    """Forget registry and choice; for tests and notebooks, which change what is installed under a process."""
    _HOST.reset()


def _detect_device() -> tuple[Any, str]:
    """``(torch_dev, torch_device_type)``; see ``lmcache``."""
    selection = selected()
    return selection.torch_dev, selection.device_type


def _spec_of(device_type: str) -> DeviceSpec:
    with _HOST.registry() as found:
        return spec_for_type(found, device_type)


def get_device_spec(device_type: str) -> DeviceSpec | None:
    """The spec that serves ``device_type``, or None if there is none or no single one."""
    try:
        return _spec_of(device_type)
    except DiscoveryRunning:
        raise
    except DeviceError:
        return None


def resolve_device_ops(device_type: str | None = None) -> DeviceOps:
    """The ops for ``device_type``, or of the selected backend.

    Raises:
        DeviceError: torch is absent, nothing (or no single backend) serves the type, or the backend's
            native code does not load; then with the loader's own text.
    """
    if import_torch() is None:
        raise DeviceError("device ops need torch, which cannot be imported here: pip install lmcache[cpu]")
    spec = _spec_of(device_type) if device_type else selected().spec
    ops: DeviceOps = _call(spec, "its ops cannot be made", spec.get_ops)
    return ops


def resolve_kv_wrapper_factory(device_type: str) -> Callable[[Any], Any]:
    """What exports a KV tensor of ``device_type`` to another process: ``factory(tensor)``.

    Raises:
        ConfigError: (a ValueError) Nothing serves the type, or its backend has no IPC wrapper.
        DeviceError: The backend's wrapper cannot be imported.
    """
    spec = get_device_spec(device_type)
    cls = None if spec is None else _call(spec, "ipc_wrapper_cls", lambda: spec.ipc_wrapper_cls)
    if cls is None:
        raise ConfigError(
            f"device type {device_type!r}: no KV-cache wrapper factory is registered, and lmcache_driven "
            "needs one; use engine_driven"
        )
    factory: Callable[[Any], Any] = getattr(cls, "wrap", cls)
    return factory


def resolve_wrapper_cls(backend: str) -> type[Any]:
    """The IPC wrapper class of the backend that a descriptor names, from this process's own backends.

    Raises:
        DeviceError: No backend of that name can be used here, or it has no wrapper.
    """
    with _HOST.registry() as found:
        spec = spec_named(found, backend)
    cls: type[Any] | None = _call(spec, "ipc_wrapper_cls", lambda: spec.ipc_wrapper_cls)
    if cls is None:
        raise DeviceError(f"device backend {backend!r}: it has no IPC wrapper; use engine_driven")
    return cls


def get_event_ipc_backend(device: Any) -> EventIPCBackend:
    """The event backend of a device (a torch device, ``"type:index"``, or an index of the selected backend).

    Raises:
        DeviceError: Nothing serves the device's type, or its backend cannot share events.
    """
    spec = _spec_at(device)
    backend: EventIPCBackend | None = _call(spec, "event_ipc_backend", lambda: spec.event_ipc_backend)
    if backend is None:
        raise DeviceError(
            f"device backend {spec.backend_name}: it has no event IPC backend; use engine_driven"
        )
    return backend


def synchronize_device(device: Any = None) -> None:
    """Block until all work on ``device`` (a torch device, ``"type:index"``, an index, or None) is done.

    Raises:
        DeviceError: Nothing (or no single backend) serves the device's type.
    """
    _spec_at(device).synchronize_device(device)


def synchronize_current_stream(device: Any = None) -> None:
    """Block until what is queued on the current stream of ``device`` (as of :func:`synchronize_device`) is done.

    Raises:
        DeviceError: Nothing (or no single backend) serves the device's type.
    """
    _spec_at(device).synchronize_current_stream(device)


def _spec_at(device: Any) -> DeviceSpec:
    if device is None or isinstance(device, int):
        return selected().spec
    return _spec_of(getattr(device, "type", None) or str(device).partition(":")[0])


def _call(spec: DeviceSpec, what: str, call: Callable[[], Any]) -> Any:
    """Run vendor code that is needed now. Its failure is fatal to the request, recorded, and says why."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        record = next((r for r in _known_records() if r.spec is spec), None)
        cause = str(exc) if isinstance(exc, DeviceError) else describe(exc)
        text = f"device backend {spec.backend_name}"
        if record is not None:
            if isinstance(exc, NativeAbiError):
                older = "lmcache" if exc.core_is_older else record.distribution
                record.annotate("native-abi", f"{what}: {cause}", exc, older=older)
            else:
                record.annotate("native-failed", f"{what}: {cause}", exc)
            text = f"{text} ({record.source}): {what}: {cause}; {record.remedy}"
        else:
            text = f"{text}: {what}: {cause}"
        raise DeviceError(text) from exc


def _known_records() -> list[PluginRecord]:
    found = _HOST._registry
    return found.records if found is not None else []
