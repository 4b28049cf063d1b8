"""Ops that compute on KV content: rotation against numpy in double precision, the CacheGen coder there and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lmcache.testing import needs
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device")

_CODER = ("calculate_cdf", "encode_fast_new", "decode_fast_new", "decode_fast_prefsum")
_TOKENS, _HEADS, _SIZE, _ROTARY, _POSITIONS = 7, 3, 16, 12, 64


@contextmanager
def _offered(ops: DeviceOps, *names: str) -> Iterator[None]:
    """Skip where an op is absent, or is the baseline's and torch has not what it needs on this device."""
    absent = [name for name in names if not hasattr(ops, name)]
    if absent:
        pytest.skip(f"not there: {', '.join(absent)}")
    try:
        yield
    except NotImplementedError as exc:
        if not set(names) <= set(ops.binding_report().baseline):
            raise
        pytest.skip(
            f"the baseline's {names[0]} needs more of torch on this device: {str(exc).splitlines()[0]}"
        )


def _table() -> Any:
    angles = np.outer(np.arange(_POSITIONS), 100.0 ** (-np.arange(_ROTARY // 2) / (_ROTARY // 2)))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _rotated(key: Any, old: Any, new: Any, is_neox: bool) -> Any:
    """Keys ``[T, heads, width]`` of ``old`` positions turned to ``new`` ones: the factor exp(i (new - old) angle)."""
    half = _ROTARY // 2
    frequencies = 100.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * np.outer(new - old, frequencies))[:, None, :]
    first, second = (
        (slice(0, half), slice(half, _ROTARY)) if is_neox else (slice(0, _ROTARY, 2), slice(1, _ROTARY, 2))
    )
    turned = (key[..., first] + 1j * key[..., second]) * turn
    out = key.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("stride", [_SIZE, _SIZE + 5], ids=["tight", "strided"])
def test_keys_are_turned_to_their_new_positions(
    ops: DeviceOps, device: Any, dev: Any, is_neox: bool, stride: int
) -> None:
    import torch

    name = "rotary_embedding_k_fused" if stride == _SIZE else "rotary_embedding_k_fused_strided"
    rng = np.random.default_rng(0)
    key = rng.standard_normal((_TOKENS, _HEADS, stride)).astype(np.float32)
    old, new = rng.integers(0, _POSITIONS, (2, _TOKENS))
    old[3] = new[3]
    with _offered(ops, name):
        mine = torch.from_numpy(key.copy()).to(device)
        places = [torch.from_numpy(value).to(device) for value in (old, new)]
        sizes = (_SIZE,) if stride == _SIZE else (_SIZE, stride)
        getattr(ops, name)(*places, mine, *sizes, torch.from_numpy(_table()).to(device), is_neox)
        dev.synchronize()
    found = mine.cpu().numpy()
    assert np.allclose(found, _rotated(key.astype(np.float64), old, new, is_neox), atol=1e-4, rtol=1e-4)
    assert np.array_equal(found[..., _ROTARY:], key[..., _ROTARY:]), "elements that are not turned changed"


def test_what_the_coder_wrote_it_reads_back(ops: DeviceOps, device: Any, dev: Any) -> None:
    import torch

    layers, tokens, channels, bins = 2, 33, 5, 17
    symbols = np.random.default_rng(1).integers(0, bins, (layers, tokens, channels))
    with _offered(ops, *_CODER):
        mine = torch.from_numpy(symbols.astype(np.int16)).to(device)
        cdf = ops.calculate_cdf(mine, bins)
        assert tuple(cdf.shape) == (layers, channels, bins + 1)
        out = torch.zeros(layers, channels, 4 * tokens, dtype=torch.uint8).to(device)
        lengths = torch.zeros(layers, channels, dtype=torch.int32).to(device)
        ops.encode_fast_new(cdf, mine, out, lengths)
        back = torch.zeros(layers, tokens, channels, dtype=torch.int16).to(device)
        ops.decode_fast_new(cdf, out, lengths, back)
        dev.synchronize()
        assert np.array_equal(back.cpu().numpy(), symbols)
        sizes, rows = lengths.cpu().reshape(-1).tolist(), out.cpu().reshape(layers * channels, -1)
        joined = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).to(device)
        ends = torch.tensor(np.cumsum(sizes).reshape(layers, channels), dtype=torch.int32).to(device)
        again = torch.zeros(layers, tokens, channels, dtype=torch.int16).to(device)
        ops.decode_fast_prefsum(cdf, joined, ends, again)
        dev.synchronize()
        assert np.array_equal(again.cpu().numpy(), symbols)
