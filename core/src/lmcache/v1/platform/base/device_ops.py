"""Device operations: one strategy object per backend.

The members are declared in four parts (``ops_transfer``, ``ops_memory``, ``ops_codec``, ``ops_stream``) and
answered by the torch baseline, ``lmcache.v1.platform.torch_ops``. A backend replaces an op by overriding the
method, or all that a native module has through ``bind_native``. Ops are plain functions: they sit on the
transfer path.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar

from lmcache.errors import DeviceError
from lmcache.logging import init_logger
from lmcache.v1.platform.base.binding import Binding, BindingReport, examine
from lmcache.v1.platform.base.op_contract import (
    CONTRACT_OPS,
    CONTRACT_TYPES,
    FORMAT_OPS,
    NATIVE_ABI,
    NATIVE_FORMATS_NAME,
    PARTNERS,
    STREAM_ORDERED_OPS,
    OperandKind,
    is_stream_ordered,
)
from lmcache.v1.platform.base.ops_codec import CodecOps
from lmcache.v1.platform.base.ops_memory import MemoryOps
from lmcache.v1.platform.base.ops_stream import StreamOps
from lmcache.v1.platform.base.ops_transfer import TransferOps

__all__ = ["CONTRACT_OPS", "CONTRACT_TYPES", "NATIVE_ABI", "STREAM_ORDERED_OPS", "BindingReport", "DeviceOps"]

logger = init_logger(__name__)

# Looked up by name: this contract stands above the baseline and must not depend on it statically.
_KV_LAYOUT = "lmcache.v1.kv_layout"
_OPS_TYPES = "lmcache.v1.platform.ops_types"
_TORCH_OPS = "lmcache.v1.platform.torch_ops"
_HOST = "cpu"


class DeviceOps(TransferOps, MemoryOps, CodecOps, StreamOps):
    """Operations on a device's memory; this class is the torch baseline.

    An op that a backend lacks raises AttributeError, so ``hasattr(ops, name)`` is the probe for it. Types
    (``PageBufferShapeDesc`` and the like) read through the instance, so a native type replaces ours.
    """

    device_type: ClassVar[str] = ""

    _bindings: tuple[tuple[str, Binding], ...] = ()

    #: Whether all work of this device is done when a call returns, as on the host. Then anything is in order.
    is_synchronous: ClassVar[bool] = False

    def ensure_native(self) -> None:
        """Bind native code if this backend has any. Called once, by ``DeviceSpec.get_ops``.

        Raise if the backend must not run without its native code: the core then says why, with the loader's
        own text. Return without binding (and log why) where the baseline is safe in its place.
        """
        return None

    def bind_native(self, module: ModuleType) -> None:
        """Let the ops and types of ``module`` replace those of this instance.

        Names outside the contract (helpers, imports) are not bound: an accident of a module's namespace
        must not become an op. An op that cannot be called as the contract says is not bound either, and is
        warned about. :meth:`binding_report` has it all.

        Args:
            module: Any importable module whose functions carry the contract's names and signatures. If it has
                an integer ``LMCACHE_NATIVE_ABI``, that must be the core's. ``LMCACHE_OP_FORMATS`` and
                ``LMCACHE_OP_OPERANDS`` say what its ops serve and take.

        Raises:
            DeviceError: The module was built for another native ABI.
        """
        binding = examine(module)
        for name, value in binding.members.items():
            setattr(self, name, value)
        for name, why in binding.refused.items():
            logger.warning("%s.%s is not bound: %s", module.__name__, name, why)
        if binding.extras:
            names = ", ".join(binding.extras)
            logger.debug("%s: not part of the contract, not bound: %s", module.__name__, names)
        self._bindings = (*self._bindings, (module.__name__, binding))

    def binding_report(self) -> BindingReport:
        """Who answers each op, what native modules brought, and what of it was not taken."""
        own = vars(self)
        bound = [name for name in sorted(CONTRACT_OPS) if name in own]
        overridden = [n for n in sorted(CONTRACT_OPS) if n not in own and self._is_replaced(n)]
        rest = [n for n in sorted(CONTRACT_OPS) if n not in bound and n not in overridden]
        bindings = [binding for _, binding in self._bindings]
        return BindingReport(
            bound=tuple(bound),
            overridden=tuple(overridden),
            baseline=tuple(name for name in rest if hasattr(self, name)),
            absent=tuple(name for name in rest if not hasattr(self, name)),
            types=tuple(name for name in sorted(CONTRACT_TYPES) if name in own),
            refused={name: why for binding in bindings for name, why in binding.refused.items()},
            extras=tuple(sorted({name for binding in bindings for name in binding.extras})),
            modules=tuple(name for name, _ in self._bindings),
            abi=bindings[-1].abi if bindings else None,
        )

    def supported_formats(self, op: str) -> tuple[int, ...]:
        """Ids of the KV formats that ``op`` serves here, as whoever answers it declares.

        A native module declares by its table ``LMCACHE_OP_FORMATS``, a method or a function of the baseline by
        the mark ``@serves``. Nothing is guessed: what is not declared is not known.

        Returns:
            Ids in ascending order. Nothing where the op is absent or has no KV format.

        Raises:
            ValueError: ``op`` is no op of the contract.
            DeviceError: Who answers it does not declare what it serves.
        """
        function = self._answering(op)
        if function is None:
            return ()
        module, native = self._native(op)
        if native is not None and op in native.formats:
            return native.formats[op]
        rule = getattr(function, "serves", None)
        if rule is not None:
            rows = importlib.import_module(_KV_LAYOUT).kv_formats()
            return tuple(row.id for row in rows if not rule(row))
        if op not in FORMAT_OPS:
            return ()
        who = module or f"{type(self).__name__}.{op}"
        remedy = f"add it to {NATIVE_FORMATS_NAME}" if module else "mark it with @serves"
        raise DeviceError(f"{op}: {who} does not declare which KV formats it serves; {remedy}")

    def operand_kinds(self, op: str) -> frozenset[OperandKind]:
        """Whether ``op`` is given tensors, addresses, or either, as whoever answers it declares.

        A native module declares by its table ``LMCACHE_OP_OPERANDS``, a method or a function of the baseline
        by the mark ``@takes``. Without that a native function takes pointers, and anything else tensors. Addresses
        of a device's memory are beyond the baseline: what it answers there is given tensors where it can be.

        Returns:
            Of ``"tensors"`` and ``"pointers"``. Nothing where the op is absent or has no operands in memory.

        Raises:
            ValueError: ``op`` is no op of the contract.
        """
        function = self._answering(op)
        if function is None:
            return frozenset()
        _, native = self._native(op)
        if native is not None and op in native.operands:
            return native.operands[op]
        default: frozenset[OperandKind] = frozenset(["tensors" if native is None else "pointers"])
        kinds: frozenset[OperandKind] = getattr(function, "takes", default)
        if "tensors" in kinds and self.device_type != _HOST and not self._is_replaced(op):
            return frozenset(["tensors"])
        return kinds

    def _answering(self, op: str) -> Any:
        """The function that answers ``op``, or None."""
        if op not in CONTRACT_OPS:
            raise ValueError(f"{op!r} is no device operation; see lmcache.v1.platform.base.op_contract.OPS")
        return getattr(self, op, None)

    def _native(self, op: str) -> tuple[str, Binding | None]:
        """The native module that answers ``op``: the last that brought it."""
        for module, binding in reversed(self._bindings):
            if op in binding.members and vars(self).get(op) is binding.members[op]:
                return module, binding
        return "", None

    def _is_replaced(self, name: str) -> bool:
        """Whether something else than the baseline answers."""
        return name in vars(self) or getattr(type(self), name, None) is not getattr(DeviceOps, name, None)

    def __getattr__(self, name: str) -> Any:
        # Reached for what neither the class nor a native module has, and for what the baseline may not serve.
        if name in CONTRACT_TYPES:
            value = getattr(importlib.import_module(_OPS_TYPES), name, None)
            if value is not None:
                return value
        if name in CONTRACT_OPS:
            return self._baseline(name)
        raise AttributeError(f"{type(self).__name__} has no device operation {name!r}")

    def _baseline(self, name: str) -> Any:
        """The baseline's op, unless callers rely on something that it would not keep.

        Raises:
            AttributeError: There is none, or it must not stand in.
        """
        op = getattr(importlib.import_module(_TORCH_OPS), name, None)
        me = type(self).__name__
        if op is None:
            raise AttributeError(f"{me} has no device operation {name!r}")
        if (
            name in STREAM_ORDERED_OPS
            and not self.is_synchronous
            and not is_stream_ordered(op, default=False)
        ):
            raise AttributeError(
                f"{me} has no stream-ordered device operation {name!r}: the baseline's does not wait for the "
                "stream, so it must not stand in"
            )
        partner = PARTNERS.get(name)
        if partner and self._is_replaced(partner) and not self._is_replaced(name):
            raise AttributeError(
                f"{me} has no device operation {name!r}: its {partner!r} is not the baseline's, which would "
                "not hear of what it records; bring both"
            )
        return op
