"""Ops that compute on KV content, on the native kernels: rotation, and the CacheGen coder.

The baseline says what is right. A call that the kernels do not take, and one in which something is wrong, goes to
it: it serves the first, and says of the second what is wrong.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.platform import torch_ops
from lmcache_cuda import runtime
from lmcache_cuda.operands import is_tensor

__all__ = [
    "calculate_cdf",
    "decode_fast_new",
    "decode_fast_prefsum",
    "encode_fast_new",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
]

_FLOATS = ("float16", "bfloat16", "float32")
_POSITIONS = ("int32", "int64")
_SYMBOLS = ("uint8", "int8", "int16", "int32", "int64")
_MAX_BINS = 1 << 16


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fit(*operands: tuple[Any, int, tuple[str, ...]]) -> bool:
    """Whether all are contiguous tensors of one GPU, each of its rank and of one of its types."""
    return all(
        is_tensor(t) and runtime.is_on_device(t) and t.device == operands[0][0].device and t.dim() == rank
        and t.is_contiguous() and _name(t) in types
        for t, rank, types in operands
    )  # fmt: skip


# --- rotation ----------------------------------------------------------------------------------------------


def rotary_embedding_k_fused(
    old_pos: Any, new_pos: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool
) -> None:
    if not _rotated(old_pos, new_pos, key, head_size, head_size, cos_sin_cache, is_neox):
        torch_ops.rotary_embedding_k_fused(old_pos, new_pos, key, head_size, cos_sin_cache, is_neox)


def rotary_embedding_k_fused_strided(
    old_pos: Any, new_pos: Any, key: Any, head_size: int, head_stride: int, cos_sin_cache: Any, is_neox: bool
) -> None:
    if not _rotated(old_pos, new_pos, key, head_size, head_stride, cos_sin_cache, is_neox):
        torch_ops.rotary_embedding_k_fused_strided(
            old_pos, new_pos, key, head_size, head_stride, cos_sin_cache, is_neox
        )


def _rotated(old: Any, new: Any, key: Any, size: int, stride: int, cache: Any, is_neox: bool) -> bool:
    """Queue the kernel; False, and nothing queued, where the operands are not for it."""
    if not _fit((cache, 2, _FLOATS), (old, 1, _POSITIONS), (new, 1, _POSITIONS)) or old.dtype != new.dtype:
        return False
    if not is_tensor(key) or key.device != cache.device or _name(key) not in _FLOATS:
        return False
    tokens, rotated = old.shape[0], cache.shape[1]
    if not 0 < rotated <= size <= stride or rotated % 2 or new.shape[0] != tokens:
        return False
    if key.dim() == 2 and key.shape[0] == tokens and key.shape[1] % stride == 0:
        heads, head_stride = key.shape[1] // stride, stride * key.stride(1)
    elif key.dim() == 3 and key.shape[0] == tokens and key.shape[2] == stride:
        heads, head_stride = key.shape[1], key.stride(1)
    else:
        return False
    if not cache.shape[0] or not key.stride(-1):  # nothing to turn by, or one element that stands for many
        return False
    if not tokens or not heads:
        return True
    ordinal, stream = runtime.current_stream(key.device)
    runtime.native().rotary(
        ordinal, stream, old.data_ptr(), new.data_ptr(), _name(old), key.data_ptr(), _name(key), cache.data_ptr(),
        _name(cache), cache.shape[0], tokens, heads, rotated, key.stride(0), head_stride, bool(is_neox),
        key.stride(-1),
    )  # fmt: skip
    return True


# --- CacheGen ----------------------------------------------------------------------------------------------
# As the baseline's, these read results back to check them, and so wait for the device.


def calculate_cdf(symbols: Any, num_bins: int) -> Any:
    import torch

    if not _fit((symbols, 3, _SYMBOLS)) or not 2 <= num_bins <= _MAX_BINS or not symbols.numel():
        return torch_ops.calculate_cdf(symbols, num_bins)
    layers, tokens, channels = symbols.shape
    where = symbols.device
    cdf = torch.empty((layers, channels, num_bins + 1), dtype=torch.int16, device=where)
    counts = torch.empty(num_bins * layers * channels, dtype=torch.int32, device=where)
    status = torch.empty(layers * channels, dtype=torch.uint8, device=where)
    ordinal, stream = runtime.current_stream(where)
    runtime.native().cachegen_cdf(
        ordinal, stream, symbols.data_ptr(), _name(symbols), layers, tokens, channels, num_bins, counts.data_ptr(),
        cdf.data_ptr(), status.data_ptr(),
    )  # fmt: skip
    return cdf if _sound(status) else torch_ops.calculate_cdf(symbols, num_bins)


def encode_fast_new(cdf: Any, symbols: Any, out: Any, lengths: Any) -> None:
    if not _encoded(cdf, symbols, out, lengths):
        torch_ops.encode_fast_new(cdf, symbols, out, lengths)


def _encoded(cdf: Any, symbols: Any, out: Any, lengths: Any) -> bool:
    import torch

    if not _fit((cdf, 3, ("int16",)), (symbols, 3, _SYMBOLS), (out, 3, ("uint8",)), (lengths, 2, _POSITIONS)):
        return False
    layers, tokens, channels = symbols.shape
    streams = (layers, channels)
    if any(tuple(t.shape[:2]) != streams for t in (cdf, out, lengths)) or not symbols.numel():
        return False
    bins = cdf.shape[2] - 1
    if not 2 <= bins <= _MAX_BINS:
        return False
    sizes = torch.empty(layers * channels, dtype=torch.int64, device=cdf.device)
    status = torch.empty(layers * channels, dtype=torch.uint8, device=cdf.device)
    ordinal, stream = runtime.current_stream(cdf.device)
    native = runtime.native()
    work = (
        cdf.data_ptr(),
        bins,
        symbols.data_ptr(),
        _name(symbols),
        layers,
        tokens,
        channels,
        sizes.data_ptr(),
    )
    native.cachegen_measure(ordinal, stream, *work, status.data_ptr())
    if not _sound(status) or int(sizes.max()) > out.shape[2]:
        return False
    native.cachegen_encode(ordinal, stream, *work, out.data_ptr(), out.shape[2])
    lengths.copy_(sizes.view(streams))
    return True


def decode_fast_new(cdf: Any, data: Any, lengths: Any, out: Any) -> None:
    import torch

    if _fit((cdf, 3, ("int16",)), (data, 3, ("uint8",)), (lengths, 2, _POSITIONS)):
        streams, capacity = lengths.numel(), data.shape[2]
        starts = torch.arange(streams, device=data.device) * capacity
        sizes = lengths.reshape(-1).to(torch.int64)
        in_range = not streams or bool(((sizes >= 0) & (sizes <= capacity)).all())
        fits = tuple(data.shape[:2]) == tuple(lengths.shape)
        if in_range and fits and _decoded(cdf, data, starts, starts + sizes, out, lengths.shape):
            return
    torch_ops.decode_fast_new(cdf, data, lengths, out)


def decode_fast_prefsum(cdf: Any, data: Any, prefix_sums: Any, out: Any) -> None:
    import torch

    if _fit((cdf, 3, ("int16",)), (data, 1, ("uint8",)), (prefix_sums, 2, _POSITIONS)):
        ends = prefix_sums.reshape(-1).to(torch.int64)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]]) if ends.numel() else ends
        in_range = bool(((starts <= ends) & (ends <= data.numel()) & (starts >= 0)).all())
        if in_range and _decoded(cdf, data, starts, ends, out, prefix_sums.shape):
            return
    torch_ops.decode_fast_prefsum(cdf, data, prefix_sums, out)


def _decoded(cdf: Any, data: Any, starts: Any, ends: Any, out: Any, streams: Any) -> bool:
    """Decode aside, and hand over only what is whole; False if something is not, or not for the kernel."""
    import torch

    if not is_tensor(out) or out.dim() != 3 or out.device != cdf.device or _name(out) not in _SYMBOLS:
        return False
    layers, tokens, channels = out.shape
    bins = cdf.shape[2] - 1
    if (layers, channels) != tuple(streams) or tuple(cdf.shape[:2]) != tuple(streams) or not out.numel():
        return False
    if not 2 <= bins <= _MAX_BINS or torch.iinfo(out.dtype).max < bins - 1:
        return False
    symbols = torch.empty((layers, tokens, channels), dtype=out.dtype, device=out.device)
    status = torch.empty(layers * channels, dtype=torch.uint8, device=out.device)
    ordinal, stream = runtime.current_stream(cdf.device)
    runtime.native().cachegen_decode(
        ordinal, stream, cdf.data_ptr(), bins, data.data_ptr(), starts.data_ptr(), ends.data_ptr(),
        symbols.data_ptr(), _name(symbols), layers, tokens, channels, status.data_ptr(),
    )  # fmt: skip
    if not _sound(status):
        return False
    out.copy_(symbols)
    return True


def _sound(status: Any) -> bool:
    return not bool((status != runtime.native().CACHEGEN_OK).any())
