"""Device operations: one strategy object per backend.

The base class delegates to the torch baseline, ``lmcache.v1.platform.torch_ops``. A backend replaces an op
by overriding the method, or all that a native module has through ``bind_native``. Ops are plain methods:
they sit on the transfer path.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.base.binding import Binding, BindingReport, examine
from lmcache.v1.platform.base.op_contract import (
    CONTRACT_OPS,
    CONTRACT_TYPES,
    NATIVE_ABI,
    STREAM_ORDERED_OPS,
    is_stream_ordered,
)

__all__ = ["CONTRACT_OPS", "CONTRACT_TYPES", "NATIVE_ABI", "STREAM_ORDERED_OPS", "BindingReport", "DeviceOps"]

logger = init_logger(__name__)

_OPS_TYPES = "lmcache.v1.platform.ops_types"
_TORCH_OPS = "lmcache.v1.platform.torch_ops"


class DeviceOps:
    """Operations on a device's memory; this class is the torch baseline.

    Ops of the baseline need no method here: what the class lacks is looked up there. An op that a backend
    lacks raises AttributeError, so ``hasattr(ops, name)`` is the probe for it. Types (``PageBufferShapeDesc``
    and the like) read through the instance, so a native type replaces ours.
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
                an integer ``LMCACHE_NATIVE_ABI``, that must be the core's.

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
        overridden = [n for n in sorted(CONTRACT_OPS) if n not in own and self._is_overridden(n)]
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

    def _is_overridden(self, name: str) -> bool:
        return getattr(type(self), name, None) is not getattr(DeviceOps, name, None)

    def multi_layer_block_kv_transfer(
        self,
        paged: Any,
        objects: Sequence[Any],
        block_ids: Any,
        device: Any,
        direction: int,
        shape_desc: Any,
        chunk_size: int,
        engine_kv_format: int,
        skip_prefix_n_blocks: int = 0,
    ) -> None:
        """Copy whole blocks between paged KV tensors and chunk objects.

        Args:
            paged: The engine's KV tensors, nested as the format's row says.
            objects: Chunk objects, ``[kv_size, NL, slots, NH * HS]`` (or ``[NL, slots, NH * HS]`` where
                kv_size is 1), same dtype as the pages. Object ``i`` takes the block ids
                ``[i * n, (i + 1) * n)`` with ``n = chunk_size // shape_desc.bs``.
            block_ids: 1-D integers: a list or a tensor. May end before the last object is full.
            device: Where the paged tensors lie.
            direction: ``TransferDirection``: H2D (0) writes the pages, D2H (1) reads them.
            shape_desc: ``PageBufferShapeDesc`` of these layers.
            chunk_size: Slots per object, a positive multiple of ``shape_desc.bs``.
            engine_kv_format: Id of the layout's row (``lmcache.v1.kv_layout``).
            skip_prefix_n_blocks: The first so many ids are neither read nor written, nor is the part of the
                objects that belongs to them.

        Raises:
            LayoutError: The format is not served, or tensors do not fit the row or the descriptor.
            ValueError: ``chunk_size``, ``skip_prefix_n_blocks``, ``direction`` or a block id is out of range.
        """
        self._baseline("multi_layer_block_kv_transfer")(
            paged,
            objects,
            block_ids,
            device,
            direction,
            shape_desc,
            chunk_size,
            engine_kv_format,
            skip_prefix_n_blocks,
        )

    def __getattr__(self, name: str) -> Any:
        # Reached for what neither the class nor a native module has.
        if name in CONTRACT_TYPES:
            value = getattr(importlib.import_module(_OPS_TYPES), name, None)
            if value is not None:
                return value
        if name in CONTRACT_OPS:
            return self._baseline(name)
        raise AttributeError(f"{type(self).__name__} has no device operation {name!r}")

    def _baseline(self, name: str) -> Any:
        """The baseline's op, unless callers rely on a stream order that it does not keep."""
        # Looked up by name: this contract stands above the baseline and must not depend on it statically.
        op = getattr(importlib.import_module(_TORCH_OPS), name, None)
        if op is None:
            raise AttributeError(f"{type(self).__name__} has no device operation {name!r}")
        if (
            name in STREAM_ORDERED_OPS
            and not self.is_synchronous
            and not is_stream_ordered(op, default=False)
        ):
            raise AttributeError(
                f"{type(self).__name__} has no stream-ordered device operation {name!r}: the baseline's does "
                "not wait for the stream, so it must not stand in"
            )
        return op
