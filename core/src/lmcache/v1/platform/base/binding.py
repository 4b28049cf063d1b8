"""What a native module brings to a backend's ops, and a report of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from lmcache.errors import DeviceError
from lmcache.v1.platform.base.op_contract import (
    CONTRACT_OPS,
    CONTRACT_TYPES,
    NATIVE_ABI,
    NATIVE_ABI_NAME,
    NATIVE_FORMATS_NAME,
    NATIVE_OPERANDS_NAME,
    OPERAND_KINDS,
    STREAM_ORDERED_OPS,
    OperandKind,
    is_stream_ordered,
    signature_fault,
)

__all__ = ["Binding", "BindingReport", "examine"]

V = TypeVar("V")


@dataclass(frozen=True)
class BindingReport:
    """Who answers each op of a backend. Every op of the contract is in exactly one of the first four."""

    bound: tuple[str, ...] = ()
    """Served by a native module."""
    overridden: tuple[str, ...] = ()
    """Served by a method of the backend's own class."""
    baseline: tuple[str, ...] = ()
    """Served by the torch baseline."""
    absent: tuple[str, ...] = ()
    """Served by nobody; ``hasattr`` is False."""
    types: tuple[str, ...] = ()
    """Types of a native module that replace ours."""
    refused: dict[str, str] = field(default_factory=dict)
    """Names (ops, types, declared tables) that were offered and not taken, and why."""
    extras: tuple[str, ...] = ()
    """Public names of native modules that the contract does not know; they are not bound."""
    modules: tuple[str, ...] = ()
    """Native modules that were bound."""
    abi: int | None = None
    """The native ABI that the last of them declares; None if it declares none."""

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        counts = (("native", self.bound), ("own", self.overridden), ("baseline", self.baseline))
        text = ", ".join(f"{len(names)} {kind}" for kind, names in counts if names) or "none"
        return f"{text}; refused: {', '.join(self.refused)}" if self.refused else text


@dataclass
class Binding:
    """What one module offers, sorted into what is taken and what is not."""

    members: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    abi: int | None = None
    formats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ids of the KV formats that an op serves, where the module declares them."""
    operands: dict[str, frozenset[OperandKind]] = field(default_factory=dict)
    """What an op is given, where the module declares it."""


def examine(module: ModuleType) -> Binding:
    """Sort the public names of a native module by the contract.

    Raises:
        DeviceError: The module declares a native ABI that is not the core's.
    """
    binding = Binding(abi=_abi(module))
    for name, value in _public(module):
        if name in CONTRACT_TYPES and isinstance(value, type):
            binding.members[name] = value
        elif name in CONTRACT_OPS and callable(value) and not isinstance(value, type):
            fault = _fault(name, value)
            if fault:
                binding.refused[name] = fault
            else:
                binding.members[name] = value
        elif name in CONTRACT_TYPES or name in CONTRACT_OPS:
            kind = "a class" if name in CONTRACT_TYPES else "a function"
            binding.refused[name] = f"it is {type(value).__name__}: expected {kind}"
        elif callable(value):
            binding.extras.append(name)
    binding.formats = _declared(module, NATIVE_FORMATS_NAME, _format_ids, binding.refused)
    binding.operands = _declared(module, NATIVE_OPERANDS_NAME, _operand_kinds, binding.refused)
    return binding


def _declared(
    module: ModuleType, name: str, parse: Callable[[Any], V], refused: dict[str, str]
) -> dict[str, V]:
    """A module's table of what its ops do. One that cannot be read is refused whole, and warned about."""
    table = getattr(module, name, None)
    if table is None:
        return {}
    try:
        if not isinstance(table, Mapping):
            raise TypeError(f"it is {type(table).__name__}: expected a dict by name of op")
        return {str(op): parse(value) for op, value in table.items()}
    except (TypeError, ValueError) as exc:
        refused[name] = str(exc)
        return {}


def _format_ids(value: Any) -> tuple[int, ...]:
    """Ids in ascending order, of integers or of native enumerations, which often are none."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r}: expected ids of KV formats")
    return tuple(sorted({int(i) for i in value}))


def _operand_kinds(value: Any) -> frozenset[OperandKind]:
    kinds = frozenset([value] if isinstance(value, str) else value)
    if not kinds <= {*OPERAND_KINDS}:
        raise ValueError(f"{value!r}: expected of {', '.join(OPERAND_KINDS)}")
    return kinds


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name in dir(module):
        value = None if name.startswith("_") else getattr(module, name, None)
        if value is not None:
            yield name, value


class NativeAbiError(DeviceError):
    """A native module and the core were built for different native ABIs."""

    def __init__(self, text: str, core_is_older: bool) -> None:
        super().__init__(text)
        self.core_is_older = core_is_older


def _abi(module: ModuleType) -> int | None:
    declared = getattr(module, NATIVE_ABI_NAME, None)
    if declared is None:
        return None
    if declared != NATIVE_ABI:
        core_is_older = isinstance(declared, int) and declared > NATIVE_ABI
        what = "lmcache" if core_is_older else module.__name__.partition(".")[0]
        raise NativeAbiError(
            f"{module.__name__}: it is built for native ABI {declared!r}, and this lmcache has native ABI "
            f"{NATIVE_ABI}; install a newer {what}",
            core_is_older,
        )
    return int(declared)


def _fault(name: str, value: Any) -> str:
    if name in STREAM_ORDERED_OPS and not is_stream_ordered(value, default=True):
        return "it says that it is not stream-ordered, and callers rely on that"
    return signature_fault(name, value)
