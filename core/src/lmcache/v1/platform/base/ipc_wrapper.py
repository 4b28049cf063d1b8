"""A tensor in device memory that another process can map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from lmcache.v1.platform.base.ipc_wire import TensorMeta

__all__ = ["DeviceIPCWrapper"]


class DeviceIPCWrapper(ABC):
    """Contract for a device's export of KV tensors; a ``DeviceSpec`` names its class by ``ipc_wrapper_cls``.

    The exporting process calls :meth:`wrap` and :meth:`to_wire`; the importing one :meth:`from_wire`, which
    must open nothing, and then :meth:`to_tensor`. Memory that was imported is not exported again.

    Two wrappers are equal if they are of exactly one class and describe the same. As a context manager a
    wrapper is closed at the end.
    """

    device_type: ClassVar[str] = ""
    wire_version: ClassVar[int] = 1

    planes: tuple[TensorMeta, ...] = ()
    """What :meth:`to_tensor` gives, plane by plane. A wrapper that sets it (``TensorMeta.of`` when it wraps,
    ``ipc_wire.convert`` when it comes from the wire) has it compared with the descriptor it came in."""

    exporter_pids: frozenset[int] = frozenset()
    """The processes in whose tables the memory is looked up, where the descriptor says so. A wrapper that sets it
    is opened only for one of them that sent it itself."""

    @classmethod
    @abstractmethod
    def wrap(cls, value: Any) -> DeviceIPCWrapper:
        """Export a tensor (or, where a layer is several planes, a sequence of them)."""

    @abstractmethod
    def to_tensor(self) -> Any:
        """The tensor, mapped into this process: a view on the exporter's memory, never a copy."""

    @abstractmethod
    def to_wire(self) -> Mapping[str, Any]:
        """The descriptor as primitives: numbers, text, bytes, None, and lists and maps of them."""

    @classmethod
    @abstractmethod
    def from_wire(cls, data: Mapping[str, Any]) -> DeviceIPCWrapper:
        """The wrapper that :meth:`to_wire` described; ``data`` comes from outside and is to be checked.

        Raises:
            ValueError: ``data`` is not such a descriptor.
        """

    def close(self) -> None:
        """Unmap what :meth:`to_tensor` mapped. May be called more than once."""
        return None

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self.to_wire() == other.to_wire())

    def __hash__(self) -> int:
        return hash(type(self))  # a descriptor may hold lists

    def __enter__(self) -> DeviceIPCWrapper:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
