"""A tensor in device memory that another process can map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = ["DeviceIPCWrapper"]


class DeviceIPCWrapper(ABC):
    """Contract for a device's export of KV tensors; a ``DeviceSpec`` names its class by ``ipc_wrapper_cls``.

    The exporting process calls :meth:`wrap` and :meth:`to_wire`; the importing one :meth:`from_wire`, which
    must open nothing, and then :meth:`to_tensor`. Memory that was imported is not exported again.
    """

    device_type: ClassVar[str] = ""
    wire_version: ClassVar[int] = 1

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
