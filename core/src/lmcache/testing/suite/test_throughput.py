"""Rates beside the device's own ceiling, measured in one run. They are reported; they fail nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.runner import Run
from lmcache.v1.platform.base.device_ops import DeviceOps

pytestmark = needs("device", "block-transfer")

_LAYERS, _BLOCKS, _SLOTS, _HEADS, _WIDTH = 8, 128, 16, 8, 128
_PER_OBJECT = 16
_ROUNDS = 5


def _best(dev: Any, work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        dev.synchronize()
        began = time.perf_counter()
        work()
        dev.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_block_transfer_beside_a_plain_copy_on_the_device(
    ops: DeviceOps, device: Any, dev: Any, run: Run, direction: str
) -> None:
    import torch

    if 13 not in ops.supported_formats("multi_layer_block_kv_transfer"):
        pytest.skip("format not declared: NL_X_NB_BS_NH_CS")
    if "tensors" not in ops.operand_kinds("multi_layer_block_kv_transfer"):
        pytest.skip("operands not declared: tensors")
    shape = (_BLOCKS, _SLOTS, _HEADS, _WIDTH)
    paged = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(_LAYERS)]
    objects = [
        torch.zeros(1, _LAYERS, _PER_OBJECT * _SLOTS, _HEADS * _WIDTH, dtype=torch.bfloat16, device=device)
        for _ in range(_BLOCKS // _PER_OBJECT)
    ]
    desc = ops.PageBufferShapeDesc()
    values = {"kv_size": 1, "nl": _LAYERS, "nb": _BLOCKS, "bs": _SLOTS, "nh": _HEADS, "hs": _WIDTH}
    for name, value in (values | {"element_size": 2}).items():
        setattr(desc, name, value)
    ids = torch.randperm(_BLOCKS, generator=torch.Generator().manual_seed(0)).to(device)
    way = 1 if direction == "gather" else 0
    source = torch.zeros(_LAYERS * _BLOCKS * _SLOTS * _HEADS * _WIDTH, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    ceiling = _best(dev, lambda: target.copy_(source))
    mine = _best(
        dev,
        lambda: ops.multi_layer_block_kv_transfer(
            paged, objects, ids, device, way, desc, _PER_OBJECT * _SLOTS, 13, 0
        ),
    )
    run.report.figures[f"{direction} of random blocks / plain copy of the same bytes"] = ceiling / mine
    assert mine > 0


@needs("async-memcpy")
@pytest.mark.parametrize("way", ["H2D", "D2H"])
def test_copies_between_host_and_device_beside_those_of_torch(
    ops: DeviceOps, device: Any, dev: Any, run: Run, way: str
) -> None:
    import torch

    nbytes = 32 << 20
    host, there = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8).to(device)
    if device.type == "cpu":
        there = there.clone()
    target, source = (there, host) if way == "H2D" else (host, there)
    ceiling = _best(dev, lambda: target.copy_(source))
    direction = 0 if way == "H2D" else 1
    mine = _best(dev, lambda: ops.lmcache_memcpy_async(target, source, nbytes, direction, 0, 4096))
    run.report.figures[f"lmcache_memcpy_async {way} / copy of torch"] = ceiling / mine
    run.report.figures[f"lmcache_memcpy_async {way}, GB/s"] = nbytes / mine / 1e9
    assert mine > 0
