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

__all__ = ["CONTRACT_OPS", "CONTRACT_TYPES", "DeviceOps"]

logger = init_logger(__name__)

#: Names a native module may bind as ops. An op listed here need not exist on the baseline: ``hasattr`` tells.
CONTRACT_OPS = frozenset(
    [
        "multi_layer_block_kv_transfer",
        "multi_layer_kv_transfer",
        "multi_layer_kv_transfer_unilateral",
        "single_layer_kv_transfer",
        "single_layer_kv_transfer_sgl",
        "load_and_reshape_flash",
        "reshape_and_cache_back_flash",
        "lmcache_memcpy_async",
        "batched_memcpy",
        "tensor_from_ptr",
        "record_completion_on_stream",
        "drain_recorded_completions",
        "record_event_on_stream",
        "drain_recorded_events",
        "get_gpu_pci_bus_id",
        "calculate_cdf",
        "encode_fast_new",
        "decode_fast_new",
        "decode_fast_prefsum",
        "rotary_embedding_k_fused",
        "rotary_embedding_k_fused_strided",
        "execute_object_group_transfer",
        "execute_direct_copy_transfer",
        "batch_memcpy_supported",
        "direct_copy_format_supported",
        "execute_cb_retrieve_plan_flat",
        "pop_completed_phase_timings",
        *(
            f"{verb}_{kind}_ptr"
            for verb in ("alloc", "free")
            for kind in (
                "pinned",
                "pinned_numa",
                "hugepage_pinned",
                "hugepage_pinned_numa",
                "numa",
                "shm_pinned",
            )
        ),
    ]
)

#: Names a native module may bind as types.
CONTRACT_TYPES = frozenset(
    [
        "TransferDirection",
        "EngineKVFormat",
        "GPUKVFormat",
        "PageBufferShapeDesc",
        "StagingCopy",
        "LaunchVar",
        "BatchStep",
        "KernelGroupSpec",
        "DirectCopyGroupSpec",
        "DirectCopyObject",
        "CBGroupSpec",
        "TransferPhase",
    ]
)

_OPS_TYPES = "lmcache.v1.platform.ops_types"
_TORCH_OPS = "lmcache.v1.platform.torch_ops"


class DeviceOps:
    """Operations on a device's memory; this class is the torch baseline.

    An op that a backend lacks raises AttributeError, so ``hasattr(ops, name)`` is the probe for it. Types
    (``PageBufferShapeDesc`` and the like) read through the instance, so a native type replaces ours.
    """

    device_type: ClassVar[str] = ""

    def ensure_native(self) -> None:
        """Bind native code if this backend has any. Called once, by ``DeviceSpec.get_ops``."""
        return None

    def bind_native(self, module: ModuleType) -> None:
        """Let the ops and types of ``module`` replace those of this instance.

        Names outside the contract (helpers, imports) are not bound: an accident of a module's namespace
        must not become an op. What was skipped is logged at DEBUG.

        Args:
            module: Any importable module whose functions carry the contract's names and signatures.
        """
        skipped = []
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            if name in CONTRACT_OPS or name in CONTRACT_TYPES:
                setattr(self, name, value)
            else:
                skipped.append(name)
        if skipped:
            logger.debug("%s: not part of the contract, not bound: %s", module.__name__, ", ".join(skipped))

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
        # Looked up by name: this contract stands above the baseline and must not depend on it statically.
        importlib.import_module(_TORCH_OPS).multi_layer_block_kv_transfer(
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
        if name in CONTRACT_TYPES:
            value = getattr(importlib.import_module(_OPS_TYPES), name, None)
            if value is not None:
                return value
        raise AttributeError(f"{type(self).__name__} has no device operation {name!r}")
