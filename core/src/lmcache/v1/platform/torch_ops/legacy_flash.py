"""Per-layer gather and scatter of an object of all layers, for callers older than the layer-wise ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.op_contract import serves, stream_ordered, takes
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._slot_call import is_separate, separate_buffers, transfer

if TYPE_CHECKING:
    import torch

__all__ = ["load_and_reshape_flash", "reshape_and_cache_back_flash"]


@stream_ordered
@serves(is_separate)
@takes("tensors")
def load_and_reshape_flash(
    kv: torch.Tensor, kcache: torch.Tensor, vcache: torch.Tensor, slots: Any, layer: int
) -> None:
    """Read slots of one layer's pages into the object: pages to ``kv[:, layer]``.

    Args:
        kv: ``[2, NL, T, hidden]``, rows contiguous.
        kcache, vcache: ``[NB, BS, NH, HS]`` or ``[slots, NH, HS]``, any strides.
        slots: Integers ``[n]``, ``n <= T``; a negative one leaves the object's row alone.
        layer: Which layer of the object.

    Raises:
        LayoutError, TypeError, ValueError: Operands that do not fit or a layer or slot out of range; see
            ``slot_transfer``.
    """
    _transfer("load_and_reshape_flash", kv, kcache, vcache, slots, layer, TransferDirection.D2H)


@stream_ordered
@serves(is_separate)
@takes("tensors")
def reshape_and_cache_back_flash(
    kv: torch.Tensor, kcache: torch.Tensor, vcache: torch.Tensor, slots: Any, layer: int
) -> None:
    """Write slots of one layer's pages from the object: ``kv[:, layer]`` to pages.

    Args and errors as for :func:`load_and_reshape_flash`; a negative slot moves nothing.
    """
    _transfer("reshape_and_cache_back_flash", kv, kcache, vcache, slots, layer, TransferDirection.H2D)


def _transfer(
    op: str, kv: Any, kcache: Any, vcache: Any, slots: Any, layer: int, way: TransferDirection
) -> None:
    row, paged = separate_buffers(op, [kcache, vcache])
    if hasattr(kv, "narrow") and kv.dim() == 4:
        if not 0 <= layer < kv.shape[1]:
            raise ValueError(f"{op}: layer={layer}: expected 0 to {kv.shape[1] - 1}")
        kv = kv.narrow(1, layer, 1)
    transfer(op, row, kv, paged, slots, way)
