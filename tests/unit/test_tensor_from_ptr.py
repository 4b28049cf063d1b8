"""``tensor_from_ptr`` of the baseline: the same memory, seen as a tensor, or an error that says why not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.v1.platform.base.device_ops import DeviceOps

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

OPS = DeviceOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@given(shape=st.lists(st.integers(0, 4), max_size=4), dtype=st.sampled_from(DTYPES))
def test_the_tensor_is_the_memory_at_the_address_and_owns_none(shape: list[int], dtype: Any) -> None:
    count = torch.Size(shape).numel()
    memory = torch.zeros(count * dtype.itemsize + 8, dtype=torch.uint8)
    view = OPS.tensor_from_ptr(memory.data_ptr(), shape, dtype, "cpu")
    assert (list(view.shape), view.dtype, view.is_contiguous()) == (shape, dtype, True)
    assert count == 0 or view.data_ptr() == memory.data_ptr()
    view.view(-1).view(torch.uint8).fill_(1)
    assert int(memory.sum()) == count * dtype.itemsize
    del view
    assert int(memory[-8:].sum()) == 0


@pytest.mark.parametrize(
    ("ptr", "shape", "device", "match"),
    [
        (0, (1,), "cpu", "0: expected a positive address"),
        (-8, (1,), "cpu", "-8: expected a positive address"),
        (1 << 70, (1,), "cpu", "expected a positive address"),
        ((1 << 64) - 4, (16,), "cpu", "expected a positive address"),
        (1 << 20, (1 << 40, 1 << 40), "cpu", "expected a positive address"),
        (1 << 20, (2, -1), "cpu", "expected sizes of 0 or more"),
        (1 << 20, (1,), "meta", "host memory only"),
    ],
)
def test_what_is_no_host_memory_is_refused(ptr: int, shape: tuple[int, ...], device: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_from_ptr: .*{match}"):
        OPS.tensor_from_ptr(ptr, shape, torch.uint8, device)
