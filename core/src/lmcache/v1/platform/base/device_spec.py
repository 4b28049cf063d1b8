"""The one seam between the core and a device: what a backend is, and what it can do.

A plugin subclasses ``DeviceSpec``, overrides what its device has, and names the class in the entry-point
group ``lmcache.device_plugins``. Everything heavy (ops, wrappers, contexts) stays behind properties, so
constructing a spec imports nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.errors import ConfigError, DeviceError, bad_value
from lmcache.logging import init_logger

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps

__all__ = ["PLUGIN_API", "DeviceSpec", "MPTransferMode"]

logger = init_logger(__name__)

#: Version of this contract. A major step breaks plugins; a minor step adds members with a base answer.
PLUGIN_API = (1, 1)

_OPS_LOCK = threading.RLock()
_COMPLETION = "record_completion_on_stream"


class MPTransferMode(str, Enum):
    """Who moves the bytes in multiprocess mode."""

    AUTO = "auto"
    ENGINE_DRIVEN = "engine_driven"
    LMCACHE_DRIVEN = "lmcache_driven"

    @classmethod
    def parse(cls, value: str | MPTransferMode, source: str = "LMCACHE_MP_TRANSFER_MODE") -> MPTransferMode:
        """Turn a setting into a mode; case and surrounding blanks do not matter.

        Args:
            value: A mode or its name.
            source: The flag, variable or key that ``value`` came from, for the message.

        Raises:
            ConfigError: Not one of the modes.
        """
        try:
            return cls(str(getattr(value, "value", value)).strip().lower())
        except ValueError:
            valid = ", ".join(mode.value for mode in cls)
            raise ConfigError(bad_value(source, value, f"one of {valid}")) from None


class DeviceSpec:
    """What the core asks of a device backend. ``DeviceSpec()`` itself is "no device".

    Constructed once per process, without arguments. Subclasses need not call ``super().__init__()``.
    """

    #: The contract a plugin is written for. One that sets it, ``plugin_api = (1, 0)``, is refused by a core
    #: of another major version or a lower minor one; one that does not set it runs on any core.
    plugin_api: ClassVar[tuple[int, int]] = PLUGIN_API

    _ops_cache: DeviceOps | None = None
    _pin_cache: Any = None

    # --- identity ------------------------------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """``torch.device.type``, lowercase; several backends may share one."""
        return ""

    @property
    def backend_name(self) -> str:
        """Unique lowercase selector: the entry-point name and the value of LMCACHE_DEVICE_BACKEND."""
        return self.device_type

    @property
    def torch_module_name(self) -> str:
        """The attribute of ``torch`` that holds this device's module."""
        return ""

    def is_available(self) -> bool:
        """Whether the device can be used on this host now. Must not raise; must not import ``lmcache``."""
        return False

    def unavailable_reason(self) -> str:
        """Why :meth:`is_available` has just said False, in one line with what to do; empty if not known.

        ``lmcache device list`` and ``explain`` show it. Asked only then, so it may look closer than the other.
        """
        return ""

    # --- ops -----------------------------------------------------------------------------------------------

    @property
    def ops_cls(self) -> type[DeviceOps]:
        """The DeviceOps subclass; the base answer is the torch baseline."""
        from lmcache.v1.platform.base.device_ops import DeviceOps

        return DeviceOps

    def get_ops(self) -> DeviceOps:
        """The ops of this device, made and bound to native code on the first call.

        Raises whatever ``ensure_native`` raises; nothing is cached then, so a later call tries again.
        """
        if self._ops_cache is not None:
            return self._ops_cache
        with _OPS_LOCK:
            if self._ops_cache is None:
                ops = self.ops_cls()
                ops.ensure_native()
                self._ops_cache = ops
            return self._ops_cache

    # --- transfer modes ------------------------------------------------------------------------------------

    @property
    def ipc_wrapper_cls(self) -> type[Any] | None:
        """Class whose ``wrap(tensor)`` exports device memory to another process, or None."""
        return None

    @property
    def event_ipc_backend(self) -> Any:
        """The EventIPCBackend of this device, or None. Subclasses cache what they return."""
        return None

    def create_cache_context(self, *args: Any, **kwargs: Any) -> Any:
        """Build the cache context that maps a worker's KV tensors into this process.

        Raises:
            NotImplementedError: This device has none.
        """
        raise NotImplementedError(f"device {self.device_type!r} ({type(self).__name__}) has no cache context")

    def missing_for_lmcache_driven(self) -> tuple[str, ...]:
        """What lmcache-driven mode needs and this spec lacks; empty means the mode can be offered.

        Names of members, and ``record_completion_on_stream`` where the ops have no stream-ordered one. Makes the
        ops, as any use of the device does.
        """
        missing = [name for name in ("ipc_wrapper_cls", "event_ipc_backend") if not self._has(name)]
        if not _overrides(self, "create_cache_context"):
            missing.append("create_cache_context")
        if not self._ops_have(_COMPLETION):
            missing.append(_COMPLETION)
        return tuple(missing)

    # Two releases of the guide spell this predicate differently. A plugin overrides one of them, a caller
    # asks either: the base method of one spelling defers to the other where only that one is overridden.

    def is_lmcache_driven_available(self) -> bool:
        """Whether another process may drive transfers on this device through exported handles."""
        if _overrides(self, "is_handle_transfer_available") and not _overrides(
            self, "is_lmcache_driven_available"
        ):
            return bool(self.is_handle_transfer_available())
        return not self.missing_for_lmcache_driven()

    def is_handle_transfer_available(self) -> bool:
        """The other spelling of :meth:`is_lmcache_driven_available`."""
        if _overrides(self, "is_lmcache_driven_available") and not _overrides(
            self, "is_handle_transfer_available"
        ):
            return bool(self.is_lmcache_driven_available())
        return not self.missing_for_lmcache_driven()

    def default_mp_transfer_mode(self) -> MPTransferMode:
        """What AUTO means here: never AUTO, and lmcache-driven only if nothing it needs is missing."""
        if self.is_lmcache_driven_available() and not self.missing_for_lmcache_driven():
            return MPTransferMode.LMCACHE_DRIVEN
        return MPTransferMode.ENGINE_DRIVEN

    # --- connectors of in-process engines ------------------------------------------------------------------

    def create_gpu_connector(
        self, config: Any, metadata: Any, engine: Any, layout_hints: Any = None
    ) -> Any | None:
        """A connector of the vendor's own for an engine that runs LMCache inside its process.

        None, the base answer, leaves it to the core, whose connectors work on the layout table and this spec's
        ops; a device needs one of its own only where it moves pages by other means.

        Args:
            config: The engine's LMCache configuration.
            metadata: Model, ranks, dtype and shapes of the engine's cache.
            engine: The ``EngineType``.
            layout_hints: What the engine declares of its layout, or None.

        Raises:
            ConfigError: The configuration asks for what this device's connector does not do.
        """
        return None

    @property
    def page_mover(
        self,
    ) -> Callable[[Sequence[Any], Sequence[int], Sequence[Sequence[int]], bool], None] | None:
        """The vendor's own way to move pages in engine-driven mode, or None: torch copies, run by run.

        Called with the pages of each layer, ``[blocks, elements]`` on the device, block ids, per layer one address
        of host memory per id, and whether the pages are read. A page is moved as it is, byte by byte; all are in
        place on return. Where an id of pages that are written occurs twice, the last address wins.
        """
        return None

    # --- host memory pinning -------------------------------------------------------------------------------

    @property
    def pin_memory_backend(self) -> type[Any] | None:
        """PinMemoryBackend subclass, or None. Pinning only speeds staging up."""
        return None

    @property
    def is_pin_supported(self) -> bool:
        """Whether :meth:`pin_memory` can succeed."""
        backend = self._pin_backend()
        return backend is not None and bool(backend.is_pin_supported)

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        """Page-lock ``size`` bytes at host address ``ptr``; False if that was not done. Never raises."""
        backend = self._pin_backend()
        return backend is not None and _quietly(lambda: backend.pin_memory(ptr, size, flags))

    def unpin_memory(self, ptr: int) -> bool:
        """Undo :meth:`pin_memory`; False if that was not done. Never raises."""
        backend = self._pin_backend()
        return backend is not None and _quietly(lambda: backend.unpin_memory(ptr))

    # --- streams and events (CUDA-style torch modules; other devices override) -----------------------------

    def current_stream(self, device: Any = None) -> Any:
        """The stream that work on ``device`` is queued on now."""
        return self._get_torch_module().current_stream(device)

    def get_stream_handle(self, stream: Any) -> int:
        """The native handle of ``stream`` as an integer.

        Raises:
            NotImplementedError: This device has none to give.
        """
        raise NotImplementedError(f"device {self.device_type!r} ({type(self).__name__}) has no stream handle")

    def synchronize_stream(self, stream: Any) -> None:
        """Block until the work queued on ``stream`` is done."""
        stream.synchronize()

    def synchronize_device(self, device: Any = None) -> None:
        """Block until all work on ``device`` is done; None is the current device."""
        synchronize = self._get_torch_module().synchronize
        # The guide asks of a device module no more than ``synchronize()``; such a one knows one device.
        if device is None or not _takes_argument(synchronize):
            synchronize()
        else:
            synchronize(device)

    def synchronize_current_stream(self, device: Any = None) -> None:
        """Block until what is queued on the current stream of ``device`` is done; None is the current device.

        The base answer waits for the whole device, which is right wherever that is. A device with streams
        overrides it, so that one transfer does not wait for the engine's other work.
        """
        self.synchronize_device(device)

    def create_stream_event(self, device: Any = None) -> Any:
        """A completion event for use inside this process."""
        return self._get_torch_module().Event()

    def record_stream_event(self, event: Any, stream: Any) -> None:
        """Mark the present end of ``stream`` with ``event``."""
        event.record(stream)

    def is_stream_event_complete(self, event: Any) -> bool:
        """Whether the work before ``event`` is done; does not block."""
        return bool(event.query())

    # --- helpers -------------------------------------------------------------------------------------------

    def _get_torch_module(self) -> Any:
        """The module ``torch.<torch_module_name>``.

        Raises:
            DeviceError: torch cannot be imported or has no such module.
        """
        name = self.torch_module_name
        try:
            import torch
        except ImportError as exc:
            raise DeviceError(f"backend {self.backend_name!r} needs torch: {exc}") from exc
        module = getattr(torch, name, None) if name else None
        if module is None:
            raise DeviceError(
                f"backend {self.backend_name!r}: torch {torch.__version__} has no module {name!r}"
            )
        return module

    def _has(self, name: str) -> bool:
        """Whether a lazy property delivers; one that fails to import is as good as absent, and is logged."""
        try:
            return getattr(self, name) is not None
        except Exception as exc:
            logger.warning("%s.%s failed: %s: %s", type(self).__name__, name, type(exc).__name__, exc)
            return False

    def _ops_have(self, op: str) -> bool:
        """Whether there is such an op; ops that cannot be made have none, and that is logged."""
        try:
            return hasattr(self.get_ops(), op)
        except Exception as exc:
            logger.warning("%s.get_ops() failed: %s: %s", type(self).__name__, type(exc).__name__, exc)
            return False

    def _pin_backend(self) -> Any:
        if self._pin_cache is None and self._has("pin_memory_backend"):
            backend = self.pin_memory_backend
            self._pin_cache = backend() if backend is not None else None
        return self._pin_cache


def _overrides(spec: DeviceSpec, name: str) -> bool:
    return getattr(type(spec), name) is not getattr(DeviceSpec, name)


def _takes_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a native function without a signature: the usual form takes one
        return True
    return True


def _quietly(call: Callable[[], object]) -> bool:
    """Pinning is an optimisation: a backend that raises has not pinned, which is all a caller may rely on."""
    try:
        return bool(call())
    except Exception as exc:
        logger.warning("pinning failed: %s: %s", type(exc).__name__, exc)
        return False
