"""Chunk objects of one format made into those of another with equal content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.torch_ops.formats import served_row

if TYPE_CHECKING:
    import torch

__all__ = ["canonical_chunk", "convert_chunk"]

_OP = "convert_chunk"


def _why_not(row: KVFormat) -> str:
    return "" if row.token_addressable else "its pages can only be taken whole"


def canonical_chunk(chunk: torch.Tensor, kv_format: int | str | KVFormat, num_heads: int) -> torch.Tensor:
    """A chunk with K and V apart: ``[planes, NL, slots, NH, HS]``, a view.

    Args:
        chunk: ``[kv_size, NL, slots, NH * HS]``, or without the first axis where kv_size is 1. Packed K and V
            stand side by side in a head.
        kv_format: Id, name or row of its format.
        num_heads: KV heads; 1 for MLA.

    Returns:
        Two planes, K and V; one for MLA, and for rows whose tensors are K alone or V alone.

    Raises:
        LayoutError: Pages of the format can only be taken whole, or the chunk does not fit the format.
    """
    row = served_row(_OP, kv_format, _why_not)
    whole = chunk.unsqueeze(0) if chunk.dim() == 3 and row.kv_size == 1 else chunk
    parts = num_heads * (2 if row.is_packed else 1)
    if (
        whole.dim() != 4
        or whole.shape[0] != row.kv_size
        or num_heads < 1
        or (row.is_mla and num_heads != 1)
        or whole.shape[3] % parts
    ):
        raise LayoutError(
            f"{_OP}: {row.label}: chunk of shape {tuple(chunk.shape)} with {num_heads} heads: expected "
            f"({row.kv_size}, NL, slots, a multiple of {max(parts, 1)}){', 1 head' if row.is_mla else ''}"
        )
    if not row.is_packed:
        return whole.unflatten(3, (num_heads, -1))
    return whole[0].unflatten(2, (num_heads, 2, -1)).movedim(3, 0)


def convert_chunk(
    chunk: torch.Tensor,
    source: int | str | KVFormat,
    target: int | str | KVFormat,
    num_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The content of a chunk of format ``source`` as a chunk of format ``target``.

    Chunks are token-major whatever their pages are, so what differs is whether K and V are planes or packed.
    Copies; on a device it is queued on the current stream.

    Args:
        chunk: As :func:`canonical_chunk` takes it.
        source: Its format.
        target: The format wanted.
        num_heads: KV heads; 1 for MLA.
        out: Where to put it: the target's shape, the chunk's dtype, and no byte in common with ``chunk``.

    Returns:
        ``out``, or a new tensor ``[kv_size, NL, slots, NH * HS]``.

    Raises:
        LayoutError: A format's pages can only be taken whole, the two hold different things (MLA and K with
            V; K with V and K or V alone), or a shape or dtype does not fit.
    """
    import torch

    given = canonical_chunk(chunk, source, num_heads)
    have, want = served_row(_OP, source, _why_not), served_row(_OP, target, _why_not)
    if _holds(have) != _holds(want):
        raise LayoutError(
            f"{_OP}: {have.label} holds {_holds(have)}, {want.label} {_holds(want)}: their contents do not "
            "correspond"
        )
    _, layers, slots, heads, width = given.shape
    hidden = heads * width * (2 if want.is_packed else 1)
    shape = (want.kv_size, layers, slots, hidden)
    if out is None:
        out = chunk.new_empty(shape)
    _check_out(want, out, shape, chunk.dtype)
    with torch.inference_mode():  # tensors made in it can only be written in it
        canonical_chunk(out, want, num_heads).copy_(given)
    return out


def _holds(row: KVFormat) -> str:
    if row.is_mla:
        return "one latent per slot (MLA)"
    return "K or V alone" if row.is_single_kv else "K and V"


def _check_out(row: KVFormat, out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    flat = shape[1:] if row.kv_size == 1 else shape
    if tuple(out.shape) not in (shape, flat) or out.dtype != dtype:
        raise LayoutError(
            f"{_OP}: {row.label}: out is {tuple(out.shape)} of {out.dtype}: expected {shape} of {dtype}"
        )
