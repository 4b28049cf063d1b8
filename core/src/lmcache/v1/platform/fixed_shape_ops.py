"""Ops of a device that compiles a graph per shape: blocks and slots in fixed shapes, an end of the step after all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.op_contract import serves, takes

if TYPE_CHECKING:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

__all__ = ["FixedShapeOps"]

_BY_SLOT = {"multi_layer_kv_transfer": "multi_layer", "single_layer_kv_transfer": "single_layer"}
"""Ops that ``fixed_shape_slots`` serves where the object is in host memory; torch's otherwise."""
_ENDS_A_STEP = (
    *_BY_SLOT,
    "multi_layer_kv_transfer_unilateral",
    "single_layer_kv_transfer_sgl",
    "load_and_reshape_flash",
    "reshape_and_cache_back_flash",
    "lmcache_memcpy_async",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
)
"""Ops that stay torch's. Where a graph is gathered, nothing of them begins before the step is ended."""


def _why_not(row: KVFormat) -> str:
    return "" if row.is_block_addressable else "it has no block axis"


class FixedShapeOps(DeviceOps):
    """See :class:`DeviceOps`. A subclass says what its device needs. Addresses of device memory are not taken."""

    def _mover(self) -> FixedShapeMover | None:
        """What moves blocks and slots; None leaves them to torch, in shapes that follow the request."""
        return None

    def _end_step(self) -> None:
        """Have what was queued run, on a device that gathers operations first. Waits for nothing."""

    @serves(_why_not)
    @takes("tensors")
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
        """In fixed shapes; what does not fit goes to the baseline, which says why or serves it.

        Objects on the device are neither waited for nor staged. Those in host memory go through the stage, and are
        there on return.
        """
        from lmcache.v1.platform.fixed_shape_blocks import transfer

        given = (
            paged, objects, block_ids, device, direction, shape_desc, chunk_size, engine_kv_format,
            skip_prefix_n_blocks,
        )  # fmt: skip
        mover = self._mover()
        if mover is None or not transfer(mover, *given):
            torch_ops.multi_layer_block_kv_transfer(*given)
            self._end_step()  # the mover has ended its own


def _ending_a_step(op: Callable[..., Any], by_slot: str = "") -> Callable[..., Any]:
    def call(self: FixedShapeOps, *args: Any, **kwargs: Any) -> Any:
        answer = None if _in_fixed_shapes(self, by_slot, args, kwargs) else op(*args, **kwargs)
        self._end_step()
        return answer

    call.__name__, call.__doc__ = op.__name__, op.__doc__
    vars(call).update(vars(op))  # the formats are the baseline's
    return takes("tensors")(call)


def _in_fixed_shapes(ops: FixedShapeOps, by_slot: str, args: Any, kwargs: Any) -> bool:
    mover = ops._mover() if by_slot else None
    if mover is None:
        return False
    from lmcache.v1.platform import fixed_shape_slots

    return bool(getattr(fixed_shape_slots, by_slot)(mover, *args, **kwargs))


for _name in _ENDS_A_STEP:
    setattr(FixedShapeOps, _name, _ending_a_step(getattr(torch_ops, _name), _BY_SLOT.get(_name, "")))
