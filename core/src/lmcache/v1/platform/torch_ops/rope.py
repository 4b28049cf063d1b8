"""Moving keys to other positions: the rotary embedding of one position is replaced by that of another.

The table holds, for position p and frequency i, cos and sin of p * theta_i, perhaps both multiplied by one
factor (the attention scaling of YaRN and its kin). Seen as complex numbers ``z[p, i] = cos + j sin``, a key
that the engine rotated at ``old`` carries the factor ``z[old]``. So the op multiplies by ``z[new] / z[old]``:
one multiplication, hence one rounding, and any common factor of the table cancels out.

Nothing here waits for the device: no value is read back, and on a device the work is queued on the current
stream. So values are checked on the CPU only; elsewhere torch's own indexing answers for a bad position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.op_contract import stream_ordered
from lmcache.v1.platform.torch_ops._operands import FLOATS, INDICES, Operands

if TYPE_CHECKING:
    import torch

__all__ = ["rotary_embedding_k_fused", "rotary_embedding_k_fused_strided"]

#: Pairs at a time on the CPU: what lies in between then stays in its caches.
_TILE = 1 << 17


@stream_ordered
def rotary_embedding_k_fused(
    old_pos: torch.Tensor,
    new_pos: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Move keys from ``old_pos`` to ``new_pos``, in place.

    Where both are equal the key keeps every bit. Arithmetic is float32; the result is rounded once, to the
    dtype of ``key``. Quantised keys are refused: dequantise, move, quantise.

    Args:
        old_pos: ``[T]``, int32 or int64: the positions at which the keys were rotated.
        new_pos: ``[T]``, likewise: the positions to move them to.
        key: ``[T, NH * head_size]`` or ``[T, NH, head_size]``, float16, bfloat16 or float32, of any strides.
            So a part of a wider row (the rotary part of an MLA latent) is passed as a view.
        head_size: Elements per head.
        cos_sin_cache: ``[positions, rot_dim]``, cos in the first half of a row and sin in the second, as
            vLLM keeps it; a float type as above. ``rot_dim`` is even and at most ``head_size``: the leading
            ``rot_dim`` elements of a head are rotated, the rest stays.
        is_neox: True: element i pairs with element i + rot_dim / 2. False: 2i pairs with 2i + 1.

    Raises:
        TypeError: An operand is no tensor or of another dtype.
        ValueError: Shapes do not fit or devices differ. On the CPU also: a position outside the table, or an
            old position whose table row is no rotation (cos and sin both zero, or not finite).
    """
    _move("rotary_embedding_k_fused", old_pos, new_pos, key, head_size, head_size, cos_sin_cache, is_neox)


@stream_ordered
def rotary_embedding_k_fused_strided(
    old_pos: torch.Tensor,
    new_pos: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    head_stride: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Like :func:`rotary_embedding_k_fused`, for heads that lie ``head_stride`` elements apart.

    Args:
        old_pos: As there.
        new_pos: As there.
        key: ``[T, NH * head_stride]`` or ``[T, NH, head_stride]``.
        head_size: The leading elements of each head that are the key; what lies behind them stays.
        head_stride: Elements from one head to the next, at least ``head_size``.
        cos_sin_cache: As there.
        is_neox: As there.

    Raises:
        TypeError: As there.
        ValueError: As there.
    """
    op = "rotary_embedding_k_fused_strided"
    _move(op, old_pos, new_pos, key, head_size, head_stride, cos_sin_cache, is_neox)


def _move(
    op: str, old_pos: Any, new_pos: Any, key: Any, head_size: int, stride: int, table: Any, is_neox: bool
) -> None:
    """Check all, then rotate."""
    import torch

    heads = _checked_heads(op, old_pos, new_pos, key, head_size, stride, table)
    turn = _turn(op, old_pos, new_pos, table)
    stays = (old_pos == new_pos)[:, None, None]
    half = table.shape[1] // 2
    if is_neox:
        pairs = heads[..., :half], heads[..., half : 2 * half]
    else:
        pairs = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    tokens, per_token = heads.shape[0], max(1, half * heads.shape[1])
    step = max(1, _TILE // per_token if heads.device.type == "cpu" else tokens)
    with torch.inference_mode():  # tensors made in it can only be written in it
        for start in range(0, tokens, step):
            tile = slice(start, start + step)
            _rotate(*(operand[tile] for operand in (*pairs, *turn, stays)))


def _rotate(
    first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, stays: torch.Tensor
) -> None:
    """Turn the pairs (first, second) ``[T, NH, n]``. Both are read before either is written."""
    import torch

    x, y = first.float(), second.float()
    turned = (x * cos).addcmul_(y, sin, value=-1), (y * cos).addcmul_(x, sin)
    # Multiplying by one and adding zero is not the identity on -0.0, infinity and NaN.
    for part, new in zip((first, second), turned, strict=True):
        part.copy_(torch.where(stays, part, new.to(part.dtype)))


def _checked_heads(
    op: str, old_pos: Any, new_pos: Any, key: Any, head_size: int, stride: int, table: Any
) -> torch.Tensor:
    """The key as ``[T, NH, stride]``, a view, once all operands fit each other."""
    if head_size < 1 or stride < head_size:
        raise ValueError(f"{op}: head_size={head_size}, head_stride={stride}: expected 1 <= size <= stride")
    operands = Operands(op)
    operands.add("old_pos", old_pos, "T", INDICES)
    operands.add("new_pos", new_pos, "T", INDICES)
    operands.add("cos_sin_cache", table, "positions rot_dim", FLOATS)
    rot_dim = operands.sizes["rot_dim"]
    if rot_dim % 2 or rot_dim > head_size:
        raise ValueError(f"{op}: rot_dim={rot_dim} of cos_sin_cache: expected even, at most {head_size}")
    if getattr(key, "ndim", 3) == 2:
        operands.add("key", key, "T width", FLOATS)
        if key.shape[1] % stride:
            raise ValueError(
                f"{op}: key has {key.shape[1]} elements per token: expected a multiple of {stride}"
            )
        return key.unflatten(1, (key.shape[1] // stride, stride))
    operands.sizes["head"] = stride
    operands.add("key", key, "T NH head", FLOATS)
    return key


def _turn(op: str, old_pos: Any, new_pos: Any, table: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary part of ``z[new] / z[old]``, each ``[T, 1, rot_dim / 2]`` of float32."""
    on_cpu = table.device.type == "cpu"
    for name, positions in (("old_pos", old_pos), ("new_pos", new_pos)) if on_cpu else ():
        _check_positions(op, name, positions, table.shape[0])
    old_cos, old_sin = table.index_select(0, old_pos).float().unsqueeze(1).chunk(2, dim=-1)
    new_cos, new_sin = table.index_select(0, new_pos).float().unsqueeze(1).chunk(2, dim=-1)
    norm = old_cos * old_cos + old_sin * old_sin
    if on_cpu and not bool((norm.isfinite() & (norm > 0)).all()):
        raise ValueError(
            f"{op}: cos_sin_cache: a row named by old_pos is no rotation: expected finite, not zero"
        )
    cos = (new_cos * old_cos + new_sin * old_sin) / norm
    sin = (new_sin * old_cos - new_cos * old_sin) / norm
    return cos, sin


def _check_positions(op: str, name: str, positions: Any, count: int) -> None:
    if positions.numel() == 0:
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low < 0 or high >= count:
        bad = low if low < 0 else high
        raise ValueError(f"{op}: {name} has {bad}: expected 0 to {count - 1}, the rows of cos_sin_cache")
